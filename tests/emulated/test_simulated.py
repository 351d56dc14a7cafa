"""The simulation against the emulated cluster: real streams, threads and waits, and collectives of the modelled time.

Compute sleeps, and its durations are taken from the run: what is compared is the schedule. What the simulation leaves
out is the host's own time between ops, some 0.3 ms each; durations are long beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import yafsdp_fn as ya
from tests.emulated.toy import Loss, batch, cluster, params
from yafsdp_fn.emulated import emulate
from yafsdp_fn.planner.simulate import simulate, tasks
from yafsdp_fn.timeline import Timeline
from yafsdp_fn.timeline.record import record

FORWARD = 0.016
SPEEDS = {"compute-bound": 0.004, "communication-bound": 0.035}
"""Seconds of a ring of one unit over all ranks."""

SCHEDULES: dict[str, tuple[dict[str, int], ya.schedules.Schedule]] = {
    "zero3": ({}, ya.schedules.zero3()),
    "prefetch": ({}, ya.schedules.zero3(prefetch=2)),
    "resident": ({}, ya.schedules.zero3(resident=1, remat=ya.remat.every(2))),
    "zero2": ({}, ya.schedules.zero2()),
    "hsdp": ({"replicate": 8}, ya.schedules.hsdp()),
    "hpz": ({"local": 8}, ya.schedules.hpz(2)),
}
ATTEMPTS = 5
"""Steps that may be measured: a busy machine can hold up any of them, and the first one makes its buffers."""


class Pair(NamedTuple):
    """One step, measured and simulated; waits: `(number, earlier number)` that it waited for."""

    measured: Timeline
    simulated: Timeline
    waits: list[tuple[int, int]]


def step(schedule: str, seconds: float) -> list[Pair]:
    mesh_of, build = SCHEDULES[schedule]
    where, tx, loss = cluster(seconds), ya.optim.sgd(1e-3), Loss(FORWARD)
    found = []
    with emulate(where, 64):
        state = ya.init(params(), tx, mesh=ya.mesh(device="cpu", **mesh_of))
        program = build(ya.train_step(Loss(), tx).trace(state, batch()))
        train = ya.train_step(loss, tx, schedule=program)
        while len(found) < ATTEMPTS and not (found and close(found[-1])):
            with record() as recording:
                state, _ = train(state, batch())
            measured = recording.timeline()
            computes = {span.number: span.seconds for span in measured.on("compute")}
            every = enumerate(tasks(program, where, computes))
            waits = [(number, earlier) for number, task in every for earlier in task.waits]
            found.append(Pair(measured, simulate(program, where, durations=computes), waits))
    return found


def close(pair: Pair) -> bool:
    return abs(pair.simulated.seconds / pair.measured.seconds - 1) <= 0.05


def by_stream(timeline: Timeline) -> dict[str, list[int]]:
    """The ops of each stream, in the order in which they began."""
    found: dict[str, list[int]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start):
        found[span.stream].append(span.number)
    return found


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulated_steps_are_those_of_the_emulated_cluster(
    aside: Callable[..., Any], schedule: str, speed: str
) -> None:
    pairs = aside(step, schedule, SPEEDS[speed])
    for measured, simulated, waits in pairs:
        assert by_stream(measured) == by_stream(simulated)
        for timeline in (measured, simulated):
            at = {span.number: span for span in timeline.spans}
            assert all(at[earlier].end <= at[number].start for number, earlier in waits)
    last = pairs[-1]
    assert close(last), [(pair.measured.seconds, pair.simulated.seconds) for pair in pairs]
    bound = "compute-bound" if last.simulated.compute_s > last.simulated.comm_s else "communication-bound"
    assert bound == speed
