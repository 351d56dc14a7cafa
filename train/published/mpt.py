"""The MPT models of LLM Foundry's published runs: GPT-2's shape, biases included, with a vocabulary of 50,368.

The parameter counts of the published rows are this shape's to the last one. The head's logits are there as a whole, as
they are in those runs; `models.gpt2` by itself never has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from models import gpt2

SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Name -> width, layers, heads."""


def config(model: str, seq_len: int) -> gpt2.Config:
    """The shape of `model`, with as many positions as the sequences have."""
    embed, layers, heads = SIZES[model]
    return gpt2.Config(vocab=50_368, embed=embed, ffn=4 * embed, layers=layers, heads=heads, max_length=seq_len)


def loss(config: gpt2.Config) -> Callable[[Any, Any], ya.Mean]:
    """`loss_fn(params, batch)`: the cross entropy of logits [B, S, V] that are kept for the backward."""
    body, scores = gpt2.DECODER.block(config), gpt2.DECODER.head(config)

    def head(weights: Any, x: Tensor, targets: Tensor) -> ya.Mean:
        logits = scores(weights, x).flatten(0, 1)
        return ya.Mean(F.cross_entropy(logits, targets.flatten(), reduction="sum").float(), (targets != -100).sum())

    def loss_fn(params: Any, batch: Any) -> ya.Mean:
        x = gpt2.DECODER.embedded(config, params, batch["tokens"], 0, None)
        x, _ = ya.scan(body, x, params.layers)
        found: ya.Mean = ya.apply(head, gpt2.DECODER.head_unit(config, params), x, batch["targets"])
        return found

    return loss_fn
