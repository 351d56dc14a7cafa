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

RANKS, RANK = 4, 1


@in_child_process
def test_what_collectives_leave() -> None:
    """As rank 1 of 4."""
    found: dict[str, Tensor] = {}
    with emulate(cluster(1e-4), RANKS, RANK):
        mine, full = torch.tensor([1.0, 2.0]), torch.arange(1.0, 9.0)
        group = dist.group.WORLD
        assert group is not None
        ours = Collectives(group)
        out = torch.zeros(8)
        ours.all_gathers([out], [mine])
        found["all_gather"] = out
        inside = torch.arange(8.0)
        ours.all_gathers([inside], [inside[2:4]])
        found["all_gather in place"] = inside
        lists = [torch.zeros(2) for _ in range(RANKS)]
        dist.all_gather(lists, mine)
        found["all_gather of a list"] = torch.stack(lists)
        for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
            out = torch.zeros(2)
            dist.reduce_scatter_tensor(out, full, getattr(dist.ReduceOp, op))
            found[f"reduce_scatter {op}"] = out
            value = mine.clone()
            dist.all_reduce(value, getattr(dist.ReduceOp, op))
            found[f"all_reduce {op}"] = value
        inside = full.clone()
        dist.reduce_scatter_tensor(inside[2:4], inside)
        found["reduce_scatter in place"] = inside
        out = torch.zeros(8)
        ours.all_to_all(out, full)
        found["all_to_all"] = out
        value = mine.clone()
        dist.broadcast(value, src=3)
        found["broadcast"] = value
        with dist._coalescing_manager(async_ops=True) as together:
            for value in (several := [mine.clone(), mine.clone()]):
                dist.all_reduce(value)
        together.wait()
        found["all_reduce, coalesced"] = torch.stack(several)
        found["futures"] = dist.all_reduce(mine.clone(), async_op=True).get_future().then(lambda f: f.value()[0]).wait()
        found["functional"] = functional.all_reduce(mine, "sum", group) + 0
        objects: list[Any] = [None] * RANKS
        dist.all_gather_object(objects, {"text": "mine"})
        assert objects == [{"text": "mine"}] * RANKS
        assert agreement.same_on_all("text", ours)
        dist.barrier()
    assert not dist.is_initialized()
    assert not any("emulated" in thread.name for thread in threading.enumerate())
    full = torch.arange(1.0, 9.0).view(RANKS, 2)
    repeated = torch.tensor([1.0, 2.0]).expand(RANKS, 2)
    expected = {
        "all_gather": repeated.flatten(),
        "all_gather in place": torch.tensor([2.0, 3.0] * RANKS),
        "all_gather of a list": repeated,
        "reduce_scatter SUM": full.sum(0),
        "reduce_scatter AVG": full.mean(0),
        "reduce_scatter MIN": full[0],
        "reduce_scatter MAX": full[-1],
        "reduce_scatter PRODUCT": full.prod(0),
        "reduce_scatter in place": torch.cat([full[0], full.sum(0), full[2], full[3]]),
        "all_reduce SUM": repeated.sum(0),
        "all_reduce AVG": repeated[0],
        "all_reduce MIN": repeated[0],
        "all_reduce MAX": repeated[0],
        "all_reduce PRODUCT": repeated.prod(0),
        "all_reduce, coalesced": repeated.sum(0).expand(2, 2),
        "functional": repeated.sum(0),
        "futures": repeated.sum(0),
        "all_to_all": full.flatten(),
        "broadcast": repeated[0],
    }
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), (name, found[name], value)


@in_child_process
def test_collectives_of_a_group_follow_each_other() -> None:
    """They end one after the other; groups on one link slow each other down."""
    seconds, begun = 0.05, threading.Event()

    def held(*args: Any) -> None:
        assert begun.wait(60)
        gathered(*args)

    with emulate(cluster(seconds), 64), patch("benchmarks.emulated.group.gathered", held):
        groups = [dist.new_group(list(range(64))) for _ in range(2)]
        full, shard = torch.zeros(UNIT_BYTES // 4), torch.zeros(UNIT_BYTES // 4 // 64)
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


@in_child_process
def test_errors() -> None:
    """What each misuse says."""
    found: dict[str, str] = {}

    def note(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    note("rank", emulate, "a100-80g", ranks=4, rank=4)
    note("cluster", emulate, "a100", ranks=4)
    if not torch.cuda.is_available():
        note("move", emulate, "a100-80g", move_bytes=True)
    emulation = emulate(cluster(1e-4), RANKS, RANK)
    found["repr"] = repr(emulation)
    value = torch.ones(3)
    note("twice", emulate, "a100-80g")
    note("send", dist.send, value, 0)
    note("receive", dist.recv, value, 0)
    note("scatter", dist.scatter, value, None, 2)
    note("lists", dist.all_to_all, [torch.ones(1) for _ in range(4)], [torch.ones(1) for _ in range(4)])
    note("sizes", dist.all_gather_into_tensor, torch.ones(8), torch.ones(3))
    note("uneven", dist.all_to_all_single, torch.ones(4), torch.ones(4), [1, 2, 0, 1], [1, 1, 1, 1])
    note("xor", dist.all_reduce, value.int(), dist.ReduceOp.BXOR)
    whole = dist.group.WORLD
    others = dist.new_group([0, 2])
    with pytest.warns(UserWarning, match="does not belong to the given group"):
        dist.all_reduce(value, group=others)
    assert torch.equal(value, torch.ones(3))
    dist.all_reduce(value)  # an error at issue leaves the group usable
    assert torch.equal(value, torch.full((3,), 4.0))
    emulation.close()
    emulation.close()
    found["repr of ended"] = repr(emulation)
    note("late", dist.all_reduce, value, group=whole)
    note("ended", dist.init_process_group, "emulated", store=dist.HashStore(), rank=0, world_size=1)
    alone = "NotImplementedError: the emulated backend has no send and no receive"
    expected = {
        "rank": "ValueError: emulate: rank 4 of 4; expected 0 <= rank < ranks",
        "cluster": "ValueError: unknown cluster 'a100'; did you mean a100-80g",
        "twice": "RuntimeError: emulate: this process has a process group already (emulated, 4 ranks)",
        "send": alone,
        "receive": alone,
        "scatter": alone,
        "lists": alone,
        "sizes": "ValueError: all_gather: a rank's slice has 3 elements and there are 4 ranks, so the whole needs 12",
        "uneven": "NotImplementedError: the emulated all-to-all has even slices only, got",
        "xor": "NotImplementedError: the emulated all-reduce knows the reductions SUM",
        "ended": "RuntimeError: the emulation has ended",
        "late": "RuntimeError: the emulation has ended",
        "repr": f"<rank 1 of 4 on {cluster(1e-4).name}, emulated>",
        "repr of ended": f"<rank 1 of 4 on {cluster(1e-4).name}, emulated, ended>",
    }
    if "move" in found:
        expected["move"] = "ValueError: emulate(move_bytes=True) needs CUDA"
    assert expected.keys() == found.keys()
    for name, text in expected.items():
        assert found[name].startswith(text), (name, found[name])


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
