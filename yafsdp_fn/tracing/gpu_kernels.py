"""On the CPU's fake tensors, what is done otherwise on a GPU.

RMSNorm                 one kernel, which saves x and one fp32 scale per row; the CPU's pieces save three copies of x in
                        fp32 where x is narrower
linear_cross_entropy    takes more rows at a time
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from yafsdp_fn.cross_entropy import linear_cross_entropy, rows_at_once
from yafsdp_fn.torch_private import transforms_active


class AsOnGpu(TorchFunctionMode):
    """While it is active, `rms_norm` with a weight and `linear_cross_entropy` allocate what they do on a GPU."""

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


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.shape[: x.ndim - weight.ndim]
        scale = x.new_empty(*rows, *[1] * weight.ndim, dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
