"""Initial values, as in `jax.nn.initializers`: factories of `(generator, shape, dtype) -> Tensor`.

The tensor is made on the generator's device. One call makes one layer's leaf, whole, on every rank, so that the
values do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Initializer = Callable[[torch.Generator, tuple[int, ...], torch.dtype], Tensor]


def normal(stddev: float = 0.02) -> Initializer:
    """Normal with mean 0."""

    def init(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=generator.device).normal_(0.0, stddev, generator=generator)

    return init


def truncated_normal(stddev: float = 0.02, bound: float = 2.0) -> Initializer:
    """Normal with mean 0, cut at `bound` standard deviations; `stddev` is that of the uncut distribution."""

    def init(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=generator.device)
        cut = bound * stddev
        return torch.nn.init.trunc_normal_(out, 0.0, stddev, -cut, cut, generator=generator)

    return init


def uniform(scale: float) -> Initializer:
    """Uniform in [-scale, scale)."""

    def init(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=generator.device).uniform_(-scale, scale, generator=generator)

    return init


def constant(value: float) -> Initializer:
    """One value everywhere."""

    def init(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=generator.device)

    return init


zeros: Initializer = constant(0.0)
ones: Initializer = constant(1.0)
DEFAULT_INIT = normal(0.02)
