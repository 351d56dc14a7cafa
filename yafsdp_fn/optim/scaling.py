"""Multiplication of the updates by a number or by a schedule; the learning rate is the negative case."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import optree
from torch import Tensor

from yafsdp_fn.optim.base import EmptyState, GradientTransformation, State, new_count
from yafsdp_fn.optim.schedules import Schedule
from yafsdp_fn.tree import Tree


class ScaleByScheduleState(NamedTuple):
    """count: int32 [], completed steps."""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count


@dataclasses.dataclass(frozen=True)
class Scale:
    """Rule: multiply by `sign * step_size`, the latter possibly a schedule of the state's count."""

    step_size: float | Schedule
    sign: int = 1

    def factor(self, state: Any) -> float | Tensor:
        """This step's factor: a 0-dim tensor if a schedule makes one, else a float."""
        value = self.step_size(state.count) if callable(self.step_size) else self.step_size
        factor: float | Tensor = self.sign * value
        return factor


def _scale_by(rule: Scale) -> GradientTransformation:
    def init(params: Tree) -> State:
        return ScaleByScheduleState(new_count(params)) if callable(rule.step_size) else EmptyState()

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        factor = rule.factor(state)
        updates = optree.tree_map(lambda u: (u * factor).to(u.dtype), updates)
        return updates, ScaleByScheduleState(state.count + 1) if callable(rule.step_size) else state

    return GradientTransformation(init, update, elementwise=True, rule=rule)


def scale(step_size: float) -> GradientTransformation:
    """Multiplies updates by `step_size`."""
    return _scale_by(Scale(step_size))


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiplies updates by `step_size_fn(count)`."""
    return _scale_by(Scale(step_size_fn))


def scale_by_learning_rate(learning_rate: float | Schedule, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiplies updates by minus the learning rate (a float or a schedule); by plus it without `flip_sign`."""
    return _scale_by(Scale(learning_rate, -1 if flip_sign else 1))
