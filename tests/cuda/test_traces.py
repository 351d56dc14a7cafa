"""Traces of a state on a GPU: the fake tensors of the GPU get no kernel, and those of a step do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import yafsdp_fn as ya
from tests.cuda.days import MESHES
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.log import findings
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA
from yafsdp_fn.planner.footprint import predict_memory

KERNELS = {"scale_", "softmax_", "sum_rows"}
PARAMS = {"layers": ya.Stacked({"up": ya.Param((2, 8, 8))}), "head": ya.Unit({"out": ya.Param((16, 8))})}
TX = ya.optim.adamw(1e-2)
PRECISION = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32)


def loss(params: Any, batch: dict[str, torch.Tensor]) -> ya.Mean:
    """Of 16 rows, in chunks of 4."""
    x, _ = ya.scan(lambda x, w: (x + ya.linear(x, w["up"]), None), batch["x"].bfloat16(), params["layers"])
    targets = batch["targets"]
    total = ya.apply(lambda w, x: ya.linear_cross_entropy(x, w["out"], targets, chunk=4), params["head"], x)
    return ya.Mean(total, targets.numel())


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(16, 8, device=CUDA), "targets": torch.zeros(16, dtype=torch.int64, device=CUDA)}


@in_child_process
def test_kernels_run_in_steps_and_not_in_traces() -> None:
    with fake_cuda() as device, rank_of(MESHES["shard"]) as mesh:
        state = ya.init(PARAMS, TX, mesh=mesh, precision=PRECISION)
        step = ya.train_step(loss, TX, schedule=ya.schedules.zero3(update=True))
        device.launched.clear()
        predict_memory(step.lower(state, batch()))
        ya.schedules.zero3()(step.trace(state, batch()))
        assert not KERNELS & set(device.launched)
        for _ in range(3):
            state, _ = step(state, batch())
        assert set(device.launched) >= KERNELS
        assert findings(device.log) == []


@in_child_process
@pytest.mark.parametrize(("side", "of_a_step"), [(16, 3), (8, 0)])
def test_products_in_float8_are_of_torchs_kernel_in_steps(side: int, of_a_step: int) -> None:
    """Of slots that nothing overwrites meanwhile; not in traces, and not of sides that the kernel does not take."""
    params = ya.formats.float8({"layers": ya.Stacked({"up": ya.Param((2, side, side))})})
    products: list[Any] = []

    def counted(rows: Any, weight: Any, scale: Any, _: Any, scales: Any, *__: Any, output_dtype: Any) -> Any:
        products.append(rows)
        return (rows.float() @ weight.float() * scale * scales).to(output_dtype)

    def squared(params: Any, x: torch.Tensor) -> torch.Tensor:
        x, _ = ya.scan(lambda x, w: (x + ya.linear(x, w["up"]), None), x.bfloat16(), params["layers"])
        return x.square().mean()

    with fake_cuda() as device, rank_of(MESHES["shard"]) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_mm", counted)
        state = ya.init(params, TX, mesh=mesh, precision=PRECISION)
        step, x = ya.train_step(squared, TX), torch.ones(32, side, device=CUDA)
        step.lower(state, x)
        assert products == []
        state, _ = step(state, x)  # which looks for mistakes, too
        for _ in range(2):
            products.clear()
            state, _ = step(state, x)
            assert len(products) == of_a_step
            assert findings(device.log) == []
