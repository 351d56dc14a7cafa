"""ya.checksum: a number for all bits of a state, and a check that ranks that should hold the same bits do.

    sum of the bit patterns of every unit's shard, as integers      on the device; the same in any order
    gathered from all ranks                                         one small collective on the CPU
    shards of replicas, and replicated values: equal?               else `Corrupted`, with unit and ranks
    modulo 2 ** 64, over the shards of one copy                     the result: the same at every number of ranks

A bit that flips in one replica's memory, or on its way, shows nowhere else: the replica trains on.
"""

import zlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from yafsdp_fn.dist.communicators import Communicators
from yafsdp_fn.dist.where import named
from yafsdp_fn.params.one_state import must_be_one
from yafsdp_fn.params.sharded import handles, handles_and_leaves, is_sharded
from yafsdp_fn.params.tree import dotted
from yafsdp_fn.runtime.state import ShardedState

PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = 1 << 20
"""Elements summed at a time; the sum widens them to eight bytes."""


class Corrupted(RuntimeError):
    """Ranks that should hold the same bits do not: memory or a link has failed, or one rank was written to by hand."""


@torch.no_grad()
def checksum(state: ShardedState) -> int:
    """Returns a number for the bits of `state`: parameters, optimizer state, step and seed. All ranks of its mesh call
    it.

    It is the same at every number of ranks and replicas, so equal runs have equal checksums. Every bit counts, but not
    its position in its unit: swapped values are not detected. Costs a pass over the state, a wait for the device, and 8
    bytes from each rank for each unit and kind of state.

    Raises Corrupted on every rank, naming units and ranks, if replicas of a shard differ (a mesh with `replicate` > 1),
    or their working copies, or replicated values: counts, rates, step, seed.

    >>> ya.checksum(state) == ya.checksum(ya.init(params, tx, mesh=mesh))
    True
    >>> ya.checksum(state) == ya.checksum(ya.init(params, tx, mesh=mesh, seed=1))
    False
    """
    memory, comms = state.check().memory, state.memory.comms
    with memory.using([(kind, unit) for unit in memory.of_unit for kind in ("shard", "optimizer")]):
        of_shards, of_all = list(_shards(state)), list(_replicated(state))
        nothing = torch.zeros((), dtype=torch.int64, device=comms.device)
        tensors = [*(row for _, _, row in of_shards), *(value for _, value in of_all)]
        sums = torch.stack([nothing if tensor is None else sum_of_bits(tensor) for tensor in tensors]).cpu()
    names = [*(name for name, _, _ in of_shards), *(name for name, _ in of_all)]
    must_be_one("checksum", handles(state.params))
    comms.must_agree("what a checksum is of", {"names": str(names)})
    every = comms.numbers_of_all(sums, "comparing checksums")
    holders = [stages for _, stages, _ in of_shards]
    _must_be_equal(every, names, holders, comms)
    one_copy = every.view(comms.stages, comms.world // comms.stages, -1)[:, : comms.ranks]
    of_units = [one_copy[stages[0], :, number].sum() for number, stages in enumerate(holders)]
    total = 0
    for name, value in zip(names, [*of_units, *one_copy[0, 0, len(of_shards) :]], strict=True):
        if not name.startswith(WORKING):
            total += int(value) * (zlib.crc32(name.encode()) | 1)  # odd: no bit is lost
    return total % (1 << 64)


WORKING = "the working copy of "
"""Name prefix of a unit's working copy, which follows from the unit and is not in the result."""

SHOWN = 20
TO_DO = "Go on from a checkpoint of before. A rank that is named again has a fault in its memory, device or links"


def _shards(state: ShardedState) -> Iterator[tuple[str, tuple[int, ...], Tensor | None]]:
    """Yields name, stages and this rank's part of each unit's parameters, working copies and optimizer state; None for
    parts of other stages."""
    memory, precision = state.memory, state.precision
    master, working = memory.master.rows, memory.working.rows
    for group in memory.groups:
        for place, unit in enumerate(group.units):
            name, stages = memory.units[unit].name, group.holders(place)
            yield name, stages, master.get(unit)
            if group.trainable and precision.param != precision.gather_dtype:
                yield f"{WORKING}{name}", stages, working.get(unit)
    for at, node in handles_and_leaves(state.opt_state):
        if is_sharded(node):
            for _, group, leaf in node.group_leaves():
                name = f"opt_state.{dotted(at)} of {group.name or 'params'}"
                rows = dict(zip(group.here, leaf.unbind() if leaf.ndim == 2 else (leaf,), strict=False))
                for layer in range(len(group.units) if leaf.ndim == 2 else 1):
                    yield f"{name}[{layer}]" if leaf.ndim == 2 else name, group.holders(layer), rows.get(layer)


def _replicated(state: ShardedState) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of everything that every rank holds."""
    device = state.memory.comms.device
    for name, value in (("step", state.step), ("seed", state.seed)):
        yield name, torch.tensor([value >> 32 & 0xFFFFFFFF, value & 0xFFFFFFFF], device=device)
    for at, node in handles_and_leaves(state.opt_state):
        if isinstance(node, Tensor | int | float):
            yield f"opt_state.{dotted(at)}", torch.as_tensor(node, device=device)


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Sums the elements as integers of their size, modulo 2 ** 64: int64 []."""
    bits = tensor.contiguous().view(-1)
    if bits.dtype == torch.bool or bits.is_complex():
        bits = bits.view(torch.uint8) if bits.dtype == torch.bool else torch.view_as_real(bits).view(-1)
    pattern = bits.view(PATTERNS[bits.element_size()])
    parts = [pattern[at : at + AT_ONCE].sum(dtype=torch.int64) for at in range(0, pattern.numel(), AT_ONCE)]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.int64, device=tensor.device)


def _must_be_equal(every: Tensor, names: list[str], holders: list[tuple[int, ...]], comms: Communicators) -> None:
    """Raises Corrupted where numbers differ. every: [ranks of the mesh, numbers]; holders: stages of the leading
    numbers, which are of shards, equal over replicas and these stages; the others are equal on all ranks"""
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
    """Describes the ranks that differ from the majority, if there is one."""
    most = max(sides, key=len)
    others = sorted(rank for side in sides if side is not most for rank in side)
    if Counter(map(len, sides))[len(most)] > 1:
        return f"{' and '.join(named(side) for side in sides)} differ"
    return f"{named(others)} differ{'s' * (len(others) == 1)} from {named(most)}"
