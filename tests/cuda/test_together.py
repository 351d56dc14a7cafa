"""Steps of several ranks on fake devices that wait: stages, shards, replicas and graphs; and hangs made on purpose.

Each rank's steps run alone, one rank after the other; what all launched and waited for is then played together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

import yafsdp_fn as ya
from tests.cuda.days import PRECISIONS
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.log import Launch, Log
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA
from tests.harness.fake_cuda.together import Trouble, troubles
from tests.harness.marks import by_day
from tests.harness.oracle import batch_of
from tests.harness.problems import PROBLEMS
from yafsdp_fn.communication.communicators import Communicators, communicators
from yafsdp_fn.optim import muon
from yafsdp_fn.pipelines import orders
from yafsdp_fn.proof import stages as rules
from yafsdp_fn.runtime.programs import Programs
from yafsdp_fn.schedules import Call, Gather, Receive, Reduce

s = ya.schedules
remat = ya.schedules.remat
Plant = Callable[[pytest.MonkeyPatch, int], object]


class Run(NamedTuple):
    """Steps of all ranks of a mesh. plant: makes mistakes, on each rank; shape: of an assignment to stages"""

    axes: dict[str, int]
    schedule: Any
    microbatches: int = 2
    problem: str = "base"
    precision: int = 0
    tx: Any = ya.optim.adamw(1e-2)
    per_stage: int = 1
    shape: str = "loop"
    steps: int = 3


@contextmanager
def planted(plant: Plant | None, rank: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch, rank)
        yield


def day(run: Run, rank: int, plant: Plant | None = None) -> Log:
    """The log of one rank's steps."""
    problem = PROBLEMS[run.problem]
    rows = 4 * run.microbatches
    params = problem.params(4)
    with planted(plant, rank), fake_cuda() as device, rank_of(run.axes, rank=rank) as mesh:
        stages = None
        if "stage" in run.axes:
            precision = PRECISIONS[run.precision]
            trace = ya.planner.trace(problem.loss, params, batch_of(0, rows=rows), precision=precision)
            stages = s.assign(trace, run.axes["stage"], per_stage=run.per_stage, shape=run.shape)
        state = ya.init(params, run.tx, mesh=mesh, precision=PRECISIONS[run.precision], stages=stages)
        step = ya.train_step(problem.loss, run.tx, schedule=run.schedule, microbatches=run.microbatches)
        for number in range(run.steps):
            batch = {key: value.to(CUDA) for key, value in batch_of(0, seed=number, rows=rows).items()}
            state, _ = step(state, batch)
        assert communicators(mesh).lost is None
        assert not device.strangers
        return device.log


def days(run: Run, plant: Plant | None = None) -> dict[int, Log]:
    return {rank: day(run, rank, plant) for rank in range(math.prod(run.axes.values()))}


RUNS: dict[str, Run] = {
    "one microbatch": Run({"stage": 2, "shard": 2}, s.one_f_one_b(s.zero3(remat=remat.all)), 1, steps=4),
    "updates": Run({"stage": 3, "shard": 1}, s.one_f_one_b(s.zero2(update=True)), 4, "units"),
    "interleaved": Run({"stage": 2, "shard": 1}, s.interleaved(s.zero3(remat=remat.all)), 3, per_stage=2, steps=4),
    "halves, shared unit": Run(
        {"stage": 2, "shard": 1}, s.v_shaped(s.zero3(remat=remat.all)), 3, "tied", per_stage=2, shape="v"
    ),
    "replicas of stages": Run({"stage": 2, "replicate": 2, "shard": 1}, s.zero_bubble(s.hsdp()), 2, "tied", 3),
    "nodes": Run({"node": 2, "local": 2}, s.hpz(2, remat=remat.all), precision=3, steps=4),
    "replicas": Run({"replicate": 2, "shard": 2}, s.hsdp(update=True), precision=3, tx=muon(1e-2)),
}


DAILY = ("one microbatch", "halves, shared unit")


@pytest.mark.parametrize("name", by_day(RUNS, *DAILY))
@in_child_process
def test_all_ends_whenever_hosts_wait_for_their_devices(name: str) -> None:
    logs = days(RUNS[name])
    waits = {entry.text.partition(" of ")[0] for log in logs.values() for entry in log.entries if entry.kind == "sync"}
    assert {"the first use", "the first communicator", "a copy from the host ()"} <= waits
    assert [*troubles(logs), *troubles(logs, retries=True)] == []


# ---- mistakes, made on purpose


def ahead(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Receives are a call ahead of what takes them, whether or not their senders wait for that call."""
    well = orders.with_messages

    def with_messages(split: Any, rows: Any, *pace: Any) -> Any:
        lists = well(split, rows, *pace)
        for items in lists:
            for at, item in reversed([*enumerate(items)]):
                calls = [k for k in range(at) if isinstance(items[k], Call)]
                if isinstance(item, Receive) and calls:
                    items.insert(calls[-1], items.pop(at))
        return lists

    patch.setattr(orders, "with_messages", with_messages)
    patch.setattr(rules, "_stuck", lambda rows: [])


def unmet(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Ranks do not connect when they meet."""
    patch.setattr(Communicators, "_meet", lambda self: None)


def disordered(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 1 reduces the head, and then gathers a layer, which others do before."""
    remember = Programs.remember

    def other(self: Programs, *args: Any, **kwargs: Any) -> Any:
        found = remember(self, *args, **kwargs)
        at = next(k for k, op in enumerate(found.ops) if isinstance(op, Reduce))
        gather = max(k for k, op in enumerate(found.ops[:at]) if isinstance(op, Gather))
        found.ops = [*found.ops]
        found.ops.insert(gather, found.ops.pop(at))
        return found

    if rank == 1:
        patch.setattr(Programs, "remember", other)


# as others write 1F1B: messages that cross
LISTED = [["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]]
LISTED += [["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]]
SMALL: dict[str, Run] = {
    "two stages": RUNS["one microbatch"]._replace(axes={"stage": 2, "shard": 1}),
    "crossing": Run({"stage": 2, "shard": 1}, s.from_actions(LISTED)),
    "nodes": Run({"node": 2, "local": 2}, s.hpz(2)),
    "shards": Run({"shard": 2}, s.zero3()),
}


def wrong(name: str, plant: str, causes: str = "") -> list[Trouble]:
    return troubles(days(SMALL[name], globals().get(plant)), causes=causes)


@in_child_process
def test_a_receive_ahead_of_a_send_that_it_depends_on_hangs() -> None:
    """Wherever the host waits for its device; where it does not, all goes well."""
    first, second = wrong("two stages", "ahead")
    host = "the host waits for the device: _local_scalar_dense"  # the bits of leaves, before a step that looks
    assert first.kind == second.kind == "hang"
    assert first.what.startswith(host)
    assert "receive of gradient 0 <- 1 from stage 1" in first.what
    assert first.what.endswith("waits for rank 1")
    assert "receive of segment 0 -> 1 from stage 0" in second.what
    assert second.what.endswith("waits for rank 0")
    found = wrong("two stages", "ahead", "a cause that there is not")
    assert not found, found  # pytest does not explain what a child process asserts


@in_child_process
def test_a_cold_communicator_is_found_and_hangs_where_messages_cross() -> None:
    cold = wrong("nodes", "unmet")
    assert {found.kind for found in cold} == {"cold"}
    # that of gathers was first used while the call was recorded, which is no op of a step
    assert "reduce of head (step 0) is the first communicator of yafsdp reduce" in cold[0].what
    hung = [found for found in wrong("crossing", "unmet") if found.kind == "hang"]
    assert [found.rank for found in hung] == [0, 1]
    assert "the first communicator of yafsdp sent by stage 1" in hung[0].what
    assert wrong("crossing", "nothing") == []


@in_child_process
def test_another_order_of_launches_is_found() -> None:
    (found,) = wrong("shards", "disordered")
    assert found.kind == "order"
    assert "gather of head (step 0) where rank 1 has yafsdp::reduce of head (step 0)" in found.what


@pytest.mark.parametrize("receives", [1, 2])
def test_a_receive_that_cannot_begin_holds_back_what_is_launched_after_it(receives: int) -> None:
    """Rank 0 gathers, and sends what rank 1 answers."""
    compute, send, receive, gather = 1, 2, 3, 4
    one = Log()
    two = Log()
    there = Launch("there", (0, 1), "message")
    back = Launch("back", (0, 1), "message")
    for _ in range(receives):
        one.launch("launch", receive, back)
    one.launch("launch", gather, Launch("shards", (0,), "all_gather"))
    one.wait(compute, one.record(gather))
    one.wait(send, one.record(compute))
    one.launch("launch", send, there)
    two.launch("launch", receive, there)
    two.wait(send, two.record(receive))
    for _ in range(receives):
        two.launch("launch", send, back)
    found = troubles({0: one, 1: two})
    assert [trouble.kind for trouble in found] == ["hang", "hang"] * (receives - 1)
