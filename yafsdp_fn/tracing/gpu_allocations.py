"""Imitates, on the CPU's fake tensors, the allocations of GPU kernels.

RMSNorm                 one kernel, which saves x and one fp32 scale per row; the CPU's pieces save three copies of x
                        in fp32 if x is narrower
linear_cross_entropy    takes more rows at a time
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from yafsdp_fn.nn.linear import linear_cross_entropy, rows_at_once
from yafsdp_fn.tracing.counter import in_pieces
from yafsdp_fn.util.torch_private import transforms_active


class GpuAllocations(TorchFunctionMode):
    """Makes `rms_norm` with a weight and `linear_cross_entropy` allocate as on a GPU, while active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear_cross_entropy and kwargs["chunk"] is None:
            return func(*args, **kwargs | {"chunk": rows_at_once(*args[:2], device="cuda")})
        if func in (F.rms_norm, torch.rms_norm) and not transforms_active():
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is None:
        return F.rms_norm(input, normalized_shape, weight, eps)
    out: Tensor = _RmsNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    return out


RMS_NORM = (34, 64)
"""Bytes an element of bf16 that RMSNorm in pieces moves beyond one kernel, in forward and backward: a cast to fp32,
squares, their mean, a product, a cast back, the gain; and the same from behind (`Moved.pieces`)."""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.shape[: x.ndim - weight.ndim]
        scale = x.new_empty(*rows, *[1] * weight.ndim, dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        in_pieces(x.numel() * RMS_NORM[0], kernels=6)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        in_pieces(x.numel() * RMS_NORM[1], kernels=13)
        return x + grad, torch.empty_like(weight)
