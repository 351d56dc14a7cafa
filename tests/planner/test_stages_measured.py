"""Pipelines that run, against the simulation: two stages, a process each, whose blocks sleep.

A busy machine makes a step longer, never shorter, and never changes the order of ops. SLEEP=0.06 pytest -s wants a
quiet one: blocks so long that the host's own time is little, and steps within 5%.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.benchmarks.emulated.toy import Loss, batch, cluster, params
from tests.harness.marks import nightly
from tests.harness.pool import Pools
from yafsdp_fn.pipelines import orders
from yafsdp_fn.pipelines.assign import assign
from yafsdp_fn.planner import simulate
from yafsdp_fn.planner.space import Order
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.program import Program
from yafsdp_fn.schedules import zero1
from yafsdp_fn.timeline import Timeline

FORWARD = float(os.environ.get("SLEEP", "0.015"))
MICROBATCHES = 4
STEPS = 2
ORDERS = {"one_f_one_b": 1, "interleaved": 2, "zero_bubble": 1}
"""Segments a stage."""
FREE = cluster(1.0).replace(
    attention_flops=1e12,
    memory_bandwidth=math.inf,
    node_bandwidth=math.inf,
    network_bandwidth=math.inf,
    node_latency=0.0,
    network_latency=0.0,
)


def built(order: str) -> Program:
    """The pipeline of a step whose visits are six: an embedding, four layers, a head. The batch has no gradient, and
    gradients of weights take none of the time."""
    trace = ya.planner.trace(Loss(), params(), batch(), microbatches=1, device="cpu", tx=ya.optim.sgd(1e-3))
    forward = Cost(attention_flops=round(FORWARD * 1e12))
    visits = []
    for visit in trace.visits:
        sleeps = forward._replace(bwd_attention_flops=2 * forward.attention_flops * (visit.id > 0))
        visits.append(visit._replace(cost=sleeps._replace(arguments=visit.cost.arguments)))
    trace = trace._replace(visits=tuple(visits))
    whole = Order(order, 2, ORDERS[order], MICROBATCHES).whole(trace, (("stage", 2), ("shard", 1)))
    return orders.FACTORIES[order](zero1())(whole)


def timelines(mesh: Any, order: str) -> list[Timeline]:
    """This rank's, of the last steps of a few."""
    tx = ya.optim.sgd(1e-3)
    made = built(order)
    assignment = assign(made.trace, 2, per_stage=ORDERS[order])
    state = ya.init(params(), tx, mesh=ya.mesh(device="cpu", stage=2), stages=assignment)
    step = ya.train_step(Loss(FORWARD), tx, schedule=orders.FACTORIES[order](zero1()), microbatches=MICROBATCHES)
    data = batch().repeat(MICROBATCHES // 2, 1)
    state, _ = step(state, data)
    with ya.timeline.record() as recording:
        for _ in range(STEPS):
            state, _ = step(state, data)
    return list(recording.timelines)


@pytest.mark.parametrize(
    "order",
    [
        nightly("one_f_one_b"),
        nightly("interleaved"),
        "zero_bubble",
    ],
)
def test_simulated_pipelines_are_those_that_run(pools: Pools, order: str) -> None:
    made = built(order)
    simulated = simulate(made, FREE.replace(host_computes=True))
    measured = pools[2].run(timelines, order)
    ratios = []
    for stages in zip(*measured, strict=True):
        for own, theirs in zip(simulated.by_stage, stages, strict=True):
            for stream in ("compute", "send", "receive"):
                ran = [span.op for span in theirs.on(stream)]
                assert ran == [span.op for span in own.on(stream) if span.op in ran]
                assert len(ran) >= MICROBATCHES
        ratios.append(max(own.seconds for own in stages) / simulated.seconds)
    print(f"{order}: simulated {simulated.seconds:.3f} s; measured / simulated {min(ratios):.3f}")
    assert 0.99 < min(ratios) < (1.05 if "SLEEP" in os.environ else math.inf)
