"""The cross-entropy of a head in chunks of rows, for `linear_cross_entropy` (linear.py)."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from yafsdp_fn.util.on_gpu import kernels_run_on
from yafsdp_fn.util.torch_private import assert_async

# ---- The cross-entropy of a head, and its gradients, without the logits of all positions at once.
#
#     for rows, target in chunks(x, targets):    # [C, E], [C]; only the logits of C rows, [C, V], exist at a time
#         p = softmax(rows @ W.T)
#         total -= log(p[target])
#         grad_rows = (p - onehot(target)) @ W
#         grad_W += (p - onehot(target)).T @ rows
#
# All of it runs in the forward, where the logits are at hand; the backward multiplies both gradients by the incoming
# one. In a visit of a training step grad_W is formed in its gradient slot. If that is not free before the backward
# (another microbatch's gradient is in it), the forward computes only the total, and the backward the logits again.

Write = Callable[[Tensor, Tensor], object]
"""Adds the product of [V, C] and [C, E] to the gradient of the weight."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Chunked(torch.autograd.Function):
    """Computes the total of a head. found: the destination of the weight's gradient; grad: one may be asked for"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, found: Any, ignore_index: int, chunk: int, grad: bool
    ) -> Tensor:
        wants_x, wants_weight = [grad and wants for wants in ctx.needs_input_grad[:2]]
        if not wants_weight:
            found = None
        grad_x = grad_weight = None
        write: Write | None = None
        with contextlib.nullcontext(True) if found is None else found.early() as formed:
            if formed and wants_x:
                grad_x = torch.empty_like(x)
            if formed and found is not None:
                write = found.write_chunk
            elif formed and wants_weight:
                grad_weight, write = _fresh(weight)
            total = _chunks(x, weight, targets, ignore_index, chunk, grad_x=grad_x, write=write)
        ctx.how = (ignore_index, chunk)
        ctx.found = found
        ctx.formed = formed
        # torch.utils.checkpoint wants a recomputation to save as much as the forward, where a slot may have been free
        ctx.grad_x = None if found is None else grad_x
        ctx.save_for_backward(x, weight, targets, grad_x if found is None else None, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, grad_x, grad_weight = ctx.saved_tensors
        found, (wants_x, wants_weight, *others) = ctx.found, ctx.needs_input_grad
        rest = [None] * len(others)
        if found is not None:
            grad_x = ctx.grad_x
        if torch.is_grad_enabled():  # create_graph
            return *_differentiable_gradients(x, weight, targets, ctx.how[0], scale), *rest
        # formed in the forward, at a scale of one
        if ctx.formed and (found is None or found.confirm(scale)):
            return *[None if grad is None else grad * scale for grad in (grad_x, grad_weight)], *rest
        # else the logits again
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = None
        write: Write | None = None
        if wants_weight and found is not None and found.takes and found.later is None:
            write = found.write_chunk
        elif wants_weight:
            grad_weight, write = _fresh(weight)
        _chunks(x, weight, targets, *ctx.how, grad_x=grad_x, write=write, scale=scale)
        return grad_x, grad_weight, *rest


def _differentiable_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, scale: Tensor
) -> list[Tensor | None]:
    """Returns the gradients of `x` and `weight`, None for what requires none, in a graph of their own."""
    wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
    scores = F.linear(x, weight).to(_wide(x.dtype))
    total = F.cross_entropy(scores, targets, ignore_index=ignore_index, reduction="sum")
    grads = iter(torch.autograd.grad(total, wanted, scale, create_graph=True))
    return [next(grads) if tensor.requires_grad else None for tensor in (x, weight)]


def _fresh(weight: Tensor) -> tuple[Tensor, Write]:
    """Returns a zero gradient of `weight`, and the function that adds to it."""
    grad = torch.zeros_like(weight)
    return grad, grad.addmm_


def _chunks(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    *,
    grad_x: Tensor | None,
    write: Write | None,
    scale: Tensor | None = None,
) -> Tensor:
    """Returns the total. Its gradients, times `scale`, are written to `grad_x` and passed to `write` as factors.

    Works in place on memory for the logits of one chunk, allocated once.
    """
    wide = _wide(x.dtype)
    gradient = grad_x is not None or write is not None
    whole = x.new_empty(chunk, len(weight))
    total = x.new_zeros((), dtype=wide)
    softmax_ = _softmax_of(whole, targets, ignore_index)
    for start in range(0, len(x), chunk):
        rows = x[start : start + chunk]
        labels = targets[start : start + chunk]
        logits = whole[: len(rows)]
        counts = (labels != ignore_index).to(wide)
        torch.mm(rows, weight.t(), out=logits)
        factors = counts if scale is None else counts * scale
        losses = softmax_(logits, labels.where(labels != ignore_index, 0), factors, gradient=gradient)
        total = total + losses.dot(counts)  # `+=` into what is returned has a zero gradient when torch 2.11 compiles
        if grad_x is not None:
            torch.mm(logits, weight, out=grad_x[start : start + chunk])
        if write is not None:
            write(logits.t(), rows)
    return total


# ---- Softmax of one chunk, in place.


def _softmax_of(logits: Tensor, targets: Tensor, ignore_index: int) -> Callable[..., Tensor]:
    """Returns `_softmax_`, or a kernel that does the same in two passes over the logits."""
    if logits.dtype == torch.float64 or torch.compiler.is_compiling() or not kernels_run_on(logits):
        return _softmax_
    from yafsdp_fn.nn import cross_entropy_kernel

    inside = (targets == ignore_index) | ((targets >= 0) & (targets < logits.shape[1]))
    assert_async(inside.all(), "linear_cross_entropy: a target is out of bounds")
    return cross_entropy_kernel.softmax_


def _softmax_(logits: Tensor, labels: Tensor, factors: Tensor, *, gradient: bool) -> Tensor:
    """Returns the losses of `logits` [C, V] and overwrites these with the gradient of their sum; each row times its
    factor.

    If the softmax is in a wider dtype, a quarter of the rows is widened at a time.
    """
    wide = factors.dtype
    if logits.dtype == wide:
        p = logits.sub_(logits.amax(1, keepdim=True))
        losses = F.nll_loss(p, labels, reduction="none")  # minus the label's
        sums = p.exp_().sum(1)
        if gradient:
            p.mul_((factors / sums)[:, None]).scatter_add_(1, labels[:, None], -factors[:, None])
        return losses.add_(sums.log_())
    parts = []
    for few, own, by in zip(logits.chunk(4), labels.chunk(4), factors.chunk(4), strict=True):
        p = few.to(wide)
        parts.append(_softmax_(p, own, by, gradient=gradient))
        if gradient:
            few.copy_(p)
        del p  # free it before the next one
    return torch.cat(parts)
