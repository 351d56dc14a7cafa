"""Initial values: reproducible from the generator alone, of the right distribution."""

from __future__ import annotations

import pytest
import torch

from yafsdp_fn.params import initializers
from yafsdp_fn.params.initializers import Initializer

MAKERS = {
    "normal": initializers.normal(0.1),
    "truncated": initializers.truncated_normal(0.1),
    "uniform": initializers.uniform(0.3),
    "zeros": initializers.zeros,
    "ones": initializers.ones,
    "constant": initializers.constant(-2.5),
}


def draw(init: Initializer, shape: tuple[int, ...] = (100, 200), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return init(torch.Generator().manual_seed(7), shape, dtype)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_depend_on_the_generator_alone(name: str, dtype: torch.dtype) -> None:
    init = MAKERS[name]
    before = torch.get_rng_state()
    first = draw(init, (3, 5), dtype)
    torch.rand(())
    assert torch.equal(first, draw(init, (3, 5), dtype))
    assert first.shape == (3, 5)
    assert first.dtype == dtype
    assert not first.requires_grad
    torch.set_rng_state(before)
    draw(init)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is left alone


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
def test_odd_shapes(name: str, shape: tuple[int, ...]) -> None:
    assert draw(MAKERS[name], shape).shape == shape


def test_normal() -> None:
    x = draw(MAKERS["normal"])
    assert abs(x.mean()) < 0.003
    assert abs(x.std() - 0.1) < 0.003
    assert x.abs().max() > 0.3


def test_truncated_normal_is_cut_at_two_deviations() -> None:
    x = draw(MAKERS["truncated"])
    assert 0.19 < x.abs().max() <= 0.2
    assert abs(x.std() - 0.088) < 0.003  # of a normal of deviation 0.1 cut there
    assert draw(initializers.truncated_normal(0.1, bound=1.0)).abs().max() <= 0.1


def test_uniform() -> None:
    x = draw(MAKERS["uniform"])
    assert 0.29 < x.max() <= 0.3
    assert -0.3 <= x.min() < -0.29
    assert abs(x.mean()) < 0.005


def test_constants() -> None:
    assert draw(MAKERS["zeros"]).eq(0).all()
    assert draw(MAKERS["ones"]).eq(1).all()
    assert draw(MAKERS["constant"]).eq(-2.5).all()
