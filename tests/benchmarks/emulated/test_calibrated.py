"""Calibration finds the figures of a cluster that is known: the emulated one, on a clock of its own."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest

from benchmarks.emulated import emulate
from tests.benchmarks.emulated.toy import cluster
from tests.harness.calibration import LITTLE
from tests.harness.child_process import in_child_process
from yafsdp_fn.lab.calibrate import SIZES, calibrate

FEW = {"cpu": LITTLE._replace(large=SIZES["cpu"].large)}
"""Sizes of what is no link: on this clock it takes no time, so that all of it is repeated as often as may be."""
KNOWN = cluster(1e-3).replace(node_bandwidth=4e9, network_bandwidth=4e8, node_latency=1e-3, network_latency=4e-3)


class Clock:
    """In place of the modules `time` and `threading`: time passes by a little when it is read, and by a wait."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()

    def perf_counter(self) -> float:
        return self.passes(1e-6)

    def passes(self, seconds: float) -> float:
        with self._lock:
            self._now += seconds
            return self._now

    def Condition(self) -> threading.Condition:
        condition = threading.Condition()
        condition.wait = self.passes
        return condition


@in_child_process
def test_links_are_found() -> None:
    clock = Clock()
    with (
        patch.multiple("yafsdp_fn.lab.calibrate", time=clock, SIZES=FEW),
        patch.multiple("benchmarks.emulated.lanes", time=clock, threading=clock),
        emulate(KNOWN, 16),
    ):
        found = calibrate(device="cpu", per_node=8)
    for name in ("node_bandwidth", "network_bandwidth", "node_latency", "network_latency"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=0.02), (name, found)
