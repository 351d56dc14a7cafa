"""The emulated backend on CUDA: collectives are kernels on streams, and the host waits for none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_fn as ya
from benchmarks.emulated import emulate
from tests.benchmarks.emulated.test_training import fsdp2, steps
from tests.benchmarks.emulated.toy import UNIT_BYTES, Loss, batch, cluster, params
from tests.harness.child_process import InChild
from tests.harness.gpu import ON_GPU

pytestmark = ON_GPU
SECONDS = 0.2
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(group: Any, **options: Any) -> tuple[Any, torch.Tensor]:
    """An all-gather of a unit of ones on this rank, which takes `SECONDS`."""
    full = torch.zeros(UNIT_BYTES // 4, device="cuda")
    return _gather(full, torch.ones(full.numel() // 64, device="cuda"), group=group, **options), full


def milliseconds(work: Callable[[], object]) -> float:
    """Of the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def goes_on(group: Any) -> bool:
    """Whether the host finds a collective under way after waiting for it: one that blocks never does."""
    work, full = gather(group, async_op=True)
    work.wait()
    found = not work.is_completed()
    assert bool((full == 1).all())  # the copy to the host comes after the wait of the stream
    return found


def waits(move_bytes: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with emulate(cluster(SECONDS), 64, move_bytes=move_bytes):
        groups = [dist.new_group(list(range(64))) for _ in range(2)]
        gather(groups[0])  # compiles
        torch.cuda.synchronize()
        # a busy machine may hold the host up for as long as a collective lasts, not every time
        found["host goes on"] = any(goes_on(groups[0]) for _ in range(20))
        found["synchronous"] = milliseconds(lambda: gather(groups[0]))

        def both(of: tuple[int, int]) -> None:
            for work, _ in [gather(groups[index], async_op=True) for index in of]:
                work.wait()

        found["one group"] = milliseconds(lambda: both((0, 0)))
        found["two groups"] = milliseconds(lambda: both((0, 1)))
        found["future"] = milliseconds(lambda: gather(groups[0], async_op=True)[0].get_future().wait())
    return found


@pytest.mark.parametrize("move_bytes", [False, pytest.param(True, marks=needs_triton)])
def test_collectives_take_their_time_on_the_stream(in_child: InChild, move_bytes: bool) -> None:
    found = in_child(waits, move_bytes)
    alone = SECONDS * 1e3 * 63 / 64
    assert found["host goes on"]
    assert found["synchronous"] >= 0.95 * alone
    assert found["one group"] >= 1.9 * alone
    if importlib.util.find_spec("triton") is not None:  # without it each is as if alone
        assert found["two groups"] >= 1.9 * alone
    assert found["future"] >= 0.95 * alone


def trains() -> tuple[list[float], list[float], ya.timeline.Timeline]:
    """Losses of FSDP2 and of ours, and our last step."""
    with emulate(cluster(1e-3), 64):
        theirs = steps(fsdp2(init_device_mesh("cuda", (64,)), "cuda"), "cuda")
        tx = ya.optim.sgd(0.1)
        state = ya.init(params(), tx, mesh=ya.mesh(device="cuda"))
        step = ya.train_step(Loss(), tx)
        ours = []
        with ya.timeline.record() as recording:
            for _ in range(4):
                state, metrics = step(state, batch().cuda())
                ours.append(float(metrics["loss"]))
        return theirs, ours, recording.timeline()


def test_fsdp2_and_ours_train(in_child: InChild) -> None:
    theirs, ours, timeline = in_child(trains)
    assert theirs[-1] < theirs[0]
    assert ours[-1] < ours[0]
    at = {span.number: span for span in timeline.spans}
    assert timeline.streams == ("gather", "compute", "reduce")
    for span in timeline.spans:
        assert 0 <= span.start <= span.end <= timeline.seconds
        if span.cause is not None:
            assert at[span.cause].end <= span.start + 1e-5  # events of two streams, in steps of a microsecond or so
