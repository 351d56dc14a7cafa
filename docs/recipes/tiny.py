"""What the recipes share: sequences to learn, a small Llama, weights of a fitting size, and a loop that trains.

A script finds the files of its own folder, so a recipe says `from tiny import ...`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama

V = 32
LLAMA = dataclasses.replace(
    llama.CONFIGS["debug"], vocab=V, embed=32, ffn=64, layers=2, heads=4, kv_heads=2, head_dim=8, max_length=32
)
TX = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-2))


def weight(*shape: int, **options: Any) -> ya.Param:
    """A matrix [..., out, in] that keeps the size of what it multiplies."""
    return ya.Param(shape, init=ya.params.initializers.normal(shape[-1] ** -0.5), **options)


def counting(seed: int, rows: int = 8, length: int = 16) -> dict[str, Tensor]:
    """Sequences that count modulo V, each from its own start in its own steps. tokens, targets: [rows, length]"""
    draw = torch.Generator().manual_seed(seed)
    first, by = torch.randint(V, (rows, 1), generator=draw), torch.randint(1, 4, (rows, 1), generator=draw)
    text = (first + by * torch.arange(length + 1)) % V
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def language_model(block: Callable[[Tensor, Any], tuple[Tensor, None]]) -> Callable[[Any, Any], ya.Mean]:
    """Returns the loss of an embedding, layers and a head: leaves `table` and `out`, batches as of `counting`."""

    def loss_fn(params: Any, batch: Any) -> ya.Mean:
        x = ya.apply(lambda w, tokens: ya.embedding(tokens, w["table"]), params["embed"], batch["tokens"])
        x, _ = ya.scan(block, x, params["layers"])
        total = ya.apply(lambda w, x, to: ya.linear_cross_entropy(x, w["out"], to), params["head"], x, batch["targets"])
        return ya.Mean(total, batch["targets"].numel())

    return loss_fn


def train(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    batch: Callable[[int], Any],
    steps: int,
    *,
    mesh: Any = None,
    split: dict[str, int] | None = None,
    stages: Any = None,
    **options: Any,
) -> tuple[Any, list[float]]:
    """Trains on the global batches `batch(0)`, `batch(1)`, ...; returns the state and the losses.

    mesh, split, stages, options: of `ya.init`, `ya.shard_batch` and `ya.train_step`
    """
    mesh = ya.mesh() if mesh is None else mesh
    state, step, losses = ya.init(params, TX, mesh=mesh, stages=stages), ya.train_step(loss_fn, TX, **options), []
    for number in range(steps):
        state, metrics = step(state, ya.shard_batch(batch(number), mesh, split=split))
        losses.append(metrics["loss"].item())
    say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
    return state, losses


def say(text: str) -> None:
    """Prints on the first rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(text)
