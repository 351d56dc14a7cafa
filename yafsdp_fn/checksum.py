"""ya.checksum: a number for all bits of a state, and a look whether ranks that should hold the same do.

    sum of the bit patterns of every unit's shard, as integers      on the device; whatever the order, the same
    of one rank after the other                                     one small gather on the CPU
    shards of replicas, and what all ranks hold: equal?             else `Corrupted`, with unit and ranks
    modulo 2 ** 64, over the shards of one copy                     the result: the same at every number of ranks

A bit that flips in one replica's memory, or on its way, shows nowhere else: the replica trains on.
"""

import zlib
from collections import Counter
from collections.abc import Iterator

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.comm.places import named
from yafsdp_fn.params.sharded import is_sharded
from yafsdp_fn.params.tree import dotted
from yafsdp_fn.state import ShardedState

PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = 1 << 20
"""Elements that are summed at a time: they are widened to eight bytes on the way."""


class Corrupted(RuntimeError):
    """Ranks that should hold the same bits do not: memory or a link has failed, or a rank was written to by hand."""


@torch.no_grad()
def checksum(state: ShardedState) -> int:
    """A number for the bits of `state`: parameters, optimizer state, step and seed. All ranks of its mesh call it.

    It is the same at every number of ranks and replicas, so that equal runs can be told by it. Each bit counts, but not
    where it lies in its unit: values that change places there are not seen. Costs a pass over the state, a wait for the
    device, and from each rank one message of 8 bytes for each unit and kind of state.

    Raises Corrupted, on every rank, naming units and ranks, where replicas of a shard differ (a mesh with
    `replicate` > 1), or their working copies, or what every rank holds: counts, rates, step, seed.
    """
    memory, comms = state.check().memory, state.memory.comms
    with memory.using([(kind, unit) for unit in memory.of_unit for kind in ("shard", "optimizer")]):
        of_shards, of_all = list(_shards(state)), list(_replicated(state))
        nothing = torch.zeros((), dtype=torch.int64, device=comms.device)
        tensors = [*(row for _, _, row in of_shards), *(value for _, value in of_all)]
        sums = torch.stack([nothing if tensor is None else _sum_of_bits(tensor) for tensor in tensors]).cpu()
    names = [*(name for name, _, _ in of_shards), *(name for name, _ in of_all)]
    comms.must_agree("what a checksum is of", {"names": str(names)})
    every = comms.numbers_of_all(sums, "comparing checksums")
    holders = [stages for _, stages, _ in of_shards]
    _must_be_equal(every, names, holders, comms)
    one_copy = every.view(comms.stages, comms.batch_ranks, -1)[:, : comms.ranks]
    of_units = [one_copy[stages[0], :, number].sum() for number, stages in enumerate(holders)]
    total = 0
    for name, value in zip(names, [*of_units, *one_copy[0, 0, len(of_shards) :]], strict=True):
        if not name.startswith(WORKING):
            total += int(value) * (zlib.crc32(name.encode()) | 1)  # odd: no bit is lost
    return total % (1 << 64)


WORKING = "the working copy of "
"""Of a unit: it follows from the unit."""

SHOWN = 20
TO_DO = "Go on from a checkpoint of before. A rank that is named again has a fault in its memory, device or links"


def _shards(state: ShardedState) -> Iterator[tuple[str, tuple[int, ...], Tensor | None]]:
    """Name, stages, and this rank's part, of each unit's parameters, working copies and optimizer state; None for what
    is of other stages."""
    memory, precision = state.memory, state.precision
    master, working = memory.master.rows, memory.working.rows
    for group in memory.groups:
        for place, unit in enumerate(group.units):
            name, stages = memory.units[unit].name, group.holders(place)
            yield name, stages, master.get(unit)
            if group.trainable and precision.param != precision.gather_dtype:
                yield f"{WORKING}{name}", stages, working.get(unit)
    accessors, nodes, _ = optree.tree_flatten_with_accessor(state.opt_state, is_leaf=is_sharded)
    for at, node in zip(accessors, nodes, strict=True):
        if is_sharded(node):
            for _, group, leaf in node.group_leaves():
                name = f"opt_state.{dotted(at)} of {group.name or 'params'}"
                rows = dict(zip(group.here, leaf.unbind() if leaf.ndim == 2 else (leaf,), strict=False))
                for layer in range(len(group.units) if leaf.ndim == 2 else 1):
                    yield f"{name}[{layer}]" if leaf.ndim == 2 else name, group.holders(layer), rows.get(layer)


def _replicated(state: ShardedState) -> Iterator[tuple[str, Tensor]]:
    """Name and value of what every rank holds."""
    device = state.memory.comms.device
    for name, value in (("step", state.step), ("seed", state.seed)):
        yield name, torch.tensor([value >> 32 & 0xFFFFFFFF, value & 0xFFFFFFFF], device=device)
    accessors, nodes, _ = optree.tree_flatten_with_accessor(state.opt_state, is_leaf=is_sharded)
    for at, node in zip(accessors, nodes, strict=True):
        if isinstance(node, Tensor | int | float):
            yield f"opt_state.{dotted(at)}", torch.as_tensor(node, device=device)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Of the elements as integers of their size: int64 [], modulo 2 ** 64."""
    bits = tensor.contiguous().view(-1)
    if bits.dtype == torch.bool or bits.is_complex():
        bits = bits.view(torch.uint8) if bits.dtype == torch.bool else torch.view_as_real(bits).view(-1)
    pattern = bits.view(PATTERNS[bits.element_size()])
    parts = [pattern[at : at + AT_ONCE].sum(dtype=torch.int64) for at in range(0, pattern.numel(), AT_ONCE)]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.int64, device=tensor.device)


def _must_be_equal(every: Tensor, names: list[str], holders: list[tuple[int, ...]], comms: Communicators) -> None:
    """every: [ranks of the mesh, numbers]; holders: stages of the first ones, which are of shards, alike over replicas
    and over these stages; all ranks hold the others alike"""
    ranks = torch.arange(comms.world).view(comms.stages, comms.replicas, comms.ranks)
    with_shards = {stages: ranks[list(stages)].flatten(0, 1).T.tolist() for stages in holders}
    of_all = [ranks.flatten().tolist()]
    of_each = [*(with_shards[stages] for stages in holders), *[of_all] * (len(names) - len(holders))]
    found = []
    for name, values, alike in zip(names, every.T.tolist(), of_each, strict=True):
        for members in alike:
            sides: dict[int, list[int]] = {}
            for rank in members:
                sides.setdefault(values[rank], []).append(rank)
            if len(sides) > 1:
                found.append(f"  {name}: {_odd_ones(list(sides.values()))}")
    if found:
        more = [f"  and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise Corrupted("\n".join(["ranks that should hold the same bits do not:", *found[:SHOWN], *more, TO_DO]))


def _odd_ones(sides: list[list[int]]) -> str:
    """Who differs from most, where most agree."""
    most = max(sides, key=len)
    others = sorted(rank for side in sides if side is not most for rank in side)
    if Counter(map(len, sides))[len(most)] > 1:
        return f"{' and '.join(named(side) for side in sides)} differ"
    return f"{named(others)} differ{'s' * (len(others) == 1)} from {named(most)}"
