"""Calibration finds the figures of a cluster that is known: the emulated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.emulated.toy import cluster
from yafsdp_fn.emulated import emulate
from yafsdp_fn.planner import Cluster
from yafsdp_fn.planner.calibrate import calibrate

KNOWN = cluster(1e-3).replace(node_bandwidth=4e9, network_bandwidth=4e8, node_latency=1e-3, network_latency=4e-3)


def measured() -> Cluster:
    with emulate(KNOWN, 16):
        return calibrate(device="cpu", per_node=8)


def test_links_are_found(aside: Callable[..., Any]) -> None:
    found = aside(measured)
    for name in ("node_bandwidth", "network_bandwidth", "node_latency", "network_latency"):
        assert 1 / 3 < getattr(found, name) / getattr(KNOWN, name) < 3, (name, found)
