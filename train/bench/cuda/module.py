"""The nn.Module of the peers: `models.llama`'s functions over parameters held by modules, one module per unit.

Module
  embed     Holder
  layers    [Holder]    each a function of its own weights; `recompute` of them under torch's checkpoint
  head      Holder      of a tied config the norm alone: the matrix is handed to it
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import yafsdp_fn as ya
from models import llama
from train.bench.cuda import blocks
from train.bench.peer_model import Holder

STD = 0.02


class Module(nn.Module):
    """`forward(tokens [B, S], targets [B, S])` is the mean loss. Parameters are on the meta device until `fill`.

    recompute: so many layers, the first ones, run their forward again in backward
    """

    def __init__(self, config: llama.Config, *, compiled: bool, recompute: int = 0) -> None:
        super().__init__()
        params: Any = llama.params(config)
        tree = ya.strip(optree.tree_map(lambda p: torch.empty(p.shape, device="meta"), params))
        layer, last = blocks.block(config, compiled), llama.head_loss(config)
        first = optree.tree_map(lambda stack: stack[0], tree.layers)
        self.tied, self.rotary = config.tied, functools.partial(llama.rotary, config)
        self.embed = Holder(tree.embed, llama.embed)
        self.layers = nn.ModuleList(
            Holder(first, functools.partial(_layer, layer, index < recompute)) for index in range(config.layers)
        )
        self.head = Holder(tree.head, _tied(last) if config.tied else last)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        rope = self.rotary(torch.arange(tokens.shape[1], device=tokens.device), x.dtype)
        for layer in self.layers:
            x = layer(x, rope)
        mean = self.head(x, targets, *([self.embed.weight] if self.tied else []))
        loss: Tensor = mean.total / mean.weight
        return loss

    def units(self) -> list[Holder]:
        """In the order of their first use."""
        return [self.embed, *self.layers, self.head]


def _layer(block: Callable[..., Any], recompute: bool, w: Any, x: Tensor, rope: llama.Positions) -> Tensor:
    out: Tensor = checkpoint(block, x, w, rope, use_reentrant=False)[0] if recompute else block(x, w, rope)[0]
    return out


def _tied(last: Callable[..., ya.Mean]) -> Callable[..., ya.Mean]:
    return lambda w, x, targets, matrix: last((w, {"weight": matrix}), x, targets)


def fill(module: nn.Module, device: str) -> None:
    """Gives the parameters of `module` memory on `device`: matrices normal, gains one. Zeros would run cooler."""
    module.to_empty(device=device)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(1.0) if param.ndim == 1 else param.normal_(std=STD)
