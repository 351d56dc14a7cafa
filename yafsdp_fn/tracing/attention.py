"""Measures attention on fake tensors by a fixed rule, whatever kernel or decomposition torch would choose for them.

    saved      q, k, v, out, and the logsumexp of every row of scores, fp32 [B, H, S]; never the scores [S, T]
    forward    2 products over the pairs (query, key) that a kernel works on
    backward   5 products: a flash kernel computes the scores again

A causal kernel leaves out the pairs above the diagonal, which begins at the first query and the first key, or ends at
the last of both (`causal_lower_right`, no tensor for a kernel); a mask saves no pair. Shapes: queries [..., H, S, D],
keys [..., K, T, D], values [..., K, T, Dv]. Attention by the math path (the CPU takes it for some dtypes, dropout and
grouped heads) saves more: the scores, H S T elements a time.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from yafsdp_fn.util.torch_private import diagonal_of, run_autograd, transforms_active


class AttentionRule(TorchFunctionMode):
    """Applies the rule to `scaled_dot_product_attention` while active; `flops` counts what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not transforms_active():
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is None or not mask.requires_grad:
                return self._attention(*args, **kwargs)
        if func is torch.autograd.grad and not kwargs.get("is_grads_batched") and not kwargs.get("materialize_grads"):
            with self:  # torch takes a mode away while it handles a call, but blocks recompute in this one
                return _grad(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        diagonal = diagonal_of(attn_mask)
        if diagonal is not None:
            attn_mask = None
        elif is_causal:
            diagonal = "first"
        out: Tensor = _Attention.apply(self, query, key, value, attn_mask, diagonal)  # type: ignore[no-untyped-call]
        return out


def attention_flops(query: Tensor, key: Tensor, value: Tensor, diagonal: str | None) -> int:
    """Returns the FLOPs of the two products of a forward. diagonal: which pair is on it, the "first" or the "last" """
    *lead, rows, width = query.shape
    columns = key.shape[-2]
    pairs = rows * columns
    if diagonal == "last":
        pairs -= rows * rows // 2
    elif diagonal == "first":
        square = min(rows, columns)
        below = max(0, rows - columns) * columns
        pairs = square * square - square * square // 2 + below
    return 2 * math.prod(lead) * pairs * (width + value.shape[-1])


def kernel_flops(func: Any, args: Any, kwargs: Any) -> int:
    """Returns the FLOPs of one of torch's fused kernels, forward or backward, called with `args` and `kwargs`."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    diagonal = "first" if given.get("is_causal", False) else None
    flops = attention_flops(given["query"], given["key"], given["value"], diagonal)
    return flops * 5 // 2 if "backward" in str(func) else flops


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    **_: bool,
) -> tuple[Tensor | None, ...]:
    """Computes `torch.autograd.grad` on fake tensors, bypassing function modes. Unused inputs get None."""
    outs, wanted, given = ((x,) if isinstance(x, Tensor) else x for x in (outputs, inputs, grad_outputs))
    grads = []
    for out, seed in zip(outs, given or [None] * len(outs), strict=True):
        grads.append(torch.ones_like(out) if seed is None else seed)
    retain = create_graph if retain_graph is None else retain_graph
    how = {"allow_unreachable": True, "accumulate_grad": False}
    found: tuple[Tensor | None, ...] = run_autograd(
        tuple(outs), tuple(grads), retain, create_graph, tuple(wanted), **how
    )
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rule: AttentionRule, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, diagonal: str | None
    ) -> Tensor:
        ctx.rule = rule
        ctx.flops = attention_flops(q, k, v, diagonal)
        rule.flops += ctx.flops
        *lead, rows, _ = q.shape
        width = v.shape[-1]
        if q.ndim > 3:  # heads lie beside each other in memory, so that they are joined without a copy
            *outer, heads = lead
            out = q.new_empty(*outer, rows, heads, width).transpose(-2, -3)
        else:
            out = q.new_empty(*lead, rows, width)
        logsumexp = q.new_empty(*lead, rows, dtype=torch.float32)
        masks = [] if mask is None else [mask]
        ctx.save_for_backward(q, k, v, out, logsumexp, *masks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        ctx.rule.flops += ctx.flops * 5 // 2
        return None, torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None
