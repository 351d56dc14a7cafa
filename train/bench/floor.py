"""The floor of a training step: the model's own forward and backward on whole weights, and the optimizer's kernel on as
many elements as a rank of ours has, in one flat tensor.

No Python of any sharding, of an optimizer class, or of a gradient's way to its place: the kernel updates other memory,
from gradients that never change, and the weights stay what they are. It is a clock, with no loss to compare.
"""

from __future__ import annotations

from typing import Any

import optree
import torch

from models.llama import model as llama
from train.bench.contenders import ADAMW, LEARNING_RATE, Batch
from train.bench.options import Shape
from train.bench.peer_model import materialize


class Pure:
    """On each of `ranks` ranks, which do not communicate."""

    def __init__(self, shape: Shape, *, ranks: int, seed: int, device: torch.device) -> None:
        self._config = shape.llama()
        params = materialize(self._config, seed=seed, device=device)
        rows = [optree.tree_map(lambda stack, l=l: stack[l], params.layers) for l in range(shape.layers)]
        self._params: Any = optree.tree_map(
            lambda leaf: leaf.detach().clone().requires_grad_(), params._replace(layers=rows)
        )
        self._leaves = optree.tree_leaves(self._params)
        self._block, self._head_loss = llama.block(self._config), llama.head_loss(self._config)
        count = sum(leaf.numel() for leaf in self._leaves)
        self._flat = [torch.full((-(-count // ranks),), 1e-3, device=device) for _ in range(4)]
        self._steps = torch.ones((), device=device)

    def step(self, batch: Batch) -> float:
        tokens, params = batch["tokens"], self._params
        x = llama.embed(params.embed, tokens)
        rope = llama.rotary(self._config, torch.arange(tokens.shape[1], device=tokens.device), x.dtype)
        for weights in params.layers:
            x, _ = self._block(x, weights, rope)
        mean = self._head_loss(params.head, x, batch["targets"])
        loss = mean.total / mean.weight
        torch.autograd.grad(loss, self._leaves)
        values, grads, first, second = ([column] for column in self._flat)
        torch._fused_adamw_(
            values,
            grads,
            first,
            second,
            [],
            [self._steps],
            lr=LEARNING_RATE,
            beta1=ADAMW["b1"],
            beta2=ADAMW["b2"],
            eps=ADAMW["eps"],
            weight_decay=ADAMW["weight_decay"],
            amsgrad=False,
            maximize=False,
        )
        return float(loss.detach())

    def program(self) -> None:
        return None
