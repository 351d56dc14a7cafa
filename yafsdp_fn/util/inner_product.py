"""Inner products of two local leaves: sums in float64 of exact products, differentiable."""

from typing import Any

import torch
from torch import Tensor

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements widened to float64 at a time: few enough for a core's cache; on a GPU, enough to fill it."""


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Returns the inner product of two local leaves, in float64; differentiable any number of times."""
    product: Tensor = _Inner.apply(*torch.broadcast_tensors(a, b))  # type: ignore[no-untyped-call]
    return product


class _Inner(torch.autograd.Function):
    """Computes `sum(a * b)` in float64 without copies of their size."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        size = CHUNK[a.device.type]
        parts = zip(torch.split(a.reshape(-1), size), torch.split(b.reshape(-1), size), strict=True)
        return torch.stack([x.double().dot(y.double()) for x, y in parts]).sum().to(a.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return (grad * b).to(a.dtype), (grad * a).to(b.dtype)

    @staticmethod
    def jvp(ctx: Any, of_a: Tensor | None, of_b: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        terms = []
        if of_a is not None:
            terms.append(inner(of_a, b))
        if of_b is not None:
            terms.append(inner(a, of_b))
        return torch.stack(terms).sum()
