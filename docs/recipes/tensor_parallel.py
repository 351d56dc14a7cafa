"""Tensor parallelism: each rank of `tensor` has some heads of every layer, and some features of its MLP.

The idea (Shoeybi et al. 2019, arXiv 1909.08053): of two matrices in a row, cut the first by its rows and the second by
its columns. What lies between them, heads or features, then needs nothing of other ranks, and one sum ends each half of
the layer. Which way gradients go follows from `psum`; nothing is placed by hand.

    torchrun --nproc-per-node 2 docs/recipes/tensor_parallel.py
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from tiny import V, counting, language_model, train, weight
from torch import Tensor

import yafsdp_fn as ya

L, E, H, D, FF = 2, 32, 4, 8, 64
AXES, batch = {"tensor": 2}, counting
PARAMS = {
    "embed": ya.Unit({"table": weight(V, E)}),
    "layers": ya.Stacked(
        {
            "qkv": weight(L, 3 * H * D, E, split={"tensor": (-2, 3)}),  # of queries, keys and values a part each
            "out": weight(L, E, H * D, split={"tensor": -1}),
            "up": weight(L, FF, E, split={"tensor": -2}),
            "down": weight(L, E, FF, split={"tensor": -1}),
        }
    ),
    "head": ya.Unit({"out": weight(V, E)}),
}


def attention(w: Any, x: Tensor) -> Tensor:
    """[B, S, E] -> [B, S, E]: what this rank's H / T heads add."""
    q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in ya.linear(x, w["qkv"]).chunk(3, -1))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return ya.linear(heads.transpose(1, 2).flatten(2), w["out"])


def mlp(w: Any, x: Tensor) -> Tensor:
    """[B, S, E] -> [B, S, E]: what this rank's FF / T features add."""
    return ya.linear(F.silu(ya.linear(x, w["up"])), w["down"])


def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
    x = x + ya.psum(attention(w, F.rms_norm(x, (E,))), "tensor")
    return x + ya.psum(mlp(w, F.rms_norm(x, (E,))), "tensor"), None


loss_fn = language_model(block)


def main(steps: int = 60) -> list[float]:
    return train(loss_fn, PARAMS, batch, steps, mesh=ya.mesh(**AXES))[1]


if __name__ == "__main__":
    main()
