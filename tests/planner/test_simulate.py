"""Timelines worked out by hand, limits, and that better hardware is never slower."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.program.traces import layers, trace_of
from yafsdp_fn.planner import CLUSTERS, Cluster, simulate
from yafsdp_fn.planner.costs import Costs
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.trace import Encoding
from yafsdp_fn.schedules import Gather, Program, Reduce, Trace, Update, hpz, hsdp, remat, zero1, zero2, zero3
from yafsdp_fn.timeline.spans import Idle, Span

GB = 10**9
INF = math.inf
FREE = Cluster(
    name="free",
    gpus_per_node=2,
    matmul_flops=1e12,
    attention_flops=1e12,
    memory_bandwidth=INF,
    memory_bytes=2**40,
    node_bandwidth=GB,
    network_bandwidth=GB,
    node_latency=0.0,
    network_latency=0.0,
)
"""A ring of two ranks moves 1 GB/s: half of a vector each way."""


def three_layers(forward_s: float = 2, backward_s: float = 4, gather_s: float = 1, reduce_s: float = 1) -> Trace:
    """Three layers on two ranks of `FREE`, whose ops take the given seconds."""
    units = [
        u._replace(gather_bytes=round(2 * GB * gather_s), reduce_bytes=round(2 * GB * reduce_s))
        for u in layers("layers", 3, 0)
    ]
    trace = trace_of(units, [(0,), (1,), (2,)])
    cost = Cost(flops=round(forward_s * 1e12), bwd_flops=round(backward_s * 1e12))
    return trace._replace(visits=tuple(visit._replace(cost=cost) for visit in trace.visits))


def times(spans: Iterable[Span | Idle]) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in spans]


def test_compute_bound_by_hand() -> None:
    """Reductions of layer 2 and the second gather of layer 0 share the link from 11 to 13."""
    timeline = simulate(zero3()(three_layers()), FREE)
    assert [(s.stream, s.start, s.end) for s in timeline.spans] == [
        ("gather", 0, 1),
        ("gather", 1, 2),
        ("compute", 1, 3),
        ("gather", 3, 4),  # into the slot of layer 0, when its forward has read it
        ("compute", 3, 5),
        ("compute", 5, 7),
        ("compute", 7, 11),
        ("reduce", 11, 13),
        ("gather", 11, 13),
        ("compute", 11, 15),
        ("reduce", 15, 16),
        ("compute", 15, 19),
        ("reduce", 19, 20),
    ]
    assert timeline.seconds == 20
    assert timeline.compute_s == 18
    assert timeline.comm_s == 1 + 1 + 1 + 2 + 1 + 1
    assert [timeline.describe(s).split(" in ")[0].split(" <-")[0] for s in timeline.critical_path()] == [
        "gather layers[0] -> slot 0",
        "forward layers[0]",
        "forward layers[1]",
        "forward layers[2]",
        "backward layers[2]",
        "backward layers[1]",
        "backward layers[0]",
        "reduce layers[0]",
    ]
    assert times(timeline.idle()) == [(0, 1), (19, 20)]


def test_links_beside_compute_by_hand() -> None:
    """The second gather takes a second alone, and the forward two: at a third of its rate the one ends at 4, and the
    other at 4.5."""
    shared = FREE.replace(link_contention=2.0, contention=1.0)
    spans = simulate(zero3()(three_layers()), shared).spans
    assert [(s.start, s.end) for s in spans[:3]] == [(0, 1), (1, 4), (1, 4.5)]


def test_communication_bound_by_hand() -> None:
    """Gathers of 4 s, reductions of 4 s, forward 1 s, backward 2 s."""
    timeline = simulate(zero3()(three_layers(1, 2, 4, 4)), FREE)
    assert times(timeline.on("gather")) == [(0, 4), (4, 8), (8, 12), (15, 23)]
    assert times(timeline.on("compute")) == [
        (4, 5),
        (8, 9),
        (12, 13),
        (13, 15),
        (15, 17),
        (23, 25),
    ]
    assert times(timeline.on("reduce")) == [(15, 23), (23, 27), (27, 31)]
    assert timeline.seconds == 31
    assert timeline.comm_s == 12 + 8 + 4 + 4
    assert times(timeline.idle()) == [(0, 4), (5, 8), (9, 12), (17, 23), (25, 31)]


def test_contention_by_hand() -> None:
    """With contention 1 a compute beside a collective runs at half its rate: 3.5 = 1 + 1 slowed second / 2 + 1.5."""
    timeline = simulate(zero3()(three_layers()), FREE.replace(contention=1.0))
    assert times(timeline.on("compute")) == [
        (1, 3.5),
        (3.5, 6),
        (6, 8),
        (8, 12),
        (12, 17),
        (17, 21.5),
    ]
    assert timeline.seconds == 22.5


def test_latency_is_not_shared_by_hand() -> None:
    """Two collectives at once, each a second of latency and a second of the link: 1 + 2."""
    timeline = simulate(zero3()(three_layers()), FREE.replace(node_latency=1.0))
    assert times(timeline.on("reduce"))[0] == (12, 15)
    assert times(timeline.on("compute"))[4] == (12, 16)


def test_the_host_computes_by_hand() -> None:
    """With three slots the gather of layer 2 needs no slot to be freed, but is issued after the forward of layer 0."""
    program = zero3(prefetch=1, resident=3)(three_layers())
    ahead = simulate(program, FREE)
    behind = simulate(program, dataclasses.replace(FREE, host_computes=True))
    assert [s.start for s in ahead.on("gather")] == [0, 1, 2]
    assert [s.start for s in behind.on("gather")] == [0, 1, 3]
    assert behind.seconds == ahead.seconds == 20  # 1 + 3 * 2 + 3 * 4 + 1


def test_recomputation_by_hand() -> None:
    timeline = simulate(zero3(remat=remat.first(2))(three_layers()), FREE)
    assert [s.seconds for s in timeline.on("compute")] == [2, 2, 2, 4, 6, 6]


def test_formats_by_hand() -> None:
    """Beside their bytes: a gather decodes its vectors, a reduction encodes and decodes them, an update its shards."""
    trace = three_layers()._replace(update_when="after norm")
    encoding = Encoding("bytes", 1, 1, GB)
    units = [u._replace(gathered_as=encoding, reduced_as=encoding, sum_bytes=2 * GB) for u in trace.units]
    program = zero3(update=True)(trace._replace(units=(*units[:2], trace.units[2])))
    free, slow = (Costs(program.trace, FREE.replace(format_seconds=seconds)) for seconds in (0.0, 1.0))
    for op in program.ops:
        numels = [trace.units[unit].numel for unit in getattr(op, "units", ()) if unit < 2]
        shards = sum(numel // 2 for numel in numels)
        more = {Gather: sum(numels), Reduce: 2 * sum(numels), Update: shards}.get(type(op), 0)  # type: ignore[call-overload]
        assert slow.seconds(op) - free.seconds(op) == pytest.approx(more)
    kinds = {type(op) for op in program.ops}
    assert {Gather, Reduce, Update} <= kinds
    assert trace.units[0].numel > 0


def test_replicas_by_hand() -> None:
    """Two nodes of two: shards inside a node, replicas across. A shard of 1 GB crosses twice, half of it each time, and
    both ranks of a node share its cards: 2 s an all-reduce."""
    trace = three_layers()._replace(mesh=(("replicate", 2), ("shard", 2)))
    timeline = simulate(hsdp()(trace), FREE)
    assert times(timeline.on("replicate")) == [(13, 15), (16, 18), (20, 22)]
    assert timeline.seconds == 22


def test_nodes_by_hand() -> None:
    """Over two nodes of two a ring moves three quarters of a vector; inside a node a half."""
    trace = three_layers()._replace(mesh=(("node", 2), ("local", 2)))
    timeline = simulate(hpz(1)(trace), FREE)
    assert [s.seconds for s in timeline.on("gather")] == [1.5, 0, 1.5, 1.5, 1]  # the second op is the stash
    assert timeline.on("reduce")[0].seconds == 1.5  # beside the gather inside the node: another link


def test_the_update_follows() -> None:
    """3 layers of 10, 11, 12 elements on two ranks; 30 bytes an element, 4 for the norm."""
    trace = three_layers()._replace(update_when="after norm")
    timeline = simulate(zero3()(trace), FREE.replace(memory_bandwidth=1.0))
    assert [s.seconds for s in timeline.spans[-2:]] == [20 + 22 + 24, 150 + 165 + 180]
    assert [type(s.op).__name__ for s in timeline.spans[-2:]] == ["Norm", "Update"]
    assert timeline.seconds == 20 + 66 + 495
    inside = simulate(zero3(update=True)(trace), FREE.replace(memory_bandwidth=1.0))
    assert sum(s.seconds for s in inside.on("compute")) == sum(s.seconds for s in timeline.on("compute"))


SCHEDULES: dict[str, Any] = {
    "zero3": zero3(),
    "prefetch 0": zero3(prefetch=0),
    "prefetch 2": zero3(prefetch=2),
    "resident": zero3(resident=2),
    "remat": zero3(remat=remat.first(2)),
    "zero2": zero2(),
    "zero1": zero1(),
    "update": zero3(update=True),
}
REAL = CLUSTERS["a100-80g"].replace(gpus_per_node=2, unit_overhead=2e-3, jitter=0.0, kernel_latency=0.0)


def program_of(schedule: str, gathers: list[int], microbatches: int = 1) -> Program:
    units = [
        u._replace(gather_bytes=n * 10**6, reduce_bytes=n * 10**6, numel=n * 10**6 // 2)
        for u, n in zip(layers("layers", len(gathers), 0), gathers, strict=True)
    ]
    trace = trace_of(units, [(unit.id,) for unit in units], microbatches)
    costs = (Cost(flops=n * 10**10, bwd_flops=n * 2 * 10**10) for n in gathers[::-1])
    visits = tuple(visit._replace(cost=cost) for visit, cost in zip(trace.visits, costs, strict=True))
    trace = trace._replace(visits=visits, mesh=(("shard", 4),), update_when="after norm")
    return SCHEDULES[schedule](trace)


PROGRAMS = st.builds(
    program_of, st.sampled_from(sorted(SCHEDULES)), st.lists(st.integers(1, 900), min_size=2, max_size=6), st.just(2)
)


@settings(max_examples=60, derandomize=True)
@given(PROGRAMS, st.floats(0, 1), st.floats(1.001, 4))
def test_better_hardware_is_never_slower(program: Program, contention: float, factor: float) -> None:
    cluster = REAL.replace(contention=contention, node_bandwidth=30e9, network_bandwidth=12e9)
    seconds = simulate(program, cluster).seconds
    for field in ("matmul_flops", "attention_flops", "memory_bandwidth", "node_bandwidth", "network_bandwidth"):
        better = cluster.replace(**{field: getattr(cluster, field) * factor})
        assert simulate(program, better).seconds <= seconds * (1 + 1e-9), field
    for field in ("node_latency", "network_latency", "contention", "step_overhead", "unit_overhead"):
        better = cluster.replace(**{field: getattr(cluster, field) / factor})
        assert simulate(program, better).seconds <= seconds * (1 + 1e-9), field


@settings(max_examples=20, derandomize=True)
@given(PROGRAMS)
def test_limits(program: Program) -> None:
    """Without communication the sum of the computes, without compute that of the longest chain of collectives."""
    cluster = REAL.replace(contention=0.0, unit_overhead=0.0, memory_bandwidth=INF)
    free_network = cluster.replace(node_bandwidth=INF, network_bandwidth=INF, node_latency=0.0, network_latency=0.0)
    trace = program.trace
    flops = trace.microbatches * sum(v.cost.flops + v.cost.bwd_flops for v in trace.visits)
    again = sum(
        trace.visits[op.visit].cost.flops for op in program.ops if type(op).__name__ == "Forward" and not op.keep
    )
    assert simulate(program, free_network).seconds == pytest.approx((flops + again) / cluster.matmul_flops, rel=1e-9)
    free_compute = cluster.replace(matmul_flops=INF, node_latency=0.0, network_latency=0.0)
    wire = sum(program.wire_bytes().values()) / 4 * 4
    assert simulate(program, free_compute).seconds == pytest.approx(wire / cluster.network_bandwidth, rel=1e-3)


def test_every_span_begins_when_its_cause_ends() -> None:
    timeline = simulate(program_of("update", [3, 5, 2, 8], 2), REAL)
    at = {span.number: span for span in timeline.spans}
    assert all(span.start == (0.0 if span.cause is None else at[span.cause].end) for span in timeline.spans)
    path = timeline.critical_path()
    overhead = REAL.unit_overhead * len(timeline.trace.units)
    assert path[0].start == 0
    assert path[-1].end + overhead == timeline.seconds
    assert sum(span.seconds for span in path) == pytest.approx(path[-1].end)


PROGRAM = program_of("zero3", [1, 2])
WITHOUT = tuple(visit._replace(cost=visit.cost._replace(flops=0)) for visit in PROGRAM.trace.visits)


@pytest.mark.parametrize(
    ("change", "cluster", "says"),
    [
        ({}, "a100", "unknown cluster 'a100'; did you mean a100-80g"),
        ({"mesh": (("shard", 12),)}, REAL.replace(gpus_per_node=8), "take 8 or 16"),
        ({"mesh": (("node", 2), ("local", 4))}, REAL, "local=2"),
        ({"visits": WITHOUT}, REAL, "no costs"),
    ],
)
def test_refusals(change: dict[str, Any], cluster: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        simulate(PROGRAM.with_trace(PROGRAM.trace._replace(**change)), cluster)


@pytest.mark.parametrize("field", ["matmul_flops", "network_latency", "gpus_per_node"])
def test_a_cluster_checks_its_figures(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=-1"):
        FREE.replace(**{field: -1})
