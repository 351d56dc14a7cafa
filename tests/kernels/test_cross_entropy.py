"""The kernel of `linear_cross_entropy` under Triton's interpreter, against torch's operations in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted import kernel

pytest.importorskip("triton")
BLOCK = 4096
softmax_ = kernel("yafsdp_fn.nn.cross_entropy_kernel", "softmax_")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def problem(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [rows, columns] of some size; labels, the first and the last column among them; factors, a zero too."""
    generator = torch.Generator().manual_seed(rows + columns)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(0, columns, (rows,), generator=generator)
    labels[0], labels[-1] = columns - 1, 0
    factors = torch.rand(rows, generator=generator)
    factors[rows // 2] = 0
    return logits, labels, factors


def reference(logits: Tensor, labels: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of the logits, in float64. A label outside counts as a logit of zero."""
    wide = logits.double()
    inside = (labels >= 0) & (labels < logits.shape[1])
    onehot = torch.zeros_like(wide)
    onehot[inside, labels[inside]] = 1
    picked = torch.where(onehot == 1, wide, 0).sum(1)
    peak = wide.amax(1)  # apart, or float64 too loses the logarithm beside it
    return (wide - peak[:, None]).logsumexp(1) + (peak - picked), (wide.softmax(1) - onehot) * factors[:, None]


def check(logits: Tensor, labels: Tensor, factors: Tensor) -> None:
    losses, grads = reference(logits, labels, factors)
    before = logits.clone()
    torch.testing.assert_close(softmax_(logits, labels, factors, gradient=False).double(), losses, rtol=1e-6, atol=2e-6)
    assert torch.equal(logits, before)
    torch.testing.assert_close(softmax_(logits, labels, factors, gradient=True).double(), losses, rtol=1e-6, atol=2e-6)
    rounding = 2.0**-8 if logits.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(logits.double(), grads, rtol=rounding, atol=1e-7)


@pytest.mark.sampled
@DTYPES
@pytest.mark.parametrize("columns", [1, 7, 64, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 17])
def test_losses_and_gradients(columns: int, dtype: torch.dtype) -> None:
    """Blocks that are full, that are not, and that have one logit; more of them than one."""
    check(*problem(3, columns, dtype))


@DTYPES
def test_labels_outside(dtype: torch.dtype) -> None:
    """A block of 64 has lanes for columns 37 to 63; nothing is read before the memory or behind it."""
    logits, labels, factors = problem(6, 37, dtype)
    labels[:4] = torch.tensor([-1, 37, 63, 10**12])
    check(logits, labels, factors)


@DTYPES
def test_huge_and_infinite_logits(dtype: torch.dtype) -> None:
    """What a mask sets to the lowest number or to minus infinity, also for a whole block, and for all but one."""
    logits, labels, factors = problem(6, BLOCK + 100, dtype)
    labels[:] = BLOCK + 1
    logits[0] *= 1e4
    logits[1, BLOCK + 7] = 3e38
    logits[2, :BLOCK] = -math.inf
    logits[3, :BLOCK] = torch.finfo(dtype).min
    logits[4] = -1e35
    logits[5] = -math.inf
    logits[5, BLOCK + 1] = -2e38
    check(logits, labels, factors)


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(bad: float, dtype: torch.dtype) -> None:
    logits, labels, factors = problem(3, 37, dtype)
    logits[1, 5] = bad
    logits[2] = -math.inf
    losses = softmax_(logits, labels, factors.fill_(1.0), gradient=True)
    assert losses.isfinite().tolist() == [True, False, False]
    assert bool(logits[1].isnan().any())
    assert bool(logits[2].isnan().all())
    assert bool(logits[0].isfinite().all())


def test_no_rows() -> None:
    logits = torch.empty(0, 7)
    assert softmax_(logits, torch.empty(0, dtype=torch.int64), torch.empty(0), gradient=True).shape == (0,)
