"""Steps on tokens without values, as plan and trace take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models import llama
from models.parts.axes import NONE, Axes


def batch_of(rows: int, length: int) -> dict[str, Tensor]:
    tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
    return {"tokens": tokens, "targets": tokens}


def step_of(config: llama.Config, rows: int = 4, length: int = 64, *, axes: Axes = NONE, **options: Any) -> Any:
    """The loss of a Llama, its parameters and a batch. options: of the loss"""
    loss = llama.loss(config, axes=axes, **options)
    return loss, llama.params(config, **axes.options), batch_of(rows, length)
