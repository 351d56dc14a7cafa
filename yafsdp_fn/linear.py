"""linear, embedding: torch.nn.functional's, whose weight gradients are written straight into their gradient slot.

    F.linear                             ya.linear inside a visit
    grad_w = grad^T x      (fresh)       slot = grad^T x        (the first use of w)
    slot = grad_w          (a copy)      slot += grad^T x       (a further one)

Outside of a visit, under torch.func, under autocast and in torch.compile they are torch's functions themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from yafsdp_fn.engine.gradients import DESTINATION, Destination
from yafsdp_fn.low_rank import LowRank
from yafsdp_fn.torch_private import SingleLevelFunction, transforms_active


def linear(x: Tensor, weight: Tensor | LowRank, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., I], weight [O, I], bias [O] -> [..., O]. A weight with an adapter: see `ya.lora`.

    In a block of `ya.scan` or `ya.apply` the gradient of a weight that the block was given goes into its gradient slot
    without a fresh tensor of its size. A view of such a weight (a slice, a transpose) is not known to be one: its
    gradient takes autograd's way, which is as exact.
    """
    if isinstance(weight, LowRank):
        return weight.times(x, bias, linear)
    found = _destination(weight)
    return F.linear(x, weight, bias) if found is None else _Linear.apply(x, weight, bias, found)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """`F.embedding`: tokens [...] of integers, weight [V, E] -> [..., E]; its gradient as that of `linear`."""
    found = _destination(weight)
    return F.embedding(tokens, weight) if found is None else _Embedding.apply(tokens, weight, found)


def _destination(weight: Tensor) -> Destination | None:
    found: Destination | None = getattr(weight, DESTINATION, None)  # as gradients.destination, which is a call more
    if found is None or not weight.requires_grad or transforms_active():
        return None
    # a compiled graph is made before the slots of its backward are known, and autocast computes in another dtype
    return None if torch.compiler.is_compiling() or torch.is_autocast_enabled(weight.device.type) else found


class _Linear(SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, found: Destination) -> Tensor:
        ctx.found = found
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), found, (wants_x, _, wants_bias, _) = ctx.saved_tensors, ctx.found, ctx.needs_input_grad
        outs, ins = weight.shape
        rows = grad.reshape(-1, outs)
        grad_x = torch.mm(rows, weight).view(x.shape) if wants_x else None
        grad_bias = rows.sum(0) if wants_bias else None
        if found.takes:
            found.write_mm(rows.t(), x.reshape(-1, ins))
            return grad_x, None, grad_bias, None
        if found.later is not None and found.postpone(found.write_mm, rows.t(), x.reshape(-1, ins)):
            return grad_x, None, grad_bias, None
        return grad_x, rows.t() @ x.reshape(-1, ins), grad_bias, None


class _Embedding(SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, found: Destination) -> Tensor:
        ctx.found, ctx.count = found, len(weight)
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,), found = ctx.saved_tensors, ctx.found
        rows = grad.flatten(0, -2) if grad.ndim > 1 else grad[None]
        if found.takes:
            found.write_rows(tokens.flatten(), rows)
            return None, None, None
        if found.later is not None and found.postpone(found.write_rows, tokens.flatten(), rows):
            return None, None, None
        return None, torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.count, -1, False), None
