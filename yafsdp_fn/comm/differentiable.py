"""Collectives as differentiable functions, with rules for every torch.func transform.

    AllGather      backward: ReduceScatter
    ReduceScatter  backward: AllGather
    AllReduce      backward: AllReduce

Gradients are of the sum over ranks of what each rank differentiates. They run on the communicators' streams, in order,
and are waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.comm.communicators import Communicators


class AllGather(torch.autograd.Function):
    """[n, ...] -> [R * n, ...] in dtype `wire`; the gradient is reduced in dtype `back`."""

    generate_vmap_rule = False

    @staticmethod
    def forward(comms: Communicators, shard: Tensor, wire: torch.dtype, back: torch.dtype) -> Tensor:
        return comms.all_gather(shard.to(wire).contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, shard, ctx.wire, ctx.back = inputs
        ctx.dtype = shard.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ReduceScatter.apply(ctx.comms, grad, ctx.back, ctx.dtype), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> Any:
        return AllGather.apply(ctx.comms, tangent, ctx.wire, ctx.back)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, comms: Communicators, shard: Tensor, wire: torch.dtype, back: torch.dtype) -> Any:
        # dim 0 is what is gathered: the batch dim goes last
        return AllGather.apply(comms, shard.movedim(dims[1], -1), wire, back), -1  # type: ignore[no-untyped-call]


class ReduceScatter(torch.autograd.Function):
    """[R * n, ...] -> [n, ...], summed over ranks in dtype `wire`, returned in dtype `out`."""

    generate_vmap_rule = False

    @staticmethod
    def forward(comms: Communicators, full: Tensor, wire: torch.dtype, out: torch.dtype) -> Tensor:
        return comms.reduce_scatter(full.to(wire).contiguous()).to(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, full, ctx.wire, ctx.out = inputs
        ctx.dtype = full.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, AllGather.apply(ctx.comms, grad, ctx.dtype, ctx.wire), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> Any:
        return ReduceScatter.apply(ctx.comms, tangent, ctx.wire, ctx.out)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, comms: Communicators, full: Tensor, wire: torch.dtype, out: torch.dtype) -> Any:
        return ReduceScatter.apply(comms, full.movedim(dims[1], -1), wire, out), -1  # type: ignore[no-untyped-call]


class AllReduce(torch.autograd.Function):
    """The sum over ranks, on every rank."""

    generate_vmap_rule = False

    @staticmethod
    def forward(comms: Communicators, values: Tensor) -> Tensor:
        return comms.all_reduce_sum(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, AllReduce.apply(ctx.comms, grad)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor) -> Any:
        return AllReduce.apply(ctx.comms, tangent)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, comms: Communicators, values: Tensor) -> Any:
        return AllReduce.apply(comms, values), dims[1]  # type: ignore[no-untyped-call]
