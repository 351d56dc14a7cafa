"""What the optimizer's exchanges move, from leaves as they were measured."""

from functools import lru_cache

from yafsdp_fn.comm.ranks import padded_numel
from yafsdp_fn.params.owners import Leaf, assign
from yafsdp_fn.schedules.trace import Lent, Trace


def lent_bytes(trace: Trace, units: tuple[int, ...]) -> int:
    """Bytes that a rank sends in an exchange of `units`, on average; zero where nothing has measured their leaves."""
    away = _away(trace.lent, tuple(unit.numel for unit in trace.units), trace.ranks)
    return sum(away.get(unit, 0) for unit in units) // trace.ranks


@lru_cache(maxsize=64)
def _away(lent: tuple[Lent, ...], numels: tuple[int, ...], ranks: int) -> dict[int, int]:
    """Unit -> bytes that travel in one exchange, from all ranks: those of leaves, without what owners have already.

    numels: elements of all units
    """
    padded = {of.unit: padded_numel(numels[of.unit], ranks) // ranks for of in lent}
    leaves = {of.unit: [Leaf("", offset, shape, 0) for offset, shape, _, _ in of.leaves] for of in lent}
    owners = assign([(of.unit, padded[of.unit], leaves[of.unit]) for of in lent], ranks)
    out: dict[int, int] = {}
    for unit, _, measured in lent:
        pairs = zip(leaves[unit], owners[unit], strict=True)
        away = [1 - len(leaf.part(owner, padded[unit])) / max(leaf.numel, 1) for leaf, owner in pairs]
        out[unit] = round(sum(share * nbytes for share, (_, _, nbytes, _) in zip(away, measured, strict=True)))
    return out
