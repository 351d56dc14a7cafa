"""Exact sums: the same bits in any order and any cut, and right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from yafsdp_fn.util.exact_sums import BLOCK, binned, total

CPU = torch.device("cpu")


def of(*shards: Tensor, other: list[Tensor] | None = None) -> Tensor:
    """The sum of squares of what ranks have, or inner product."""
    parts = [binned([(x, y)], CPU) for x, y in zip(shards, other or shards, strict=True)]
    return total(torch.stack(parts).sum(0))


def cut(x: Tensor, seed: int, times: int) -> list[Tensor]:
    """`x` in pieces of whole blocks, some of them empty, in another order."""
    generator = torch.Generator().manual_seed(seed)
    at = sorted(torch.randint(0, x.numel() // BLOCK + 1, (times,), generator=generator).tolist())
    pieces = torch.tensor_split(x, [BLOCK * i for i in at])
    return [pieces[i] for i in torch.randperm(len(pieces), generator=generator)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spread", [0, 3, 16])
def test_no_order_and_no_cut_changes_a_bit(dtype: torch.dtype, spread: float) -> None:
    """Of numbers of very different sizes: from none to 32 decades."""
    generator = torch.Generator().manual_seed(spread)
    sizes = 10 ** (spread * (2 * torch.rand(BLOCK * 3000, generator=generator, dtype=torch.float64) - 1))
    x = (sizes * torch.randn(len(sizes), generator=generator, dtype=torch.float64)).to(dtype)
    one = of(x)
    assert abs(float(one) / math.fsum((x.double() ** 2).tolist()) - 1) < (1e-14 if dtype == torch.float64 else 3e-7)
    for seed in range(20):
        assert torch.equal(of(*cut(x, seed, 1 + seed)), one)


def test_inner_products_that_cancel() -> None:
    """What the largest terms leave is the same everywhere, even where it is far below them."""
    generator = torch.Generator().manual_seed(0)
    a, small = torch.randn(2, BLOCK * 400, generator=generator)
    x = torch.cat([a * 1e9, a * 1e9, small])
    y = torch.cat([a, -a, small])
    one = of(x, other=[y])
    assert abs(float(one) / float(small.double().square().sum()) - 1) < 0.01
    order = torch.randperm(1200, generator=generator)
    mixed = [v.view(-1, BLOCK)[order].reshape(-1) for v in (x, y)]
    for n in (1, 7, 31):
        assert torch.equal(of(*mixed[0].split(BLOCK * n), other=[*mixed[1].split(BLOCK * n)]), one)


def test_powers_of_two_where_bins_meet() -> None:
    """A block that is exactly half of a bin's unit rounds the same way, whoever it lies beside."""
    x = torch.zeros(BLOCK * 64, dtype=torch.float64)
    x[::BLOCK] = 2.0 ** torch.arange(-32, 32)
    one = of(x)
    assert float(one) == pytest.approx(math.fsum((x**2).tolist()), rel=1e-14)
    for n in (1, 2, 3, 5, 8, 13):
        assert torch.equal(of(*x.split(BLOCK * n)), one)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_what_is_not_finite_shows(bad: float) -> None:
    x = torch.ones(BLOCK * 4, dtype=torch.float64)
    x[5] = bad
    assert of(x).isnan()
    assert of(*x.split(BLOCK)).isnan()


def test_nothing_and_zeros_are_zero() -> None:
    assert of(torch.zeros(0)) == 0
    assert of(torch.zeros(BLOCK), torch.zeros(0)) == 0
    assert float(of(torch.full((3,), 2.0))) == 12  # a leaf that is no shard


def test_the_smallest_numbers() -> None:
    x = torch.full((BLOCK * 3,), 2.0**-149, dtype=torch.float64)
    assert float(of(x)) == 24 * 2.0**-298
    assert torch.equal(of(*x.split(BLOCK)), of(x))
