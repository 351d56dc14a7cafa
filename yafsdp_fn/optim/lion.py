"""Lion, as in Optax: steps of one size along the sign of a mean gradient (Chen et al., 2023, arXiv 2302.06675).

update = sign(b1 * mu + (1 - b1) * g);  mu = b2 * mu + (1 - b2) * g
lion: param -= learning_rate * (update + weight_decay * param)
"""

from typing import Literal, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import GradientTransformation, State, chain, new_count
from yafsdp_fn.optim.masking import add_decayed_weights
from yafsdp_fn.optim.rates import Rate
from yafsdp_fn.optim.scaling import scale_by_learning_rate
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.tree import Tree

Mode = Literal["hard", "smooth", "refined"]


class ScaleByLionState(NamedTuple):
    """count: int32 [], completed steps; mu: mean gradient, a tree like the parameters."""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    mu: Tree


def scale_by_lion(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: torch.dtype | None = None,
    *,
    mode: Mode = "hard",
    smooth_beta: float = 1.0,
) -> GradientTransformation:
    """Lion without the learning rate: every element of an update is in [-1, 1].

    b1: share of the mean in the update; b2: decay of the mean; mu_dtype: of the mean, by default the parameters'
    mode: what is made of the mixture x. "hard": sign(x); "smooth": tanh(smooth_beta * x); "refined": x where it is
        below 1 in size, its sign elsewhere

    Raises ValueError for another mode.
    """
    if mode not in ("hard", "smooth", "refined"):
        raise ValueError(f"scale_by_lion: expected mode 'hard', 'smooth' or 'refined', got {mode!r}")

    def direction(g: Tensor, m: Tensor) -> Tensor:
        x = (1 - b1) * g + b1 * m
        if mode == "smooth":
            return torch.tanh(smooth_beta * x)
        return torch.sign(x) if mode == "hard" else x.clamp(-1, 1)

    def init(params: Tree) -> State:
        return ScaleByLionState(
            new_count(params), optree.tree_map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params)
        )

    def update(updates: Tree, state: ScaleByLionState, params: Tree | None = None) -> tuple[Tree, State]:
        mu = optree.tree_map(lambda m, g: (b2 * m + (1 - b2) * g).to(m.dtype), state.mu, updates)
        return optree.tree_map(direction, updates, state.mu), ScaleByLionState(state.count + 1, mu)

    return GradientTransformation(init, update, elementwise=True)


def lion(
    learning_rate: float | Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: torch.dtype | None = None,
    weight_decay: float = 1e-3,
    mask: LeafRule | Tree | None = None,
) -> GradientTransformation:
    """Lion with decoupled weight decay. Usual, beside AdamW: a learning rate 3 to 10 times smaller, a decay as much
    larger. It keeps one moment, where Adam keeps two.

    mask: which leaves decay, as for `adamw`; default all
    """
    return chain(
        scale_by_lion(b1, b2, mu_dtype), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )
