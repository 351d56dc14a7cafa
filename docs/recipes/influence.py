"""Influence functions: which rows of the training data made the model say this, and which spoke against it.

The idea (Koh and Liang 2017, arXiv 1703.04730): to first order, a row with a little more weight moves the parameters by
- (curvature + damping)^-1 times its gradient, and so the loss of a test by the inner product with the gradient of the
test. Solve once for the test; then no gradient of any row is needed, since all inner products are one derivative of the
rows' losses along the solution.

    torchrun --nproc-per-node 2 docs/recipes/influence.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import optree
import torch
from curvature import Product, gauss_newton, plus
from tiny import LLAMA, counting, say, train
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import yafsdp_fn as ya
from models import llama


def solve(product: Product, b: Any, damping: float, products: int) -> Any:
    """`x` with `product(x) + damping x = b`, by conjugate gradients."""
    x, rest, way, left = plus(b, -1, b), b, b, float(ya.vdot(b, b))
    for _ in range(products):
        image = plus(product(way), damping, way)
        step = left / float(ya.vdot(way, image))
        x, rest = plus(x, step, way), plus(rest, -step, image)
        before, left = left, float(ya.vdot(rest, rest))
        way = plus(rest, left / before, way)
    return x


def influences(loss: Any, params: Any, rows: Any, s: Any) -> Tensor:
    """[B]: the derivative of the test loss by the weight of each row of this rank, `s` = solve(product, test gradient).

    No gradients are taken: it is the derivative of all rows' losses along `s`.
    """

    def of_row(p: Any, row: Any) -> Tensor:
        found = loss(p, optree.tree_map(lambda leaf: leaf[None], row))
        return found.total if isinstance(found, ya.Mean) else found

    each = torch.func.vmap(of_row, in_dims=(None, 0))
    slopes: Tensor = torch.func.jvp(lambda p: each(p, rows), (params,), (s,))[1]
    return -slopes


def entropy(logits: Tensor, batch: Any) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def main(steps: int = 30, products: int = 8) -> list[float]:
    mesh, loss = ya.mesh(), llama.loss(LLAMA)
    state, _ = train(loss, llama.params(LLAMA), counting, steps, mesh=mesh)
    params, rows = state.params, ya.shard_batch(counting(0), mesh)
    test = optree.tree_map(lambda leaf: leaf[:1].expand(mesh.size(), -1), counting(0))  # the first row itself
    outputs = lambda params, batch: llama.logits(LLAMA, params, batch["tokens"])  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no derivative of a derivative
        slope = ya.grad(loss)(params, ya.shard_batch(test, mesh))
        s = solve(partial(gauss_newton, outputs, entropy, params, rows), slope, damping=0.1, products=products)
        own = influences(loss, params, rows, s)
    every = [torch.empty_like(own) for _ in range(mesh.size())]
    torch.distributed.all_gather(every, own)
    found = torch.cat(every).tolist()
    say(f"on the loss of row 0, rows have the influence {', '.join(f'{value:.2g}' for value in found)}")
    return found


if __name__ == "__main__":
    main()
