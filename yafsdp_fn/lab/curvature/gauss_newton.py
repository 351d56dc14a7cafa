"""The (generalised) Gauss-Newton matrix times a vector (Schraudolph 2002): curvature of the loss in the outputs alone.

z, dz = jvp(outputs)(v);   G v = vjp(outputs)(Hessian of the loss in z, times dz)
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.tree import Tree
from yafsdp_fn.transform import functional_loss, grad


def gauss_newton_product(
    outputs: Callable[[Tree, Any], Tree], loss_of_outputs: Callable[[Tree, Any], Any]
) -> Callable[[Tree, Any, Tree], Tree]:
    """Returns `product(params, batch, v) -> G v`, symmetric, and positive semidefinite if the loss is convex in the
    outputs.

    outputs: `outputs(params, batch)` -> a tree of floating-point tensors, such as logits; they are held, with their
        derivative and gradient
    loss_of_outputs: `loss_of_outputs(outputs, batch)` -> a scalar or `ya.Mean`, twice differentiable in all of them
    v: a tree like `params`, in its dtypes, as the result; zero where params are frozen

    For a cross entropy of logits, G is the Fisher information under the model's own targets. "Fast Curvature
    Matrix-Vector Products for Second-Order Gradient Descent", Neural Computation 14.
    """

    def product(params: Tree, batch: Any, v: Tree) -> Tree:
        z, dz = torch.func.jvp(lambda p: outputs(p, batch), (params,), (v,))[:2]
        total = functional_loss(lambda _, z: loss_of_outputs(z, batch))  # the parameters tell which ranks there are
        slope = torch.func.grad(total, argnums=1)
        curved = torch.func.jvp(lambda z: slope(params, z), (z,), (dz,))[1]

        def against(p: Tree) -> Tensor:
            pairs = zip(optree.tree_leaves(outputs(p, batch)), optree.tree_leaves(curved), strict=True)
            return torch.stack([(z * c).sum() for z, c in pairs]).sum()

        return grad(against)(params)

    return product
