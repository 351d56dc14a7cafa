"""Rates `count -> value`, by their Optax names.

An int gives a float. A 0-dim tensor gives a 0-dim fp32 tensor on its device without reading it back: the counter of
an optimizer state lives on the device, where skipped steps are decided.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Rate = Callable[[Any], Any]
"""`count -> value`: int -> float, or 0-dim tensor -> 0-dim tensor (or float)."""


def constant_schedule(value: float) -> Rate:
    """`value` at every count."""

    def schedule(count: Any) -> Any:
        return torch.full((), value, device=count.device) if isinstance(count, Tensor) else value

    return schedule


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Rate:
    """From `init_value` at `transition_begin` to `end_value`, `transition_steps` later; constant outside.

    As in Optax, `transition_steps <= 0` means `init_value` for ever.
    """
    if transition_steps <= 0:
        return constant_schedule(init_value)

    def schedule(count: Any) -> Any:
        left = 1 - _clip(count - transition_begin, 0, transition_steps) / transition_steps
        return (init_value - end_value) * left + end_value

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Rate:
    """From `init_value` to `alpha * init_value` along half a cosine, raised to `exponent`; constant after."""
    if decay_steps <= 0:
        raise ValueError(f"cosine_decay_schedule: decay_steps must be positive, got {decay_steps}")

    def schedule(count: Any) -> Any:
        angle = math.pi * _clip(count, 0, decay_steps) / decay_steps
        cosine = 0.5 * (1 + (torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)))
        return init_value * ((1 - alpha) * cosine**exponent + alpha)

    return schedule


def join_schedules(schedules: Sequence[Rate], boundaries: Sequence[int]) -> Rate:
    """`schedules[i]` from `boundaries[i - 1]` on, counting from that boundary."""
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
    """Linear from `init_value` to `peak_value`, then constant. (Without warmup `peak_value`; Optax: `init_value`.)"""
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
    """Linear warmup, then a cosine to `end_value`. `decay_steps` is the length of both together, as in Optax."""
    _check_warmup("warmup_cosine_decay_schedule", warmup_steps, decay_steps)
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    alpha = 0.0 if peak_value == 0.0 else end_value / peak_value
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([warmup, decay], [warmup_steps])


def warmup_linear_decay_schedule(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0
) -> Rate:
    """Linear warmup, then linear to `end_value`. `decay_steps` is the length of both together."""
    _check_warmup("warmup_linear_decay_schedule", warmup_steps, decay_steps)
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    decay = linear_schedule(peak_value, end_value, decay_steps - warmup_steps)
    return join_schedules([warmup, decay], [warmup_steps])


def _clip(count: Any, low: int, high: int) -> Any:
    return count.clamp(low, high) if isinstance(count, Tensor) else min(max(count, low), high)


def _check_warmup(schedule: str, warmup_steps: int, decay_steps: int) -> None:
    if not 0 <= warmup_steps < decay_steps:
        raise ValueError(
            f"{schedule}: decay_steps counts the warmup too and must be longer than it, "
            f"got warmup_steps={warmup_steps}, decay_steps={decay_steps}"
        )
