"""Allocations and peaks of steps whose allocations are known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import profile

from benchmarks import counting

CPU = torch.device("cpu")
MIB = 1 << 20
Step = Callable[[int], object]


def floats(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MIB // 4)


def test_allocations_of_weight_size_in_all_python_threads() -> None:
    buffer = floats(8)

    def in_a_thread() -> None:
        buffer.mul_(2.0)  # in place: nothing new
        floats(3)

    def step() -> None:
        floats(4)
        floats(1)  # below the limit
        buffer.view(2, -1).add_(1.0)
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()

    with counting.watch_threads() as mode:
        sizes = counting.step_allocations(step, CPU, mode)
    assert sorted(sizes) == [3 * MIB, 4 * MIB]


def test_threads_are_watched_only_inside() -> None:
    run = threading.Thread.run
    with counting.watch_threads():
        assert threading.Thread.run is not run
    assert threading.Thread.run is run


def test_peak_of_tensors_counts_what_lives_and_not_what_building_needed() -> None:
    with profile(profile_memory=True):
        earlier = [floats(32)]

    def build() -> Step:
        floats(64)  # for a moment
        earlier.clear()  # what an earlier profile saw made, released now
        weights = floats(8)
        return lambda i: (weights * 2.0).sum()

    peak = counting.tensor_peak(build, CPU, warmup=2)
    assert 16 * MIB <= peak < 17 * MIB


def test_peak_of_tensors_has_no_scratch_of_kernels() -> None:
    """That of a product in bf16 is larger than its factors on some CPUs."""

    def build() -> Step:
        x, w = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(256, 768, dtype=torch.bfloat16)
        return lambda i: x @ w

    assert counting.tensor_peak(build, CPU, warmup=1) == 2 * 256 * (256 + 768 + 768)


def test_peak_of_resident_memory_sees_a_step_and_forgets_what_came_before() -> None:
    floats(256)
    peak = counting.ResidentPeak()
    peak.reset()
    before = peak.read()
    floats(64)
    grown = peak.read() - before
    # Where the kernel does not let a process reset its mark, the mark is still that of the 256 MiB.
    expected = range(48 * MIB, 80 * MIB) if peak.source == "VmHWM over training steps" else range(1)
    assert grown in expected


def test_count_of_a_step(tmp_path: Path) -> None:
    def build() -> Step:
        weights = floats(8)
        return lambda i: weights + 1.0

    counts = counting.count(build, CPU, tmp_path / "trace.json", warmup=1, group=1)
    assert counts.weight_size_allocations == 1
    assert counts.weight_size_allocated_bytes == 8 * MIB
    assert 16 * MIB <= counts.peak_tensor_bytes < 17 * MIB
    assert counts.peak_memory_bytes > 16 * MIB
    assert counts.collectives == {}
