"""A Triton kernel that computes the losses of rows of logits, and overwrites these with their gradient.

    m, s = max(row), sum(exp(row - m))                          # one pass, both at once
    loss = log(s) + m - row[target]
    row = factor * (exp(row - m) / s - onehot(target))          # a second one

It moves six bytes for a bf16 logit; torch's operations move 44, through fp32 copies.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

BLOCK = 4096
"""Logits of a row that a Triton program holds at a time."""


# triton evaluates annotations, and refuses names that are not its own
def _rows(
    logits: tl.tensor,
    labels: tl.tensor,
    factors: tl.tensor,
    losses: tl.tensor,
    columns: tl.tensor,
    gradient: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    label = tl.load(labels + row)
    factor = tl.load(factors + row)
    # before the maximum, for which all warps wait for each other: none has overwritten it yet
    picked = tl.load(start + label, mask=(label >= 0) & (label < columns), other=0.0).to(tl.float32)
    # the lowest number, not minus infinity: lanes beyond the end, which are that, would take the difference of two
    # infinities. So their weight is exp(-inf - m) = 0, however low the logits of the row are
    peaks = tl.full([block], -3.4028234663852886e38, tl.float32)
    sums = tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        at = first + tl.arange(0, block)
        value = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peaks, value)
        sums = sums * tl.exp(peaks - higher) + tl.exp(value - higher)
        peaks = higher
    peak = tl.max(peaks, axis=0)
    total = tl.sum(sums * tl.exp(peaks - peak), axis=0)
    tl.store(losses + row, tl.log(total) + (peak - picked))
    if gradient:
        for first in range(0, columns, block):
            at = first + tl.arange(0, block)
            value = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            p = tl.exp(value - peak) / total - tl.where(at == label, 1.0, 0.0)
            tl.store(start + at, (p * factor).to(logits.dtype.element_ty), mask=at < columns)


ROWS = triton.jit(_rows)


def softmax_(logits: Tensor, labels: Tensor, factors: Tensor, *, gradient: bool) -> Tensor:
    """Returns the losses [C] in fp32 of `logits` [C, V], which are on a GPU, contiguous, and of 32 bits at most.

    labels: [C] int64; a label outside [0, V) counts as a logit of zero. factors: [C] in fp32, multiply the rows.
    gradient: False leaves the logits as they are
    """
    losses = torch.empty_like(factors)
    columns = logits.shape[1]
    block = min(BLOCK, triton.next_power_of_2(columns))
    ROWS[(len(logits),)](logits, labels, factors, losses, columns, gradient=gradient, block=block, num_warps=8)
    return losses
