"""ya.checksum: a number for all bits of a state, and a check that ranks that should hold the same bits do.

    sum of the bit patterns of every unit's shard, as integers      on the device; the same in any order
    gathered from all ranks                                         one small collective on the CPU
    shards of replicas, and replicated values: equal?               else `Corrupted`, with unit and ranks
    modulo 2 ** 64, over the shards of one copy                     the result: the same at every number of ranks

A bit that flips in one replica's memory, or on its way, shows nowhere else: the replica trains on.
"""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.where import named
from yafsdp_fn.params.one_state import must_be_one
from yafsdp_fn.params.sharded import Sharded, handles, handles_and_leaves
from yafsdp_fn.params.tree import Tree, dotted
from yafsdp_fn.runtime.state import ShardedState, must_be_sharded
from yafsdp_fn.util.bits import sum_of_bits

# ---- The verb.


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
    memory = must_be_sharded(state, "checksum takes a ShardedState").check().memory
    comms = memory.comms
    with memory.using([(kind, unit) for unit in memory.of_unit for kind in ("shard", "optimizer")]):
        found = list(_values(state))
        sums = torch.stack([sum_of_bits(value.here).to(comms.device) for value in found]).cpu()
    names = [value.name for value in found]
    must_be_one("checksum", handles(state.params))
    comms.must_agree("what a checksum is of", {"names": str(names)})
    every = comms.numbers_of_all(sums, "comparing checksums")
    _must_be_equal(found, every, comms)
    one_copy = every.view(comms.stages, comms.world // comms.stages, -1)[:, : comms.ranks]
    total = 0
    for number, value in enumerate(found):
        if value.name.startswith(WORKING):
            continue
        if value.stages is None:
            its_sum = one_copy[0, 0, number]
        else:
            its_sum = one_copy[value.stages[0], :, number].sum()
        total += int(its_sum) * (zlib.crc32(value.name.encode()) | 1)  # odd: no bit is lost
    return total % (1 << 64)


WORKING = "the working copy of "
"""Name prefix of a unit's working copy, which follows from the unit and is not in the result."""

SHOWN = 20
TO_DO = "Go on from a checkpoint of before. A rank that is named again has a fault in its memory, device or links"


# ---- The values that are summed.


class SummedValue(NamedTuple):
    """A part of a state. stages: that hold its shards; None for what every rank holds; here: this rank's, empty for
    those of other stages"""

    name: str
    stages: tuple[int, ...] | None
    here: Tensor


def _values(state: ShardedState) -> Iterator[SummedValue]:
    memory = state.memory
    yield from _of_tree("", state.params)
    for handle in handles(memory.handles(memory.working.tensors)):
        copies = handle.of(k for k, _, leaf in handle.group_leaves() if leaf is not memory.master.tensors[k])
        yield from _of_tree(WORKING, copies)
    yield from _of_tree("opt_state.", state.opt_state)
    device = memory.comms.device
    for name, number in (("step", state.step), ("seed", state.seed)):
        yield SummedValue(name, None, torch.tensor(number % (1 << 63), device=device))


def _of_tree(what: str, tree: Tree) -> Iterator[SummedValue]:
    """Yields the shard of each unit in each handle, and what every rank holds."""
    for at, node in handles_and_leaves(tree):
        if isinstance(node, Sharded):
            path = f"{dotted(at)} of " if what == "opt_state." else ""
            for _, group, leaf in node.group_leaves():
                stacked = leaf.ndim > 1
                held = leaf.unbind() if stacked else (leaf,)
                rows = dict(zip(group.here, held, strict=False))
                elsewhere = leaf.new_empty(0)
                for index in range(len(group.units)):
                    layer = f"[{index}]" if stacked else ""
                    name = f"{what}{path}{group.name or 'params'}{layer}"
                    yield SummedValue(name, group.holders(index), rows.get(index, elsewhere))
        elif isinstance(node, Tensor | int | float):
            yield SummedValue(
                f"{what}{dotted(at)}", None, node if isinstance(node, Tensor) else torch.tensor(node, device="cpu")
            )


# ---- Sums of bits, and their comparison.


def _must_be_equal(found: Sequence[SummedValue], every: Tensor, comms: Communicators) -> None:
    """Raises Corrupted where numbers differ: shards of replicas and of the stages that hold them, and what all ranks
    hold. every: [ranks of the mesh, numbers]"""
    ranks = torch.arange(comms.world, device="cpu").view(comms.stages, comms.replicas, comms.ranks)
    faults = []
    for value, sums in zip(found, every.T.tolist(), strict=True):
        if value.stages is None:
            alike = ranks.view(1, -1)
        else:
            alike = ranks[list(value.stages)].flatten(0, 1).T
        for members in alike.tolist():
            sides: dict[int, list[int]] = {}
            for rank in members:
                sides.setdefault(sums[rank], []).append(rank)
            if len(sides) > 1:
                faults.append(f"  {value.name}: {_odd_ones(list(sides.values()))}")
    if not faults:
        return
    lines = ["ranks that should hold the same bits do not:", *faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"  and {len(faults) - SHOWN} more")
    lines.append(TO_DO)
    raise Corrupted("\n".join(lines))


def _odd_ones(sides: list[list[int]]) -> str:
    """Describes the ranks that differ from the majority, if there is one."""
    *fewer, most = sorted(sides, key=len)
    if any(len(side) == len(most) for side in fewer):
        return f"{' and '.join(map(named, sides))} differ"
    others = sorted(itertools.chain(*fewer))
    verb = "differs" if len(others) == 1 else "differ"
    return f"{named(others)} {verb} from {named(most)}"
