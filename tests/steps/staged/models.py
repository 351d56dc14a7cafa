"""Models with what stages find hard: a skip connection past a stage, a table in `consts`, code between visits, aux."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.problems import (
    Batch,
    E,
    Head,
    Layer,
    Params,
    V,
    embed,
    layer,
    masked_loss,
    param,
    pinned,
    tied_head,
    tied_params,
    with_ends,
)

F64 = ya.Precision(param=torch.float64, compute=torch.float64, reduce=torch.float64)
TWO_STAGES = ya.schedules.Assignment(((0,), (0,), (1,), (1,), (1,)), (0, 1))
"""Of `base_params(3)`: the embedding and a layer, then two layers and the head."""


def block(x: Tensor, w: Layer, consts: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
    """A layer of three inputs: the carry, what skips all layers, and a table that every stage makes."""
    skip, table = consts
    return x + w.gate * ya.linear(torch.tanh(ya.linear(x + 0.1 * skip, w.up, w.bias) + table), w.down), None


def head(w: Head, x: Tensor, skip: Tensor, targets: Tensor) -> ya.Mean:
    return masked_loss(ya.linear((x + 0.3 * skip) * w.scale, w.out), targets)


def params(layers: int) -> Params:
    """Two stacks of different layers."""
    return Params(param(V, E), ya.Stacked(layer(layers)), Head(param(E), param(V, E)), ya.Stacked(layer(3, f=9)))


def loss(params: Params, batch: Batch) -> tuple[ya.Mean, dict[str, Any]]:
    x = ya.apply(embed, params.embed, batch["tokens"]) * 1.5  # between visits
    skip = torch.sin(x)
    table = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None] / 10
    tables = [torch.nn.functional.pad(table.expand(-1, -1, 1), (0, f - 1)) for f in (5, 9)]
    middle, _ = ya.scan(block, x, params.layers, consts=(skip, tables[0]))
    out, _ = ya.scan(block, middle, params.more, consts=(skip, tables[1]))
    mean = ya.apply(head, params.head, out, skip, batch["targets"])
    aux = {
        "tokens": ya.Sum((batch["targets"] >= 0).sum()),
        "middle": ya.Mean(middle.detach().square().sum(), float(middle.numel())),
        "largest": ya.Max(out.detach().abs().max()),
    }
    return mean, aux


def product_block(x: Tensor, w: Layer) -> tuple[Tensor, None]:
    """What products with weights are made of are weights themselves: a learned prefix, a product of two matrices."""
    prefix = ya.linear(w.gate.expand(2, -1), w.up).sum(0)
    h = torch.tanh(ya.linear(x, w.up, w.bias) + prefix)
    return x + ya.linear(h, w.down) + ya.linear(x, ya.linear(w.down, w.up.t())), None


def product_head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    return masked_loss(ya.linear(x, w.out) + ya.linear(w.scale, w.out), targets)


def plain_block(x: Tensor, w: Layer) -> tuple[Tensor, None]:
    return torch.nn.functional.dropout(
        x + w.gate * ya.linear(torch.tanh(ya.linear(x, w.up, w.bias)), w.down), 0.2
    ), None


def pinned_params(layers: int) -> Params:
    """The gates of all layers are one unit, as well."""
    return tied_params(layers)._replace(layers=ya.Stacked(pinned(layer(layers), "gate")))


def tied_loss(params: Params, batch: Batch) -> tuple[ya.Mean, dict[str, Any]]:
    """The embedding is the head; dropout in every layer."""
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(plain_block, x, params.layers)
    return ya.apply(tied_head, (params.head, params.embed), x, batch["targets"]), {}


@with_ends
def chained(params: Params, x: Tensor) -> Any:
    return ya.scan(plain_block, x, params.layers)[0]


def chain_loss(params: Params, batch: Batch) -> tuple[ya.Mean, dict[str, Any]]:
    """Of `base_params`. Each visit takes what the one before it has made, as torch's stages do."""
    return chained(params, batch), {}


def product_loss(params: Params, batch: Batch) -> tuple[ya.Mean, dict[str, Any]]:
    """The model of `base_params`, with weights that are multiplied with weights."""
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(product_block, x, params.layers)
    return ya.apply(product_head, params.head, x, batch["targets"]), {}
