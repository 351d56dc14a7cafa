"""Curvature: products with the Hessian and the Gauss-Newton matrix, and their largest eigenvalues.

The idea: a matrix as large as the square of a model is never made; its product with a vector costs two gradients.

    Hessian times v         gradient of the derivative along v                         Pearlmutter 1994
    Gauss-Newton times v    jvp to the outputs, Hessian of the loss there, vjp back    Schraudolph 2002
    top eigenvalues         Lanczos: products, made orthogonal to those before

Vectors are trees like the parameters, of which each rank has its shards. The loss must draw no random numbers.

    torchrun --nproc-per-node 2 docs/recipes/curvature.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from tiny import LLAMA, counting, say
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import yafsdp_fn as ya
from models import llama

Product = Callable[[Any], Any]
"""A symmetric matrix, as a function from a vector to its product."""


def hessian(loss: Callable[..., Any], params: Any, batch: Any, v: Any) -> Any:
    """The Hessian of the objective that a step descends, times `v`."""
    value = ya.functional_loss(loss)
    return ya.grad(lambda p: torch.func.jvp(lambda q: value(q, batch), (p,), (v,))[1])(params)


def gauss_newton(outputs: Callable[..., Tensor], loss: Callable[..., Any], params: Any, batch: Any, v: Any) -> Any:
    """The Gauss-Newton matrix times `v`. loss: `loss(outputs, batch)`, a mean over this rank's rows"""
    z, dz = torch.func.jvp(lambda p: outputs(p, batch), (params,), (v,))[:2]
    slope = torch.func.grad(ya.functional_loss(lambda _, z: loss(z, batch)), argnums=1)
    curved = torch.func.jvp(lambda z: slope(params, z), (z,), (dz,))[1]
    return ya.grad(lambda p: (outputs(p, batch) * curved).sum())(params)


def plus(x: Any, scale: float, y: Any) -> Any:
    return optree.tree_map(lambda x, y: x + scale * y, x, y)


def top_eigenvalues(product: Product, start: Any, count: int, products: int) -> Tensor:
    """The `count` largest eigenvalues, in float64 on the CPU: after enough products, and one of each eigenspace."""
    basis, matrix = [plus(start, 1 / float(ya.global_norm(start)) - 1, start)], torch.zeros(products, products).double()
    for k in range(products):
        rest = product(basis[k])
        for i in [*range(k + 1)] * 2:  # twice: rounding would bring back what has converged
            along = float(ya.vdot(basis[i], rest))
            matrix[i, k] += along
            rest = plus(rest, -along, basis[i])
        length = float(ya.global_norm(rest))
        basis.append(plus(rest, 1 / length - 1, rest))
    return torch.linalg.eigvalsh(matrix.triu() + matrix.triu(1).T).flip(0)[:count]


def main() -> None:
    mesh, loss = ya.mesh(), llama.loss(LLAMA)
    params, batch = ya.init(llama.params(LLAMA), mesh=mesh).params, ya.shard_batch(counting(0), mesh)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no derivative of a derivative
        found = top_eigenvalues(partial(hessian, loss, params, batch), ya.normal_like(0, params), 2, products=6)
    say(f"largest eigenvalues of the Hessian: {', '.join(f'{value:.3g}' for value in found)}")


if __name__ == "__main__":
    main()
