"""Influence functions (Koh and Liang 2017): how a test loss moves with the weight of each training example.

    s = (curvature of the training loss + damping)^-1  gradient of the test loss
    influence of example i = - s . gradient of its loss

The second line takes no gradients: it is the derivative of all examples' losses along s.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.lab.curvature.examples import mean_over_examples, of_examples
from yafsdp_fn.lab.curvature.solve import conjugate_gradients
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.transform import grad


def influence(
    loss: Callable[[Tree, Any], Any],
    params: Tree,
    train: Tree,
    test: Any,
    product: Callable[[Tree], Tree],
    *,
    damping: float,
    tolerance: float = 1e-5,
    products: int = 300,
) -> Tensor:
    """Returns [B]: for each of this rank's training examples, d test loss / d its weight, at the optimum; the
    derivative of a new term `weight * share of the objective`. Leaving one of N examples out is a weight of -1/N.

    train: the examples to judge, a tree of tensors [B, ...]; test: a batch; `loss` accepts these, and a single row
    product: `v -> A v`, the curvature of the training objective, such as a `gauss_newton_product` of all training data
    damping, tolerance, products: of `conjugate_gradients`, which does all the work: products of one gradient

    "Understanding Black-box Predictions via Influence Functions", arXiv:1703.04730.
    """
    how: Any = {"damping": damping, "tolerance": tolerance, "products": products}
    s = conjugate_gradients(product, grad(loss)(params, test), **how).x
    each: Any = torch.func.jvp(lambda p: of_examples(loss, p, train), (params,), (s,), has_aux=True)
    _, slopes, weights = each
    influences: Tensor = -slopes / mean_over_examples(params, weights)
    return influences
