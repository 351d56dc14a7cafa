"""linear_cross_entropy: the head and the loss in one, without the logits of all positions at once.

    for rows, target in chunks(x, targets):    # [C, E], [C]; logits of C rows, [C, V], are all there is at a time
        p = softmax(rows @ W.T)
        total -= log(p[target])
        grad_rows = (p - onehot(target)) @ W
        grad_W += (p - onehot(target)).T @ rows

All of it runs in the forward, where the logits are at hand; the backward multiplies both gradients by what arrives.
In a visit of a training step grad_W is formed in its gradient slot. Where that is not free before the backward (another
microbatch's gradient is in it), the forward computes the total alone, and the backward the logits again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from yafsdp_fn.linear import linear
from yafsdp_fn.runtime.destination import destination

ON_CPU, ELSEWHERE = (32 << 20, 256), (256 << 20, 2048)
"""Bytes of logits, in the dtype of the softmax, that may be there at once; and rows that may in any case: with fewer,
the pass of each chunk over grad_W would show."""


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, chunk: int | None = None
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight), targets, reduction="sum")`, with the softmax and the sum in fp32 at least.

    x [..., E], weight [V, E], targets [...] of integers -> a scalar. Targets of `ignore_index` do not count.

    chunk: rows of x whose logits are held at once. None: as many as make 32 MiB, but at least 256; on a GPU 256 MiB and
        2048. Under torch.func, and for a second derivative, all

    Raises torch's error for a target outside of [0, V): IndexError, on CUDA a failed assertion on the device.
    """
    if has_torch_function((x, weight)):  # the planner's mode: what would be done on a GPU
        how: dict[str, Any] = {"ignore_index": ignore_index, "chunk": chunk}
        result: Tensor = handle_torch_function(linear_cross_entropy, (x, weight), x, weight, targets, **how)
        return result
    rows, labels = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if chunk is None:
        chunk = rows_at_once(rows, weight, device=device)
    elif chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk={chunk}, expected 1 row or more")
    if chunk >= len(rows) or torch._C._are_functorch_transforms_active():
        return _whole(rows, weight, labels, ignore_index)
    total: Tensor = _Chunked.apply(rows, weight, labels, ignore_index, chunk, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return total


def rows_at_once(x: Tensor, weight: Tensor, *, device: str) -> int:
    """Rows of a chunk, where the caller does not say, on this type of device; all chunks are of a size."""
    nbytes, least = ON_CPU if device == "cpu" else ELSEWHERE
    rows = x.shape[:-1].numel()
    most = max(least, nbytes // (len(weight) * _wide(x.dtype).itemsize))
    return math.ceil(rows / math.ceil(rows / most)) if rows else 1


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _whole(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    scores = linear(x, weight).to(_wide(x.dtype))
    return F.cross_entropy(scores, targets, ignore_index=ignore_index, reduction="sum")


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk: int, grad: bool
    ) -> Tensor:
        wants_x, wants_weight = (grad and wants for wants in ctx.needs_input_grad[:2])
        # a compiled graph is made before the slots of its backward are known
        found = destination(weight) if wants_weight and not torch.compiler.is_compiling() else None
        grad_x = grad_weight = write = None
        with contextlib.nullcontext(True) if found is None else found.early() as formed:
            if formed and wants_x:
                grad_x = torch.empty_like(x)
            if formed and wants_weight:
                grad_weight, write = (None, found.write_mm) if found else _fresh(weight)
            total = _chunks(x, weight, targets, ignore_index, chunk, grad_x=grad_x, write=write)
        ctx.how, ctx.found, ctx.formed = (ignore_index, chunk), found, formed
        ctx.save_for_backward(x, weight, targets, grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, grad_x, grad_weight = ctx.saved_tensors
        found, (wants_x, wants_weight, *_) = ctx.found, ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph
            wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
            total = _whole(x, weight, targets, ctx.how[0])
            grads = iter(torch.autograd.grad(total, wanted, scale, create_graph=True))
            return *(next(grads) if wants else None for wants in (wants_x, wants_weight)), None, None, None, None
        if ctx.formed and (found is None or found.confirm(scale)):
            scaled = (None if grad is None else grad * scale for grad in (grad_x, grad_weight))
            return *scaled, None, None, None, None
        grad_x = torch.empty_like(x) if wants_x else None
        write = None
        if wants_weight:
            grad_weight, write = (None, found.write_mm) if found is not None and found.takes else _fresh(weight)
        _chunks(x, weight, targets, *ctx.how, grad_x=grad_x, write=write, scale=scale)
        return grad_x, grad_weight, None, None, None, None


def _fresh(weight: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], object]]:
    """A gradient of `weight`, and what adds the product of [V, C] and [C, E] to it."""
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
    write: Callable[[Tensor, Tensor], object] | None,
    scale: Tensor | None = None,
) -> Tensor:
    """The total. Its gradients, times `scale`, are written to `grad_x` and given to `write` as factors.

    Works in place on memory for one chunk, made once: for the logits, and for the softmax where that is wider.
    """
    wide = _wide(x.dtype)
    narrow = x.new_empty(chunk, len(weight))
    buffer = narrow if wide == x.dtype else narrow.to(wide)
    total = x.new_zeros((), dtype=wide)
    for start in range(0, len(x), chunk):
        rows, labels = x[start : start + chunk], targets[start : start + chunk]
        logits, p = narrow[: len(rows)], buffer[: len(rows)]
        torch.mm(rows, weight.t(), out=logits)
        if p is not logits:
            p.copy_(logits)
        counts = (labels != ignore_index).to(wide)
        p.sub_(p.amax(1, keepdim=True))
        losses = F.nll_loss(p, labels, ignore_index=ignore_index, reduction="none")  # minus the target's
        sums = p.exp_().sum(1)
        total += (losses + sums.log()).dot(counts)
        if grad_x is None and write is None:
            continue
        factor = counts if scale is None else counts * scale
        p.mul_((factor / sums)[:, None])
        at = labels.where(labels != ignore_index, 0)
        p.scatter_add_(1, at[:, None], -factor[:, None])
        if p is not logits:
            logits.copy_(p)
        if grad_x is not None:
            torch.mm(logits, weight, out=grad_x[start : start + chunk])
        if write is not None:
            write(logits.t(), rows)
    return total
