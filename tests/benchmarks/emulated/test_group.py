"""Collectives of the emulated backend: what they leave, in what order they end, and what they refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from benchmarks.emulated import emulate
from benchmarks.emulated.group import gathered, place
from tests.benchmarks.emulated.toy import UNIT_BYTES, cluster
from tests.harness.child_process import in_child_process
from yafsdp_fn.communication import agreement
from yafsdp_fn.communication.collectives import RankGroup as Collectives
from yafsdp_fn.planner.cluster import CollectiveRanks

RANKS = 4
RANK = 1


REDUCED = {
    "SUM": torch.sum,
    "AVG": torch.mean,
    "MIN": torch.amin,
    "MAX": torch.amax,
    "PRODUCT": torch.prod,
}


def leaves(what: str, found: Tensor, expected: Tensor) -> None:
    """Expects equal bits."""
    assert torch.equal(found, expected), (what, found, expected)


@in_child_process
def test_what_collectives_leave() -> None:
    """As rank 1 of 4."""
    mine = torch.tensor([1.0, 2.0])
    full = torch.arange(1.0, 9.0)
    repeated, parts = mine.expand(RANKS, 2), full.view(RANKS, 2)  # of all ranks, and of this one for each
    with emulate(cluster(1e-4), RANKS, RANK):
        group = dist.group.WORLD
        assert group is not None
        ours = Collectives(group)

        # gathers
        out = torch.zeros(8)
        ours.all_gathers([out], [mine])
        leaves("all_gather", out, repeated.flatten())
        inside = torch.arange(8.0)
        ours.all_gathers([inside], [inside[2:4]])
        leaves("all_gather in place", inside, torch.tensor([2.0, 3.0] * RANKS))
        lists = [torch.zeros(2) for _ in range(RANKS)]
        dist.all_gather(lists, mine)
        leaves("all_gather of a list", torch.stack(lists), repeated)

        # reductions
        for op, reduced in REDUCED.items():
            out = torch.zeros(2)
            value = mine.clone()
            dist.reduce_scatter_tensor(out, full, getattr(dist.ReduceOp, op))
            leaves(f"reduce_scatter {op}", out, reduced(parts, 0))
            dist.all_reduce(value, getattr(dist.ReduceOp, op))
            leaves(f"all_reduce {op}", value, reduced(repeated, 0))
        inside = full.clone()
        dist.reduce_scatter_tensor(inside[2:4], inside)
        leaves("reduce_scatter in place", inside, torch.cat([parts[0], parts.sum(0), parts[2], parts[3]]))

        # others
        out = torch.zeros(8)
        ours.all_to_all(out, full)
        leaves("all_to_all", out, full)
        value = mine.clone()
        dist.broadcast(value, src=3)
        leaves("broadcast", value, mine)

        # several at once, and those that are waited for in other ways
        with dist._coalescing_manager(async_ops=True) as together:
            for value in (several := [mine.clone(), mine.clone()]):
                dist.all_reduce(value)
        together.wait()
        leaves("all_reduce, coalesced", torch.stack(several), repeated.sum(0).expand(2, 2))
        future = dist.all_reduce(mine.clone(), async_op=True).get_future().then(lambda f: f.value()[0])
        leaves("futures", future.wait(), repeated.sum(0))
        leaves("functional", functional.all_reduce(mine, "sum", group) + 0, repeated.sum(0))

        # objects and words
        objects = [None] * RANKS
        dist.all_gather_object(objects, {"text": "mine"})
        assert objects == [{"text": "mine"}] * RANKS
        assert agreement.same_on_all("text", ours)
        dist.barrier()
    assert not dist.is_initialized()
    assert not any("emulated" in thread.name for thread in threading.enumerate())


@in_child_process
def test_collectives_of_a_group_follow_each_other() -> None:
    """They end one after the other; groups on one link slow each other down."""
    seconds, begun = 0.05, threading.Event()

    def held(*args: Any) -> None:
        assert begun.wait(60)
        gathered(*args)

    with emulate(cluster(seconds), 64), patch("benchmarks.emulated.group.gathered", held):
        groups = [dist.new_group(list(range(64))) for _ in range(2)]
        full = torch.zeros(UNIT_BYTES // 4)
        shard = torch.zeros(UNIT_BYTES // 4 // 64)
        take = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for use in ((0, 0), (0, 1), (0, 0, 1)):
            begun.clear()
            begin = time.perf_counter()
            works = [take(full, shard, group=groups[of], async_op=True) for of in use]
            assert not any(work.is_completed() for work in works)  # issuing one does not wait for it
            begun.set()
            for last in reversed(range(len(use))):
                works[last].wait()
                assert all(works[one].is_completed() for one in range(last) if use[one] == use[last])
            assert time.perf_counter() - begin >= len(use) * seconds * 63 / 64


def says(text: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Expects an error whose type and words begin so."""
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as error:
        function(*args, **kwargs)
    assert f"{error.typename}: {error.value}".startswith(text), error.value


@in_child_process
def test_errors() -> None:
    """What each misuse says."""
    says("ValueError: emulate: rank 4 of 4; expected 0 <= rank < ranks", emulate, "a100-80g", ranks=4, rank=4)
    says("ValueError: unknown cluster 'a100'; did you mean a100-80g", emulate, "a100", ranks=4)
    if not torch.cuda.is_available():
        says("ValueError: emulate(move_bytes=True) needs CUDA", emulate, "a100-80g", move_bytes=True)
    emulation = emulate(cluster(1e-4), RANKS, RANK)
    assert repr(emulation) == f"<rank 1 of 4 on {cluster(1e-4).name}, emulated>"
    value = torch.ones(3)
    ones = [torch.ones(1) for _ in range(4)]

    # while it runs
    twice = "RuntimeError: emulate: this process has a process group already (emulated, 4 ranks)"
    says(twice, emulate, "a100-80g")
    alone = "NotImplementedError: the emulated backend has no send and no receive"
    says(alone, dist.send, value, 0)
    says(alone, dist.recv, value, 0)
    says(alone, dist.scatter, value, None, 2)
    says(alone, dist.all_to_all, ones, ones)
    sizes = "ValueError: all_gather: a rank's slice has 3 elements and there are 4 ranks, so the whole needs 12"
    says(sizes, dist.all_gather_into_tensor, torch.ones(8), value)
    uneven = "NotImplementedError: the emulated all-to-all has even slices only, got"
    says(uneven, dist.all_to_all_single, torch.ones(4), torch.ones(4), [1, 2, 0, 1], [1, 1, 1, 1])
    xor = "NotImplementedError: the emulated all-reduce knows the reductions SUM"
    says(xor, dist.all_reduce, value.int(), dist.ReduceOp.BXOR)

    # an error at issue leaves the group usable
    whole = dist.group.WORLD
    others = dist.new_group([0, 2])
    with pytest.warns(UserWarning, match="does not belong to the given group"):
        dist.all_reduce(value, group=others)
    assert torch.equal(value, torch.ones(3))
    dist.all_reduce(value)
    assert torch.equal(value, torch.full((3,), 4.0))

    # afterwards
    emulation.close()
    emulation.close()
    assert repr(emulation) == f"<rank 1 of 4 on {cluster(1e-4).name}, emulated, ended>"
    ended = "RuntimeError: the emulation has ended"
    says(ended, dist.all_reduce, value, group=whole)
    says(ended, dist.init_process_group, "emulated", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    ("members", "where"),
    [
        (range(8), CollectiveRanks(8, 8)),
        (range(8, 12), CollectiveRanks(4, 4)),
        (range(64), CollectiveRanks(64, 8)),
        (range(0, 64, 8), CollectiveRanks(8, 1)),
        (range(0, 64, 4), CollectiveRanks(16, 2)),
    ],
)
def test_where_a_group_lies_follows_from_its_global_ranks(members: range, where: CollectiveRanks) -> None:
    assert place(members, 8) == where
