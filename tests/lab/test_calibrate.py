"""Figures of this machine: they are figures, alike on all ranks, and the planner takes them.

How large they are is for `emulated/test_calibrated.py`, where the cluster is known: nothing is timed here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.harness.calibration import brief
from tests.harness.pool import Pools
from tests.program.traces import on
from tests.schedules.cases import LARGER
from yafsdp_fn.lab.calibrate import calibrate
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.schedules import zero3

RATES = (
    *("matmul_flops", "attention_flops", "memory_bandwidth"),
    *("node_bandwidth", "network_bandwidth", "host_bandwidth"),
)


def check(cluster: Cluster, ranks: int) -> None:
    for name in RATES:
        assert 1e5 < getattr(cluster, name) < 1e18, (name, cluster)
    assert 0 < cluster.kernel_latency < 1
    for name in ("node_latency", "network_latency", "contention", "link_contention", "format_seconds"):
        assert 0 <= getattr(cluster, name) < math.inf, (name, cluster)
    assert 2**20 < cluster.memory_bytes < 2**50
    assert cluster.gpus_per_node == ranks
    assert cluster.host_computes
    assert eval(repr(cluster)) == cluster  # a preset to paste
    trace = on(LARGER["three layers"], (("shard", ranks),))
    visits = tuple(visit._replace(cost=visit.cost._replace(flops=10**6, bwd_flops=2 * 10**6)) for visit in trace.visits)
    timeline = simulate(zero3()(trace._replace(visits=visits)), cluster)
    assert math.isfinite(timeline.seconds)
    assert timeline.compute_s > 0
    assert (timeline.comm_s > 0) == (ranks > 1)


def test_one_rank() -> None:
    cluster = calibrate("laptop", device="cpu", per_node=1)
    check(cluster, 1)
    assert cluster.name == "laptop"
    assert cluster.contention == cluster.link_contention == 0
    assert cluster.node_bandwidth == cluster.network_bandwidth == pytest.approx(cluster.memory_bandwidth / 2, rel=0.01)


def on_ranks(mesh: Any, per_node: int | None) -> Cluster:
    with brief():
        return calibrate(device="cpu", per_node=per_node)


def test_two_ranks_measure_their_link_and_agree(pools: Pools) -> None:
    first, second = pools[2].run(on_ranks, 2)
    assert first == second
    check(first, 2)
    assert (first.network_bandwidth, first.network_latency) == (first.node_bandwidth, first.node_latency)


def test_two_nodes_of_one_rank(pools: Pools) -> None:
    first, second = pools[2].run(on_ranks, 1)
    assert first == second
    check(first.replace(gpus_per_node=2), 2)
    assert first.node_bandwidth == pytest.approx(first.memory_bandwidth / 2, rel=0.01)
    assert first.node_latency == 0


def test_ranks_that_do_not_fill_nodes(pools: Pools) -> None:
    for error in pools[3].errors(on_ranks, 2):
        assert "ValueError: calibrate: 3 ranks do not fill nodes of per_node=2; give a divisor of 3" in error


def test_a_device_with_an_index() -> None:
    with pytest.raises(ValueError, match="device='cuda:1', expected 'cuda' or 'cpu'"):
        calibrate(device="cuda:1")
