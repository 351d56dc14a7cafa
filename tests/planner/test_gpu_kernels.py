"""RMSNorm on the CPU's fake tensors as a GPU has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from yafsdp_fn.planner.trace import trace
from yafsdp_fn.program.trace import Trace

B, S, E = 2, 8, 16
BF16 = ya.Precision(compute=torch.bfloat16)


def normalised(device: Any) -> Trace:
    def block(x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, None]:
        return F.rms_norm(x, (E,), w["gain"], 1e-5), None

    def loss(params: Any, batch: Tensor) -> Tensor:
        x = ya.apply(lambda w, x: x + w["bias"], params["first"], batch)
        return ya.scan(block, x, params["layers"])[0].float().sum()

    params = {"first": {"bias": ya.Param((E,))}, "layers": ya.Stacked({"gain": ya.Param((3, E))})}
    return trace(loss, params, torch.empty(B, S, E, dtype=torch.bfloat16), precision=BF16, device=device)


def test_a_gpu_saves_the_input_and_a_scale_per_row() -> None:
    for visit in normalised("cuda").visits[1:]:
        assert visit.cost.kept_bytes == B * S * E * 2 + B * S * 4
        assert visit.cost.peak_bytes == B * S * E * 2 + B * S * 4  # out, and the scales


def test_devices_are_named() -> None:
    with pytest.raises(ValueError, match="device='tpu', expected 'cuda' or 'cpu'"):
        normalised("tpu")
