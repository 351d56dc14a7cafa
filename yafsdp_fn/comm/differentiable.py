"""Collectives as differentiable functions, with rules for every torch.func transform.

    AllGather      backward: ReduceScatter
    ReduceScatter  backward: AllGather
    AllReduce      backward: AllReduce

A shard is a part of one logical vector, the same on every replica; everything else is a rank's own. What goes from
shards to ranks (AllGather, a sum over shards) is a matter of the shard group; its transpose adds up what all ranks of
the mesh give. Gradients are of the sum over ranks of what each rank differentiates, complete on every replica.

They run on the communicators' streams, in order, and are waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.comm.communicators import Communicators


class AllGather(torch.autograd.Function):
    """[n, ...] -> [R * n, ...] in dtype `wire`; the gradient is reduced in dtype `back` and summed in `accumulate`."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        comms: Communicators,
        shard: Tensor,
        wire: torch.dtype,
        back: torch.dtype,
        accumulate: torch.dtype | None = None,
    ) -> Tensor:
        return comms.all_gather(shard.to(wire).contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, shard, ctx.wire, ctx.back, ctx.accumulate = inputs
        ctx.dtype = shard.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        shard = ReduceScatter.apply(ctx.comms, grad, ctx.back, ctx.dtype, ctx.accumulate)  # type: ignore[no-untyped-call]
        return None, shard, None, None, None

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> Any:
        return AllGather.apply(ctx.comms, tangent, ctx.wire, ctx.back, ctx.accumulate)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, comms: Communicators, shard: Tensor, *dtypes: Any) -> Any:
        # dim 0 is what is gathered: the batch dim goes last
        return AllGather.apply(comms, shard.movedim(dims[1], -1), *dtypes), -1  # type: ignore[no-untyped-call]


class ReduceScatter(torch.autograd.Function):
    """[R * n, ...] -> [n, ...], of dtype `out`: the sum over all ranks of the mesh, sent in dtype `wire`.

    accumulate: what ranks sum in, `Precision.sum_dtype`; None for the backend's sum in `wire`
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(
        comms: Communicators,
        full: Tensor,
        wire: torch.dtype,
        out: torch.dtype,
        accumulate: torch.dtype | None = None,
    ) -> Tensor:
        return comms.reduce_scatter(full.to(wire).contiguous(), out, accumulate)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, full, ctx.wire, ctx.out, ctx.accumulate = inputs
        ctx.dtype = full.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        full = AllGather.apply(ctx.comms, grad, ctx.dtype, ctx.wire, ctx.accumulate)  # type: ignore[no-untyped-call]
        return None, full, None, None, None

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> Any:
        return ReduceScatter.apply(ctx.comms, tangent, ctx.wire, ctx.out, ctx.accumulate)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, comms: Communicators, full: Tensor, *dtypes: Any) -> Any:
        return ReduceScatter.apply(comms, full.movedim(dims[1], -1), *dtypes), -1  # type: ignore[no-untyped-call]


class AllReduce(torch.autograd.Function):
    """The sum over ranks, on every rank: over the shard group, or with `replicas` over the whole mesh.

    The first is for values that ranks have of their own shards; it is the other's transpose.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(comms: Communicators, values: Tensor, replicas: bool = False) -> Tensor:
        total = comms.all_reduce_sum if replicas else comms.sum_over_shards
        return total(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, _, ctx.replicas = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, AllReduce.apply(ctx.comms, grad, not ctx.replicas), None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> Any:
        return AllReduce.apply(ctx.comms, tangent, ctx.replicas)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, comms: Communicators, values: Tensor, replicas: bool) -> Any:
        return AllReduce.apply(comms, values, replicas), dims[1]  # type: ignore[no-untyped-call]
