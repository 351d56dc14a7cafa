"""The Hessian times a vector (Pearlmutter 1994): the gradient of the derivative along it.

H v = grad(lambda p: d/dt loss(p + t v) at t = 0)(params)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.params.tree import Tree
from yafsdp_fn.transform import functional_loss, grad


def hessian_product(loss: Callable[[Tree, Any], Any]) -> Callable[[Tree, Any, Tree], Tree]:
    """Returns `product(params, batch, v) -> H v`, of the objective that a step descends; zero where params are frozen.

    loss: `loss(params, batch)` -> a scalar or `ya.Mean`; v: a tree like `params`, in its dtypes, as the result

    Exact. The outer derivative is the reverse one, which takes fewer reductions than a forward one of the gradient: the
    counts are in docs/transforms.md. "Fast Exact Multiplication by the Hessian", Neural Computation 6.
    """

    def product(params: Tree, batch: Any, v: Tree) -> Tree:
        def along(p: Tree) -> Tensor:
            slope: Tensor = torch.func.jvp(lambda q: functional_loss(loss)(q, batch), (p,), (v,))[1]
            return slope

        return grad(along)(params)

    return product
