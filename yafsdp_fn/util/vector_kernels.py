"""Triton kernels on vectors: the sum of the rows that ranks have sent, and a scale that is mostly one.

    sum_rows     out = rows[0] + rows[1] + ...   or  out + (...)       one launch, whatever the number of rows
    scale_       values *= scale                                       nothing is read where the scale is 1

Both read each element once and write it once.
"""

import functools

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

BLOCK = 1024
"""Elements that a program holds at a time."""

PROGRAMS = 2048
"""Programs of a launch that may have nothing to do: enough to fill a GPU, few enough to end in microseconds."""

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
"""Types of the arithmetic: narrower numbers are computed with in float32, and rounded when they are stored."""


# triton evaluates annotations, and refuses names that are not its own
def _sum_rows(
    out: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    wide: tl.constexpr,
    widest: tl.constexpr,
    add: tl.constexpr,
    ordered: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    own = out.dtype.element_ty
    kept = own if ordered else wide
    row = rows + at
    if ordered and add:
        total = tl.load(out + at, mask=inside, other=0.0)
    else:
        total = tl.load(row, mask=inside, other=0.0).to(kept)
        row += stride
        count -= 1
    for _ in range(count):
        total = (total.to(wide) + tl.load(row, mask=inside, other=0.0).to(wide)).to(kept)
        row += stride
    if add and not ordered:
        total = tl.load(out + at, mask=inside, other=0.0).to(widest) + total.to(widest)
    tl.store(out + at, total.to(own), mask=inside)


def _scale(values: tl.tensor, scale: tl.tensor, size: tl.tensor, wide: tl.constexpr, block: tl.constexpr) -> None:
    factor = tl.load(scale).to(wide)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * block
        while first < size:
            at = first + tl.arange(0, block)
            value = tl.load(values + at, mask=at < size, other=0.0).to(wide)
            tl.store(values + at, (value * factor).to(values.dtype.element_ty), mask=at < size)
            first += tl.num_programs(0).to(tl.int64) * block


SUM_ROWS = triton.jit(_sum_rows)
SCALE = triton.jit(_scale)


def sum_rows(out: Tensor, rows: Tensor, dtype: torch.dtype, add: bool, ordered: bool) -> None:
    """Sums `rows` [R, n] in the order of R into `out` [n], both on a GPU, each row contiguous.

    dtype: of the additions, float32 for what is narrower; add: to what is in `out`
    ordered: each addition is rounded to the dtype of `out`, and the rows are added to it one by one; else the sum of
        rows is rounded once, in the end
    """
    size = out.numel()
    wide = _wide(dtype)
    widest = _wide(dtype, out.dtype)
    how = {"wide": wide, "widest": widest, "add": add, "ordered": ordered, "block": BLOCK}
    SUM_ROWS[(triton.cdiv(size, BLOCK),)](out, rows, len(rows), rows.stride(0), size, **how)


def scale_(values: Tensor, scale: Tensor) -> None:
    """Multiplies `values`, contiguous and on a GPU, by the scalar `scale`, which no host looks at."""
    size = values.numel()
    wide = _wide(values.dtype, scale.dtype)
    SCALE[(min(triton.cdiv(size, BLOCK), PROGRAMS),)](values, scale, size, wide=wide, block=BLOCK)


def _wide(*dtypes: torch.dtype) -> tl.dtype:
    return TYPES[functools.reduce(torch.promote_types, dtypes, torch.float32)]
