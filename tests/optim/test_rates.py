"""Schedules against numpy, at the joints and beyond, for ints and for tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from yafsdp_fn import optim

COUNTS = [0, 1, 4, 9, 10, 11, 55, 99, 100, 101, 1000]


def cosine(t: float) -> float:
    return 0.5 * (1 + float(np.cos(np.pi * t)))


CASES: dict[str, tuple[optim.Rate, Callable[[int], float]]] = {
    "constant": (optim.constant_schedule(0.3), lambda n: 0.3),
    "linear": (optim.linear_schedule(0.1, 0.9, 90, 10), lambda n: float(np.interp(n, [10, 100], [0.1, 0.9]))),
    "linear_without_steps": (optim.linear_schedule(0.1, 0.9, 0), lambda n: 0.1),
    "cosine": (optim.cosine_decay_schedule(2.0, 100), lambda n: 2.0 * cosine(min(n, 100) / 100)),
    "cosine_alpha_exponent": (
        optim.cosine_decay_schedule(2.0, 100, alpha=0.1, exponent=1.5),
        lambda n: 2.0 * (0.9 * cosine(min(n, 100) / 100) ** 1.5 + 0.1),
    ),
    "join": (
        optim.join_schedules(
            [optim.constant_schedule(1.0), optim.linear_schedule(2.0, 3.0, 5), optim.constant_schedule(7.0)], [10, 100]
        ),
        lambda n: 1.0 if n < 10 else 7.0 if n >= 100 else float(np.interp(n - 10, [0, 5], [2.0, 3.0])),
    ),
    "warmup_constant": (
        optim.warmup_constant_schedule(0.1, 0.5, 10),
        lambda n: float(np.interp(n, [0, 10], [0.1, 0.5])),
    ),
    "warmup_cosine": (
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100, end_value=0.1, exponent=1.3),
        lambda n: n / 10 if n < 10 else 0.9 * cosine(min(n - 10, 90) / 90) ** 1.3 + 0.1,
    ),
    "warmup_cosine_no_warmup": (
        optim.warmup_cosine_decay_schedule(0.5, 1.0, 0, 100),
        lambda n: cosine(min(n, 100) / 100),
    ),
    "warmup_linear": (
        optim.warmup_linear_decay_schedule(0.0, 1.0, 10, 100, end_value=0.1),
        lambda n: float(np.interp(n, [0, 10, 100], [0.0, 1.0, 0.1])),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", COUNTS)
def test_values(name: str, count: int) -> None:
    schedule, expected = CASES[name]
    value = schedule(count)
    assert isinstance(value, float)
    assert value == pytest.approx(expected(count), rel=1e-12, abs=1e-15)
    on_device = schedule(torch.tensor(count, dtype=torch.int32))
    assert on_device.shape == ()
    assert on_device.dtype == torch.float64
    assert on_device.item() == pytest.approx(expected(count), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_is_never_read_by_the_host(name: str) -> None:
    count = torch.zeros((), dtype=torch.int32, device="meta")  # reading it raises
    assert CASES[name][0](count).device.type == "meta"


def test_ends_are_exact() -> None:
    for schedule in (
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100, end_value=0.25),
        optim.warmup_linear_decay_schedule(0.0, 1.0, 10, 100, end_value=0.25),
    ):
        values = [schedule(n) for n in (0, 10, 100, 5000)]
        assert values == [0.0, 1.0, 0.25, 0.25]
        assert [schedule(torch.tensor(n)).item() for n in (0, 10, 100, 5000)] == values


def test_without_warmup_the_peak_comes_first() -> None:
    assert optim.warmup_constant_schedule(0.0, 0.5, 0)(0) == 0.5
    assert optim.warmup_linear_decay_schedule(0.0, 0.5, 0, 10)(0) == 0.5


def test_a_peak_of_zero_is_zero() -> None:
    assert optim.warmup_cosine_decay_schedule(0.0, 0.0, 2, 10)(5) == 0.0


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="decay_steps must be positive, got 0"):
        optim.cosine_decay_schedule(1.0, 0)
    with pytest.raises(ValueError, match="warmup_steps=10, decay_steps=10"):
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10)
    with pytest.raises(ValueError, match="must be longer than it"):
        optim.warmup_linear_decay_schedule(0.0, 1.0, 20, 10)
    with pytest.raises(ValueError, match="3 schedules need 2 rising boundaries, got \\[5, 3\\]"):
        optim.join_schedules([optim.constant_schedule(1.0)] * 3, [5, 3])
    with pytest.raises(ValueError, match="2 schedules need 1 rising boundaries"):
        optim.join_schedules([optim.constant_schedule(1.0)] * 2, [])
