"""Traces of chains of layers, for pipelines, whose ops take round times."""

from __future__ import annotations

import math

from tests.planner.test_simulate import FREE
from tests.program.traces import layers, trace_of
from yafsdp_fn.pipelines.assign import Shape
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.split import Argument
from yafsdp_fn.schedules import Program, Schedule, Trace, assign, cut

NO_LINKS = FREE.replace(gpus_per_node=1, node_bandwidth=math.inf, network_bandwidth=math.inf)
"""1 TFLOP/s, messages take no time."""


def chain(count: int, microbatches: int, nbytes: int = 8) -> Trace:
    """`count` layers, a unit each, on one rank, whose forwards take a second at 1 TFLOP/s and backwards two. nbytes:
    that each gives to the next"""
    trace = trace_of(layers("layers", count, 0), [(k,) for k in range(count)], microbatches)
    cost = Cost(flops=10**12, bwd_flops=2 * 10**12)
    given = [(), *((Argument(0, k, (k - 1,), nbytes, nbytes),) for k in range(1, count))]
    visits = [
        visit._replace(cost=cost._replace(arguments=arguments))
        for visit, arguments in zip(trace.visits, given, strict=True)
    ]
    return trace._replace(visits=tuple(visits), loss_of=(count - 1,), mesh=(("shard", 1),))


def pipeline(trace: Trace, stages: int, made: Schedule, per_stage: int = 1, shape: Shape = "loop") -> Program:
    """On stages that are even by cost."""
    return made(cut(trace, assign(trace, stages, per_stage=per_stage, shape=shape)))
