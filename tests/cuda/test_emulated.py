"""What else runs on streams of its own: the emulated cluster's collectives, and marks of when ops ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from benchmarks.emulated.cuda import CudaLane, CudaWire
from benchmarks.emulated.lanes import Collective
from tests.cuda.days import MESHES
from tests.cuda.test_traces import PARAMS, PRECISION, TX, batch, loss
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import Stream, fake_cuda, stream
from tests.harness.fake_cuda.log import findings
from tests.harness.fake_cuda.ranks import Ranks, rank_of
from tests.harness.fake_cuda.tensors import CUDA
from yafsdp_fn.planner.cluster import Phase
from yafsdp_fn.util import on_gpu


def lanes(self: Any, kind: str) -> CudaLane:
    self._cuda = self._cuda or CudaWire(move_bytes=False)
    return CudaLane(self._cuda)


def steps(mesh: Any, count: int) -> Any:
    state = ya.init(PARAMS, TX, mesh=mesh, precision=PRECISION)
    step = ya.train_step(loss, TX, schedule=ya.schedules.zero3(update=True))
    for _ in range(count):
        state, metrics = step(state, batch())
    return state, metrics


def emulated(triton: bool) -> list[str]:
    """What is wrong in steps whose collectives take their time on the device."""
    with fake_cuda() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_gpu, "HAS_TRITON", triton)
        patch.setattr(Ranks, "_lane", lanes)
        with rank_of(MESHES["shard"]) as mesh:
            steps(mesh, 3)
        return [found.kind for found in findings(device.log)]


def asynchronous(before: bool, after: bool) -> list[str]:
    """What is wrong in a collective on a stream of its group, which waits for what is under way, and is waited for."""
    with fake_cuda() as device, pytest.MonkeyPatch.context() as patch:
        lane = CudaLane(CudaWire(move_bytes=False))
        given, out = torch.zeros(8, device=CUDA), torch.zeros(8, device=CUDA)
        if not before:
            patch.setattr(Stream, "wait_stream", lambda self, other: None)
        phase = Phase("node", 1e-3)
        work = lane.run(Collective("gather", [phase], [lambda: out.copy_(given)], [out], [given], True))
        if after:
            work.wait()
        out.add_(1)
        lane.close()
        return [found.kind for found in findings(device.log)]


@in_child_process
def test_emulated_collectives_are_ordered() -> None:
    assert emulated(True) == emulated(False) == asynchronous(True, True) == []
    assert "race" in asynchronous(False, True)
    assert "race" in asynchronous(True, False)


@in_child_process
def test_steps_are_recorded_by_marks_on_the_device() -> None:
    with fake_cuda(), rank_of(MESHES["shard"]) as mesh:
        with ya.timeline.record() as recording:
            steps(mesh, 2)
        first, second = recording.timelines
        assert second.measured
        assert first.spans
        assert second.spans


@in_child_process
def test_visits_stay_on_the_stream_of_the_step() -> None:
    def wanders(params: Any, batch: Any) -> Any:
        with stream(Stream()):
            return loss(params, batch)

    with fake_cuda(), rank_of(MESHES["shard"]) as mesh:
        state, _ = steps(mesh, 1)
        with pytest.raises(RuntimeError, match="runs on another CUDA stream than the step began on"):
            ya.train_step(wanders, TX)(state, batch())
