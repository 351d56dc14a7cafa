"""Multiplication of the updates by a number or by a schedule; the learning rate is the negative case."""

import dataclasses
from typing import NamedTuple

from torch import Tensor

from yafsdp_fn.optim.base import GradientTransformation, State, new_count, scaled, stateless
from yafsdp_fn.optim.rates import Rate
from yafsdp_fn.params.tree import Tree


class ScaleByScheduleState(NamedTuple):
    """count: int32 [], completed steps."""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count


@dataclasses.dataclass(frozen=True)
class Scale:
    """Rule: multiply by a number, or by a rate at the state's count."""

    by: float | Rate


def scale(step_size: float) -> GradientTransformation:
    """Multiplies updates by `step_size`."""

    return stateless(lambda updates, params: scaled(updates, step_size), rule=Scale(step_size))


def scale_by_schedule(step_size_fn: Rate) -> GradientTransformation:
    """Multiplies updates by `step_size_fn(count)`."""

    def init(params: Tree) -> State:
        return ScaleByScheduleState(new_count(params))

    def update(updates: Tree, state: ScaleByScheduleState, params: Tree | None = None) -> tuple[Tree, State]:
        return scaled(updates, step_size_fn(state.count)), ScaleByScheduleState(state.count + 1)

    return GradientTransformation(init, update, elementwise=True, rule=Scale(step_size_fn))


def scale_by_learning_rate(learning_rate: float | Rate, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiplies updates by minus the learning rate (a float or a schedule); by plus it without `flip_sign`."""
    sign = -1 if flip_sign else 1
    if not callable(learning_rate):
        return scale(sign * learning_rate)
    return scale_by_schedule(lambda count: sign * learning_rate(count))
