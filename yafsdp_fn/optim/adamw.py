"""Adam and AdamW, as in Optax:

mu = b1 * mu + (1 - b1) * g;  nu = b2 * nu + (1 - b2) * g ** 2;  count += 1
update = (mu / (1 - b1 ** count)) / (sqrt(nu / (1 - b2 ** count)) + eps)
AdamW: param -= learning_rate * (update + weight_decay * param)
"""

import dataclasses
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import GradientTransformation, State, chain, new_count
from yafsdp_fn.optim.masking import add_decayed_weights
from yafsdp_fn.optim.rates import Rate
from yafsdp_fn.optim.scaling import scale_by_learning_rate
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.tree import Tree


class ScaleByAdamState(NamedTuple):
    """count: int32 [], completed steps; mu, nu: first and second moments, trees like the parameters."""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    mu: Tree
    nu: Tree


@dataclasses.dataclass(frozen=True)
class Adam:
    """Rule: divide the mean gradient by its root mean square."""

    b1: float
    b2: float
    eps: float

    def __post_init__(self) -> None:
        if any(isinstance(given, Tensor) for given in (self.b1, self.b2, self.eps)):
            return  # injected (inject.py): the host does not read them
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1 and self.eps >= 0):
            raise ValueError(f"adam: expected b1 and b2 in [0, 1) and eps >= 0, got {self}")


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Adam without the learning rate: bias-corrected first moment over the root of the second."""

    def init(params: Tree) -> State:
        mu, nu = (optree.tree_map(torch.zeros_like, params) for _ in range(2))
        return ScaleByAdamState(new_count(params), mu, nu)

    def update(updates: Tree, state: ScaleByAdamState, params: Tree | None = None) -> tuple[Tree, State]:
        count = state.count + 1
        mu = optree.tree_map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = optree.tree_map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        # in fp64: 1 - 0.999 ** 1 has four wrong digits in fp32
        correct1, correct2 = 1 - b1 ** count.double(), 1 - b2 ** count.double()
        out = optree.tree_map(lambda m, v: ((m / correct1) / ((v / correct2).sqrt() + eps)).to(m.dtype), mu, nu)
        return out, ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init, update, elementwise=True, rule=Adam(b1, b2, eps))


def adam(learning_rate: float | Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Adam (Kingma and Ba, 2014)."""
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: float | Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: LeafRule | Tree | None = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    mask: `(path, per-layer Param) -> bool`, or a tree of bools: which leaves decay; default all. Usual:
        `lambda path, p: len(p.shape) > 1`
    """
    return chain(
        scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )
