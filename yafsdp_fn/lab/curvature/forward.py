"""Forward gradients (Baydin et al. 2022): a gradient's unbiased estimate from one forward pass.

v = standard normal;   (derivative along v) v   has the gradient as its mean
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.lab.curvature.trees import directions
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.transform import functional_loss


def forward_gradient(loss: Callable[[Tree, Any], Any]) -> Callable[[Tree, Any, int], tuple[Tensor, Tree]]:
    """Returns `estimate(params, batch, seed) -> (value, gradient)` of the objective that a step descends; it only
    gathers.

    value: 0-dim, exact; gradient: a tree like `params`, zero where they are frozen
    seed: of the direction, the same at every number of ranks; use another one in every step

    The variance is that of a single direction: with n parameters (n + 1) |gradient|^2. Means over seeds are estimates,
    too. "Gradients without Backpropagation", arXiv:2202.08587.
    """

    def estimate(params: Tree, batch: Any, seed: int) -> tuple[Tensor, Tree]:
        v = directions(seed, params)
        value, slope = torch.func.jvp(lambda p: functional_loss(loss)(p, batch), (params,), (v,))[:2]
        return value, optree.tree_map(lambda leaf: slope * leaf, v)

    return estimate
