"""Merges collectives that would be waited for together into one op, which is sent as one message.

    gather a; gather b; forward v, which reads both          ->  gather a, b; forward v
    backward v; reduce a; all-reduce a; reduce b; all-reduce b   ->  backward v; reduce a, b; all-reduce a, b

That is what makes `scan(unroll=k)` gather k layers as one: tiny layers cost latency, not bytes.
"""

from collections.abc import Sequence
from typing import Any

from yafsdp_fn.schedules.further_ops import AllReduce
from yafsdp_fn.schedules.ops import Backward, Forward, Gather, Op, Reduce


def merged(ops: Sequence[Op]) -> tuple[Op, ...]:
    """`ops` with neighbouring collectives of a kind merged: gathers for the same compute, reductions after the same."""
    out: list[Any] = []
    reader = _readers(ops)
    open_: dict[Any, int] = {}  # what may be joined, and where it is in `out`
    for index, op in enumerate(ops):
        if isinstance(op, Forward | Backward):
            open_.clear()
        key = _key(op, reader.get(index))
        at = open_.get(key)
        if at is not None and _may_join(op, first := out[at], out[at + 1 :]):
            out[at] = first._replace(**{name: getattr(first, name) + getattr(op, name) for name in _columns(op)})
            continue
        if key is not None:
            open_[key] = len(out)
        out.append(op)
    return tuple(out)


def _key(op: Op, reader: int | None) -> Any:
    """Equal for ops that may be one; None for what is no collective, or what only a later step waits for."""
    if isinstance(op, Gather):
        return None if reader is None else (Gather, op.source, reader)
    if isinstance(op, AllReduce) and op.over == "stages":  # of each unit by other stages
        return None
    return type(op) if isinstance(op, Reduce | AllReduce) else None


def _columns(op: Op) -> list[str]:
    return [name for name in ("units", "slots", "grad_slots") if name in op._fields]


def _may_join(op: Any, first: Any, between: Sequence[Op]) -> bool:
    """Whether `op` may be done with `first`, before what is between them."""
    if any(set(getattr(op, name)) & set(getattr(first, name)) for name in _columns(op)):
        return False
    reads, writes = map(set, op.uses())
    return not any(writes & {*r, *w} or reads & {*w} for r, w in (other.uses() for other in between))


def _readers(ops: Sequence[Op]) -> dict[int, int | None]:
    """Index of each gather -> that of the first compute which reads what it gathers, None where the step ends first."""
    found: dict[int, int | None] = {}
    following: dict[int, int] = {}  # slot -> the compute that reads it next
    for index, op in reversed([*enumerate(ops)]):
        if isinstance(op, Forward | Backward):
            following.update(dict.fromkeys(op.slots, index))
        elif isinstance(op, Gather):
            found[index] = min((following.pop(slot) for slot in op.slots if slot in following), default=None)
    return found
