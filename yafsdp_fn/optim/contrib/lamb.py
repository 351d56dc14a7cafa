"""LAMB (You et al., 2020), with Optax's names, defaults and order; each leaf whole, at the rank that owns it."""

from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.optim import (
    EmptyState,
    GradientTransformation,
    Rate,
    add_decayed_weights,
    assume_leafwise,
    chain,
    needed,
    scale_by_adam,
    scale_by_learning_rate,
)


def scale_by_trust_ratio(
    min_norm: float = 0.0, trust_coefficient: float = 1.0, eps: float = 0.0
) -> GradientTransformation:
    """Multiplies each leaf's update by `trust_coefficient * |parameter| / (|update| + eps)`; by 1 where a norm is zero.

    min_norm: of both norms, at least

    >>> scaled = update(ya.optim.contrib.scale_by_trust_ratio())
    >>> torch.allclose(scaled.norm(), w.norm())
    True
    """

    def update(updates: Tensor, state: Any, params: Tensor | None = None) -> tuple[Tensor, Any]:
        params = needed("scale_by_trust_ratio", params)
        of_params, of_updates = (leaf.norm().clamp(min=min_norm) for leaf in (params, updates))
        ratio = trust_coefficient * of_params / (of_updates + eps)
        return updates * torch.where((of_params == 0) | (of_updates == 0), 1.0, ratio), state

    return assume_leafwise(GradientTransformation(lambda leaf: EmptyState(), update), params=True)


def lamb(
    learning_rate: float | Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> GradientTransformation:
    """Adam whose update of each leaf has a norm in proportion to that of its parameter. Layers of a stack are leaves of
    their own.

    mask: the leaves that decay, as for `adamw`; default all

    Updates and parameters travel to the owners of leaves, as far as these lack them, and updates back.

    >>> update(ya.optim.contrib.lamb(0.1))
    tensor([-0.1581,  0.1581])
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )
