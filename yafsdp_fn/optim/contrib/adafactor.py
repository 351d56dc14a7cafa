"""Adafactor (Shazeer and Stern, 2018) and LAMB (You et al., 2020), with Optax's names, defaults and order.

The second moments of a matrix [m, n] are kept as those of its rows and columns: m + n numbers instead of m n. Each leaf
is updated whole, by the rank that owns it (util/owners.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.optim import (
    EmptyState,
    GradientTransformation,
    Rate,
    add_decayed_weights,
    assume_leafwise,
    chain,
    mean_momentum,
    needed,
    scale,
    scale_by_learning_rate,
)


class FactoredState(NamedTuple):
    """The state of a leaf.

    count: float [], completed steps; v_row, v_col: mean squares over its longest axis, and over the second longest; or
    v: squares of each element
    """

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    v_row: Tensor | None
    v_col: Tensor | None
    v: Tensor | None


def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30,
) -> GradientTransformation:
    """Divides by the root of the second moment, which decays by `1 - (count + 1 - step_offset) ** -decay_rate`, and is
    factored over the two longest axes if both have at least `min_dim_size_to_factor` elements.

    >>> update(ya.optim.contrib.scale_by_factored_rms())
    tensor([ 1., -1.])
    """

    def axes(shape: Sequence[int]) -> tuple[int, int] | None:
        order = sorted(range(len(shape)), key=lambda axis: shape[axis])  # equal axes stay in order
        factors = factored and len(shape) > 1 and shape[order[-2]] >= min_dim_size_to_factor
        return (order[-2], order[-1]) if factors else None

    def init(leaf: Tensor) -> Any:
        count, factors = leaf.new_zeros(()), axes(leaf.shape)
        if factors is None:
            return FactoredState(count, None, None, torch.zeros_like(leaf))
        of_rows, of_columns = (torch.zeros_like(leaf).sum(axis) for axis in reversed(factors))
        return FactoredState(count, of_rows, of_columns, None)

    def update(updates: Tensor, state: FactoredState, params: Tensor | None = None) -> tuple[Tensor, Any]:
        decay = (1 - (state.count + 1 - step_offset) ** -decay_rate).to(updates.dtype)
        squares, factors = updates.square() + epsilon, axes(updates.shape)
        if factors is None or state.v_row is None or state.v_col is None:
            assert state.v is not None
            v = decay * state.v + (1 - decay) * squares
            return updates * v.rsqrt(), state._replace(count=state.count + 1, v=v)
        second, longest = factors
        v_row = decay * state.v_row + (1 - decay) * squares.mean(longest)
        v_col = decay * state.v_col + (1 - decay) * squares.mean(second)
        rows = (v_row / v_row.mean(second - (second > longest), keepdim=True)).rsqrt().unsqueeze(longest)
        new = updates * rows * v_col.rsqrt().unsqueeze(second)
        return new, FactoredState(state.count + 1, v_row, v_col, None)

    return assume_leafwise(GradientTransformation(init, update))


def clip_by_block_rms(threshold: float) -> GradientTransformation:
    """Scales each leaf down so that the root of its mean square is at most `threshold`.

    >>> update(ya.optim.contrib.clip_by_block_rms(1.0)).square().mean()
    tensor(1.)
    """

    def update(updates: Tensor, state: Any, params: Tensor | None = None) -> tuple[Tensor, Any]:
        return updates / (_rms(updates) / threshold).clamp(min=1.0), state

    return assume_leafwise(GradientTransformation(lambda leaf: EmptyState(), update))


def scale_by_param_block_rms(min_scale: float = 1e-3) -> GradientTransformation:
    """Multiplies each leaf's update by the root of the mean square of the parameter, at least `min_scale`.

    >>> update(ya.optim.contrib.scale_by_param_block_rms())            # the root of (1 + 4) / 2
    tensor([ 4.7434, -6.3246])
    """

    def update(updates: Tensor, state: Any, params: Tensor | None = None) -> tuple[Tensor, Any]:
        return updates * _rms(needed("scale_by_param_block_rms", params)).clamp(min=min_scale), state

    return assume_leafwise(GradientTransformation(lambda leaf: EmptyState(), update), params=True)


def adafactor(
    learning_rate: float | Rate | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay_rate: float | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay_mask: Any = None,
) -> GradientTransformation:
    """Adafactor as Optax composes it. Layers of a stack are leaves of their own, which Optax would factor as one.

    learning_rate: a number, a rate by the count, or None
    min_dim_size_to_factor, decay_rate, decay_offset, eps, factored: of `scale_by_factored_rms`
    clipping_threshold: of `clip_by_block_rms`, None for no clipping
    multiply_by_parameter_scale: `scale_by_param_block_rms`, which makes the learning rate a part of each parameter
    momentum: of `mean_momentum`, None for none
    weight_decay_rate, weight_decay_mask: of `add_decayed_weights`; the learning rate does not multiply the decay

    >>> update(ya.optim.contrib.adafactor(0.1))
    tensor([-0.1581,  0.1581])
    """
    of_leaf = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        of_leaf.append(clip_by_block_rms(clipping_threshold))
    if multiply_by_parameter_scale:
        of_leaf.append(scale_by_param_block_rms())
    parts = [assume_leafwise(chain(*of_leaf), params=multiply_by_parameter_scale)]  # each leaf travels once
    if learning_rate is not None:
        parts.append(scale_by_learning_rate(learning_rate, flip_sign=False))
    if momentum is not None:
        parts.append(mean_momentum(momentum, nesterov=False))
    if weight_decay_rate is not None:
        parts.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*parts, scale(-1))


def _rms(leaf: Tensor) -> Tensor:
    return leaf.square().mean().sqrt()
