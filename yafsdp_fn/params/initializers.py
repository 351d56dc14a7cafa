"""Initial values, as in `jax.nn.initializers`: factories of `(generator, shape, dtype) -> Tensor`.

One call makes one layer's leaf, whole, on every rank, so values do not depend on the number of ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from yafsdp_fn.util.words import shown

Initializer = Callable[[torch.Generator, tuple[int, ...], torch.dtype], Tensor]


def _empty(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=generator.device)


@shown
def normal(stddev: float = 0.02) -> Initializer:
    """Draws from a normal distribution with mean 0.

    >>> init = ya.params.initializers.normal(0.5)
    >>> init(torch.Generator().manual_seed(0), (2, 3), torch.float32).shape
    torch.Size([2, 3])
    """
    return lambda generator, *of: _empty(generator, *of).normal_(0.0, stddev, generator=generator)


@shown
def truncated_normal(stddev: float = 0.02, bound: float = 2.0) -> Initializer:
    """Draws from a normal distribution with mean 0, cut at `bound` standard deviations; `stddev` is that of the uncut
    one.

    >>> init = ya.params.initializers.truncated_normal(0.5, bound=1.0)
    >>> init(torch.Generator().manual_seed(0), (100,), torch.float32).abs().max() <= 0.5
    tensor(True)
    """
    fill = torch.nn.init.trunc_normal_
    cut = bound * stddev
    return lambda generator, *of: fill(_empty(generator, *of), 0.0, stddev, -cut, cut, generator=generator)


@shown
def uniform(scale: float) -> Initializer:
    """Draws uniformly from [-scale, scale).

    >>> init = ya.params.initializers.uniform(0.1)
    >>> init(torch.Generator().manual_seed(0), (100,), torch.float32).abs().max() <= 0.1
    tensor(True)
    """
    return lambda generator, *of: _empty(generator, *of).uniform_(-scale, scale, generator=generator)


@shown
def constant(value: float) -> Initializer:
    """Sets every element to one value.

    >>> ya.params.initializers.constant(0.5)(torch.Generator(), (2,), torch.float32)
    tensor([0.5000, 0.5000])
    """
    return lambda generator, *of: _empty(generator, *of).fill_(value)


# ---- Those without arguments.

zeros: Initializer = constant(0.0)
ones: Initializer = constant(1.0)
DEFAULT_INIT = normal(0.02)
