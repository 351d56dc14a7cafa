"""The functions that all contenders call: `models.llama`'s own, blocks compiled once for everybody or not at all.

Shapes are static: a second sequence length compiles again, where torch would otherwise go over to symbolic sizes,
whose kernels are slower. Embedding and head run as they are, for everybody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama


@functools.cache
def block(config: llama.Config, compiled: bool) -> Callable[..., tuple[Tensor, None]]:
    """`llama.block`; the same object for every caller, so that nobody compiles what another has."""
    found: Callable[..., Any] = llama.block(config)
    if compiled:
        torch._dynamo.config.recompile_limit = 64  # two lengths, with and without grad, parameters and slots
        found = torch.compile(found, dynamic=False)
    return found


def loss(
    config: llama.Config, compiled: bool, unroll: int = 1
) -> Callable[[llama.Llama, Mapping[str, Tensor]], ya.Mean]:
    """`llama.loss` with the functions of this module."""
    layer, last = block(config, compiled), llama.head_loss(config)

    def loss_fn(params: llama.Llama, batch: Mapping[str, Tensor]) -> ya.Mean:
        tokens = batch["tokens"]
        x: Tensor = ya.apply(llama.embed, params.embed, tokens)
        rope = llama.rotary(config, torch.arange(tokens.shape[1], device=tokens.device), x.dtype)
        x, _ = ya.scan(layer, x, params.layers, consts=rope, unroll=unroll)
        mean: ya.Mean = ya.apply(last, llama.head_unit(config, params), x, batch["targets"])
        return mean

    return loss_fn
