"""Kernels that only a GPU has, on the memory of the CPU: what they compute, and what they read and write.

They are operators, so that the log and the graphs see them as any other operation. A fake device shows which kernels
are launched on what memory; what Triton and cuBLAS make of it is for `tests/kernels` and for a real GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.dist.micro_shards import Scratch, local_sum
from yafsdp_fn.dist.sums import add_rows

LIBRARY, ATEN = torch.library.Library("fake_cuda", "DEF"), torch.library.Library("aten", "IMPL")


def _sum_rows(out: Tensor, rows: Tensor, dtype: torch.dtype, add: bool, ordered: bool) -> None:
    if ordered:
        add_rows(out, rows, Scratch(out.device), add=add)
    else:
        local_sum(out, rows, Scratch(out.device), add=add, dtype=dtype)


def _scale_(values: Tensor, scale: Tensor) -> None:
    if scale != 1:
        values.mul_(scale)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(a.to(out_dtype) @ b.to(out_dtype))


def _addmm(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Tensor:
    return out.copy_(beta * x + alpha * (a.to(out_dtype) @ b.to(out_dtype)))


LIBRARY.define("sum_rows(Tensor(a!) out, Tensor rows, ScalarType dtype, bool add, bool ordered) -> ()")
LIBRARY.define("scale_(Tensor(a!) values, Tensor scale) -> ()")
LIBRARY.impl("sum_rows", _sum_rows, "CPU")
LIBRARY.impl("scale_", _scale_, "CPU")
ATEN.impl("mm.dtype_out", _mm, "CPU")
ATEN.impl("addmm.dtype_out", _addmm, "CPU")

VECTOR = SimpleNamespace(sum_rows=torch.ops.fake_cuda.sum_rows, scale_=torch.ops.fake_cuda.scale_)
"""In the place of `yafsdp_fn.util.vector_kernels`."""


def vector_kernels(device: torch.device) -> Any:
    return VECTOR if device.type == "cuda" else None
