"""Kernels that only a GPU has, on the memory of the CPU: what they compute, and what they read and write.

They are operators, so that the log and the graphs see them as any other operation. A fake device shows which kernels
are launched on what memory; what Triton and cuBLAS make of it is for `tests/kernels` and for a real GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks import emulated
from tests.harness.fake_cuda.tensors import CudaTensor
from yafsdp_fn import nn, util
from yafsdp_fn.communication.micro_shards import Scratch, local_sum
from yafsdp_fn.communication.sums import add_rows
from yafsdp_fn.nn import cross_entropy
from yafsdp_fn.util import on_gpu

LIBRARY = torch.library.Library("fake_cuda", "DEF")
ATEN = torch.library.Library("aten", "IMPL")


def _sum_rows(out: Tensor, rows: Tensor, dtype: torch.dtype, add: bool, ordered: bool) -> None:
    if ordered:
        add_rows(out, rows, Scratch(out.device), add=add)
    else:
        local_sum(out, rows, Scratch(out.device), add=add, dtype=dtype)


def _scale_(values: Tensor, scale: Tensor) -> None:
    if scale != 1:
        values.mul_(scale)


def _softmax_(logits: Tensor, labels: Tensor, factors: Tensor, *, gradient: bool) -> Tensor:
    wide = logits.float()
    losses = cross_entropy._softmax_(wide, labels, factors, gradient=gradient)
    if gradient:
        logits.copy_(wide)
    return losses


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(a.to(out_dtype) @ b.to(out_dtype))


def _addmm(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Tensor:
    return out.copy_(beta * x + alpha * (a.to(out_dtype) @ b.to(out_dtype)))


LIBRARY.define("sum_rows(Tensor(a!) out, Tensor rows, ScalarType dtype, bool add, bool ordered) -> ()")
LIBRARY.define("scale_(Tensor(a!) values, Tensor scale) -> ()")
LIBRARY.define("softmax_(Tensor(a!) logits, Tensor labels, Tensor factors, *, bool gradient) -> Tensor")
for name, kernel in {"sum_rows": _sum_rows, "scale_": _scale_, "softmax_": _softmax_}.items():
    LIBRARY.impl(name, kernel, "CPU")
ATEN.impl("mm.dtype_out", _mm, "CPU")
ATEN.impl("addmm.dtype_out", _addmm, "CPU")


def patch_kernels(patch: pytest.MonkeyPatch) -> None:
    """Puts the operators in the places of Triton's kernels, which would look for a driver. The library asks as ever
    whether they run on a tensor; on one of a trace an operator raises, since it has no implementation for fakes."""
    ops = torch.ops.fake_cuda
    patch.setattr(util, "vector_kernels", SimpleNamespace(sum_rows=ops.sum_rows, scale_=ops.scale_), raising=False)
    patch.setattr(nn, "cross_entropy_kernel", SimpleNamespace(softmax_=ops.softmax_), raising=False)
    timed = SimpleNamespace(mark=Tensor.zero_, hold=lambda at, users, phase, *moved: at.add_(users.sum()))
    patch.setattr(emulated, "kernels", timed, raising=False)
    patch.setattr(on_gpu, "HAS_TRITON", True)
    patch.setattr(on_gpu, "is_fake", lambda x: isinstance(x.host if isinstance(x, CudaTensor) else x, FakeTensor))
