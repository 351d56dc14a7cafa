"""Scaling of the updates: by a number, by a schedule, or by the global norm; clipping of each element."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import GradientTransformation, State, must_not_be_negative, new_count, scaled, stateless
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.tree import Tree, shape_of

# ---- Learning-rate schedules, `count -> value`, by their Optax names.
#
# An int gives a float. A 0-dim tensor gives the same value as a 0-dim float64 tensor on its device, without reading
# it back: the counter of an optimizer state is on the device, where skipped steps are decided.

Rate = Callable[[Any], Any]
"""`count -> value`: int -> float, or 0-dim tensor -> 0-dim tensor (or float)."""


def constant_schedule(value: float) -> Rate:
    """Returns `value` at every count.

    >>> rate = ya.optim.constant_schedule(0.1)
    >>> [rate(count) for count in (0, 100)]
    [0.1, 0.1]
    """

    def schedule(count: Any) -> Any:
        if isinstance(count, Tensor):
            return torch.full((), value, dtype=torch.float64, device=count.device)
        return value

    return schedule


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Rate:
    """Goes from `init_value` at `transition_begin` to `end_value`, `transition_steps` later; constant outside.

    As in Optax, `transition_steps <= 0` means `init_value` for ever.

    >>> rate = ya.optim.linear_schedule(0.0, 1.0, transition_steps=10)
    >>> [float(rate(count)) for count in (0, 5, 10, 20)]
    [0.0, 0.5, 1.0, 1.0]
    """
    if transition_steps <= 0:
        return constant_schedule(init_value)

    def schedule(count: Any) -> Any:
        left = 1 - _until(count - transition_begin, transition_steps) / transition_steps
        return (init_value - end_value) * left + end_value

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Rate:
    """Goes from `init_value` to `alpha * init_value` along half a cosine, raised to `exponent`; constant after.

    >>> rate = ya.optim.cosine_decay_schedule(1.0, decay_steps=100, alpha=0.1)
    >>> [round(float(rate(count)), 3) for count in (0, 50, 100, 200)]
    [1.0, 0.55, 0.1, 0.1]
    """
    if decay_steps <= 0:
        raise ValueError(f"cosine_decay_schedule: decay_steps must be positive, got {decay_steps}")

    def schedule(count: Any) -> Any:
        angle = math.pi * _until(count, decay_steps) / decay_steps
        cosine = 0.5 * (1 + (torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)))
        return init_value * ((1 - alpha) * cosine**exponent + alpha)

    return schedule


def join_schedules(schedules: Sequence[Rate], boundaries: Sequence[int]) -> Rate:
    """Uses `schedules[i]` from `boundaries[i - 1]` on, counting from that boundary.

    >>> rate = ya.optim.join_schedules([lambda count: 1.0, lambda count: 0.1], boundaries=[10])
    >>> [float(rate(count)) for count in (0, 9, 10, 20)]
    [1.0, 1.0, 0.1, 0.1]
    """
    if len(boundaries) != len(schedules) - 1 or list(boundaries) != sorted(boundaries):
        raise ValueError(
            f"join_schedules: {len(schedules)} schedules need {len(schedules) - 1} rising boundaries, got {boundaries}"
        )

    def schedule(count: Any) -> Any:
        value = schedules[0](count)
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            if isinstance(count, Tensor):
                value = torch.where(count < boundary, value, following(count - boundary))
            elif count >= boundary:
                value = following(count - boundary)
        return value

    return schedule


def warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> Rate:
    """Linear from `init_value` to `peak_value`, then constant. (Without warmup `peak_value`; Optax: `init_value`.)

    >>> rate = ya.optim.warmup_constant_schedule(0.0, 1.0, warmup_steps=10)
    >>> [float(rate(count)) for count in (0, 5, 10, 20)]
    [0.0, 0.5, 1.0, 1.0]
    """
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    return join_schedules([warmup, constant_schedule(peak_value)], [warmup_steps])


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Rate:
    """Linear warmup, then a cosine to `end_value`. `decay_steps` is the length of both together, as in Optax.

    >>> rate = ya.optim.warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=10, decay_steps=110)
    >>> [round(float(rate(count)), 3) for count in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check_warmup("warmup_cosine_decay_schedule", warmup_steps, decay_steps)
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    alpha = 0.0 if peak_value == 0.0 else end_value / peak_value
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([warmup, decay], [warmup_steps])


def warmup_linear_decay_schedule(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0
) -> Rate:
    """Linear warmup, then linear to `end_value`. `decay_steps` is the length of both together.

    >>> rate = ya.optim.warmup_linear_decay_schedule(0.0, 1.0, warmup_steps=10, decay_steps=110)
    >>> [round(float(rate(count)), 3) for count in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check_warmup("warmup_linear_decay_schedule", warmup_steps, decay_steps)
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    decay = linear_schedule(peak_value, end_value, decay_steps - warmup_steps)
    return join_schedules([warmup, decay], [warmup_steps])


def _until(count: Any, steps: int) -> Any:
    """Returns the count from 0 on, up to `steps`."""
    return count.double().clamp(0, steps) if isinstance(count, Tensor) else min(max(count, 0), steps)


def _check_warmup(schedule: str, warmup_steps: int, decay_steps: int) -> None:
    if not 0 <= warmup_steps < decay_steps:
        raise ValueError(
            f"{schedule}: decay_steps counts the warmup too and must be longer than it, "
            f"got warmup_steps={warmup_steps}, decay_steps={decay_steps}"
        )


# ---- Scales the updates by a number or by a schedule; the learning rate is the negative case.


class ScaleByScheduleState(NamedTuple):
    """The state of a schedule. count: int32 [], completed steps"""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count


@dataclasses.dataclass(frozen=True)
class Scale:
    """Rule: multiply by a number, or by a rate at the state's count."""

    by: float | Rate


def scale(step_size: float) -> GradientTransformation:
    """Multiplies updates by `step_size`.

    >>> update(ya.optim.scale(2.0))
    tensor([ 6., -8.])
    """

    return stateless(lambda updates, params: scaled(updates, step_size), rule=Scale(step_size))


def scale_by_schedule(step_size_fn: Rate) -> GradientTransformation:
    """Multiplies updates by `step_size_fn(count)`.

    >>> update(ya.optim.scale_by_schedule(lambda count: 1.0 / (1 + count)))
    tensor([ 3., -4.])
    """

    def init(params: Tree) -> State:
        return ScaleByScheduleState(new_count(params))

    def update(updates: Tree, state: ScaleByScheduleState, params: Tree | None = None) -> tuple[Tree, State]:
        return scaled(updates, step_size_fn(state.count)), ScaleByScheduleState(state.count + 1)

    return GradientTransformation(init, update, elementwise=True, rule=Scale(step_size_fn))


def scale_by_learning_rate(learning_rate: float | Rate) -> GradientTransformation:
    """Multiplies updates by minus the learning rate (a float or a schedule). Raises ValueError for a negative number,
    also one that a schedule returns, but for tensors, which the host does not read: to maximise, return the negative of
    the loss.

    >>> update(ya.optim.scale_by_learning_rate(0.1))
    tensor([-0.3000,  0.4000])
    """
    if isinstance(learning_rate, Tensor):  # it may change in place, as in torch.optim
        return scale_by_learning_rate(lambda count: learning_rate)
    if not callable(learning_rate):
        if not isinstance(learning_rate, int | float):
            raise TypeError(f"learning_rate={learning_rate!r}: expected a number, or a function of the count")
        must_not_be_negative("learning_rate", learning_rate)
        return scale(-learning_rate)

    def step_size(count: Any) -> Any:
        rate: Any = learning_rate(count)
        if not isinstance(rate, Real | Tensor):
            raise TypeError(f"learning_rate(count) returned {shape_of(rate)}: expected a number, or a tensor of one")
        must_not_be_negative("learning_rate(count)", rate)
        return -rate

    return scale_by_schedule(step_size)


# ---- Clipping by the global norm: `u * max_norm / max(norm, max_norm)`.


@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm:
    """Rule: scale all updates down so that their global norm is at most `max_norm`."""

    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"clip_by_global_norm: max_norm must be positive, got {self.max_norm}")


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scales all updates by one factor so that their global norm, over all leaves and ranks, is at most `max_norm`.

    The norm of a sharded tree is all-reduced, so every rank multiplies by the same bits.

    >>> update(ya.optim.clip_by_global_norm(1.0))
    tensor([ 0.6000, -0.8000])
    """

    def update(updates: Tree, params: Tree | None) -> Tree:
        return scaled(updates, max_norm / global_norm(updates).clamp(min=max_norm))

    return stateless(update, rule=ClipByGlobalNorm(max_norm))


# ---- Clipping of each element.


def clip(max_delta: float) -> GradientTransformation:
    """Clips every element of the updates to [-max_delta, max_delta].

    >>> update(ya.optim.clip(1.0))
    tensor([ 1., -1.])
    """
    if not max_delta > 0:
        raise ValueError(f"clip: max_delta must be positive, got {max_delta}")
    return stateless(lambda updates, params: optree.tree_map(lambda u: u.clamp(-max_delta, max_delta), updates))
