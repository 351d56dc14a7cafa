"""The kernels on vectors under Triton's interpreter, against what a CPU does, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted import kernel
from yafsdp_fn.communication.micro_shards import Scratch, local_sum
from yafsdp_fn.communication.sums import add_rows

pytest.importorskip("triton")
sum_rows = kernel("yafsdp_fn.util.vector_kernels", "sum_rows")
scale_ = kernel("yafsdp_fn.util.vector_kernels", "scale_")
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64
BLOCK = 1024


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Of sizes that differ, so that another order of additions would be other bits."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator, dtype=F64)
    return (values * torch.exp(4 * torch.randn(shape, generator=generator, dtype=F64))).to(dtype)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("out", "wire", "dtype"), [(F32, BF16, F32), (BF16, BF16, F32), (F64, BF16, F32), (F32, F32, F64)]
)
@pytest.mark.parametrize(("ranks", "n"), [(2, 7), (3, BLOCK + 5), (8, 2 * BLOCK)])
def test_the_sum_of_rows_is_that_of_a_cpu(
    ranks: int, n: int, out: torch.dtype, wire: torch.dtype, dtype: torch.dtype, add: bool
) -> None:
    rows = drawn(ranks, n, dtype=wire)
    wanted = drawn(n, dtype=out)
    got = wanted.clone()
    local_sum(wanted, rows, Scratch(rows.device), add=add, dtype=dtype)
    sum_rows(got, rows, dtype, add, False)
    assert torch.equal(got, wanted)
    if out == dtype:  # a sum in another order is seen
        local_sum(got, rows.flip(0), Scratch(rows.device), dtype=dtype)
        assert add or ranks == 2 or not torch.equal(got, wanted)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("out", "wire"), list(itertools.product((F32, BF16), (F32, BF16))))
@pytest.mark.parametrize(("ranks", "n"), [(1, 7), (5, BLOCK + 5)])
def test_additions_one_by_one_are_those_of_a_cpu(
    ranks: int, n: int, out: torch.dtype, wire: torch.dtype, add: bool
) -> None:
    rows = drawn(ranks, n, dtype=wire)
    wanted = drawn(n, dtype=out)
    got = wanted.clone()
    add_rows(wanted, rows, Scratch(rows.device), add=add)
    sum_rows(got, rows, torch.promote_types(out, wire), add, True)
    assert torch.equal(got, wanted)


def test_nothing_is_written_behind_the_end() -> None:
    whole = torch.full((100,), 7.0)
    rows = torch.ones(2, 100)
    sum_rows(whole[:40], rows[:, :40], F32, False, False)
    assert torch.equal(whole, torch.cat([torch.full((40,), 2.0), torch.full((60,), 7.0)]))


@pytest.mark.parametrize(("values", "scale"), [(F32, F32), (BF16, F32), (F32, F64), (F64, F64)])
def test_a_scale(values: torch.dtype, scale: torch.dtype) -> None:
    x = drawn(BLOCK + 9, dtype=values)
    factor = torch.tensor(1 / 3, dtype=scale)
    wanted = (x.to(torch.promote_types(values, scale)) * factor).to(values)
    scale_(x, factor)
    assert torch.equal(x, wanted)


@pytest.mark.nightly
def test_more_elements_than_the_programs_of_a_launch_hold_at_once() -> None:
    x = drawn(2048 * BLOCK + 5, dtype=BF16)
    wanted = x * 0.5
    scale_(x, torch.tensor(0.5))
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_scale_of_one_touches_nothing(scale: float) -> None:
    """Any arithmetic makes a signalling NaN a quiet one."""
    x = torch.full((BLOCK + 9,), 0x7FA00000, dtype=torch.int32).view(F32)
    before = x.view(torch.int32).clone()
    scale_(x, torch.tensor(scale))
    assert torch.equal(x.view(torch.int32), before) == (scale == 1)
