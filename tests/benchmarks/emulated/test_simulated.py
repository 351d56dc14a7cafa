"""The simulation against the emulated cluster: real streams, threads and waits, and collectives of the modelled time.

Compute sleeps. What is compared is the schedule, by what a busy machine cannot change: it makes an op late or long,
never early or short. That ops overlap as they do in the simulation is seen where they meet: each goes on when the other
is under way.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

import yafsdp_fn as ya
from benchmarks.emulated import emulate
from benchmarks.emulated.group import EmulatedGroup
from tests.benchmarks.emulated.toy import Loss, batch, cluster, params
from tests.harness.child_process import in_child_process
from yafsdp_fn.planner.cluster import Phase
from yafsdp_fn.planner.simulate import OpTask, run, tasks
from yafsdp_fn.schedules import AllReduce, Backward, Forward, Gather, Program, Reduce
from yafsdp_fn.timeline import Timeline
from yafsdp_fn.timeline.record import record

FORWARD = 0.004
SPEEDS = {"compute-bound": 0.001, "communication-bound": 0.009}
"""Seconds of a ring of one unit over all ranks."""

SCHEDULES = {
    "zero3": ({}, ya.schedules.zero3()),
    "prefetch": ({}, ya.schedules.zero3(prefetch=2)),
    "resident": ({}, ya.schedules.zero3(resident=1, remat="every:2")),
    "zero2": ({}, ya.schedules.zero2()),
    "hsdp": ({"replicate": 8}, ya.schedules.hsdp()),
    "hpz": ({"local": 8}, ya.schedules.hpz(2)),
}
COLLECTIVES = {"all_gather": Gather, "reduce_scatter": Reduce, "all_reduce": AllReduce}
KINDS = tuple(COLLECTIVES.values())


class Steps(NamedTuple):
    """Two steps that were measured, of which the first makes its buffers and in the second ops meet; the simulated one
    with its tasks; and how many ops were to meet another one, and did not."""

    measured: tuple[Timeline, ...]
    simulated: Timeline
    tasks: list[OpTask]
    meetings: int
    unmet: int


def steps(schedule: str, seconds: float) -> Steps:
    mesh_of, build = SCHEDULES[schedule]
    where = cluster(seconds)
    tx = ya.optim.sgd(1e-3)
    with emulate(where, 64):
        state = ya.init(params(), tx, mesh=ya.mesh(device="cpu", **mesh_of))
        program = build(ya.train_step(Loss(), tx).trace(state, batch()))
        train = ya.train_step(Loss(FORWARD), tx, schedule=program)
        todo = tasks(program, where)
        for number, naps in sleeps(program).items():
            todo[number] = todo[number]._replace(phases=(Phase("compute", sum(naps)),))
        simulated = run(program, todo, where, "simulated")
        left = pairs(simulated)
        meetings = len(left)
        with record() as recording:
            state, _ = train(state, batch())
            with meeting(program, left):
                state, _ = train(state, batch())
                state.memory.comms.drain()
        return Steps(recording.timelines, simulated, todo, meetings, len(left))


def sleeps(program: Program) -> dict[int, list[float]]:
    """Of each compute: a backward that recomputes sleeps as its forward does, too; the batch has no gradient."""
    kept = {(op.visit, op.microbatch) for op in program.ops if isinstance(op, Forward) and op.keep}
    found: dict[int, list[float]] = {}
    for number, op in enumerate(program.ops):
        if isinstance(op, Forward):
            found[number] = [FORWARD]
        elif isinstance(op, Backward):
            again = (op.visit, op.microbatch) not in kept
            found[number] = [FORWARD] * again + [2 * FORWARD] * (op.visit > 0)
    return found


def pairs(simulated: Timeline) -> dict[int, threading.Barrier]:
    """Where a compute and a collective meet that are under way at the same time, by the number of either."""
    found: dict[int, threading.Barrier] = {}
    for one, two in itertools.product(simulated.on("compute"), simulated.spans):
        together = min(one.end, two.end) - max(one.start, two.start)
        if isinstance(two.op, KINDS) and together > 1e-6 and not {one.number, two.number} & found.keys():
            found[one.number] = found[two.number] = threading.Barrier(2)
    return found


@contextmanager
def meeting(program: Program, where: dict[int, threading.Barrier]) -> Iterator[None]:
    """Ops of one step take part in their meetings, and take these out of `where`.

    A run that does both ops of a pair one after the other never gets on. One that can do what the simulation does gets
    through always: at the times at which they overlap there.
    """
    computes = iter([number for number, naps in sleeps(program).items() for _ in naps])
    collectives = {
        name: iter([number for number, op in enumerate(program.ops) if isinstance(op, kind)])
        for name, kind in COLLECTIVES.items()
    }
    issue = EmulatedGroup._run

    def meet(number: int | None) -> None:
        if number in where:
            where.pop(number).wait(60)

    def issued(group: Any, name: str, phases: Any, work: Any, *more: Any) -> Any:
        number = next(collectives[name], None)  # the norm's all-reduces come after all others
        return issue(group, name, phases, [lambda: meet(number), *work], *more)

    sleep = SimpleNamespace(sleep=lambda _: meet(next(computes)))
    with patch.object(EmulatedGroup, "_run", issued), patch("tests.benchmarks.emulated.toy.time", sleep):
        yield


def by_stream(timeline: Timeline) -> dict[str, list[int]]:
    """The ops of each stream, in the order in which they began."""
    found = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start):
        found[span.stream].append(span.number)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@in_child_process
def test_simulated_steps_are_those_of_the_emulated_cluster(schedule: str, speed: str) -> None:
    measured, simulated, todo, meetings, unmet = steps(schedule, SPEEDS[speed])
    assert meetings > 8
    assert not unmet
    order = by_stream(simulated)
    before = {two: one for numbers in order.values() for one, two in zip([None, *numbers], numbers, strict=False)}
    for timeline in (*measured, simulated):
        assert by_stream(timeline) == order
        at = {span.number: span for span in timeline.spans}
        for number, task in enumerate(todo):
            span = at[number]
            assert all(at[earlier].end <= span.start for earlier in task.waits)
            assert span.cause in (*task.waits, before[number])
            if isinstance(task.op, KINDS):
                alone = sum(phase.seconds for phase in task.phases)
                assert span.seconds >= alone - 1e-6, (span, alone)
    bound = "compute-bound" if simulated.compute_s > simulated.comm_s else "communication-bound"
    assert bound == speed
