"""Collectives as differentiable functions, with rules for every torch.func transform.

    AllGather      backward: ReduceScatter
    ReduceScatter  backward: AllGather
    AllReduce      backward: AllReduce

A shard is a part of one logical vector, the same on every replica; everything else is a rank's own. What goes from
shards to ranks (AllGather, a sum over shards) is a matter of the shard group; its transpose adds up what all ranks of
the mesh give. Gradients are of the sum over ranks of what each rank differentiates, complete on every replica.

A step adds up the replicas itself, at its end, since gradients that come to its leaves without any collective are a
replica's own. With `step=True` the backward outside of transforms therefore is the literal transpose, from each rank's
tensors to each rank's, and leaves the sum over replicas out; gradients by torch.func inside of a step are complete.

They run on the communicators' streams, in order, and are waited for.
"""

from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.torch_private import transforms_active


class _Collective(torch.autograd.Function):
    """A function of `(comms, tensor, *how)`, linear in the tensor and elementwise but in its dim 0."""

    generate_vmap_rule = False

    @classmethod
    def jvp(cls, ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> Any:
        return cls.apply(ctx.comms, tangent, *ctx.how)  # type: ignore[no-untyped-call]

    @classmethod
    def vmap(cls, info: Any, dims: Any, comms: Ranks, values: Tensor, *how: Any) -> Any:
        return cls.apply(comms, values.movedim(dims[1], -1), *how), -1  # type: ignore[no-untyped-call]


class AllGather(_Collective):
    """[n, ...] -> [R * n, ...] in dtype `wire`; the gradient is reduced in dtype `back` and summed in `accumulate`."""

    @staticmethod
    def forward(
        comms: Ranks,
        shard: Tensor,
        wire: torch.dtype,
        back: torch.dtype,
        accumulate: torch.dtype | None = None,
        step: bool = False,
    ) -> Tensor:
        return comms.all_gather(shard.to(wire).contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, shard, *ctx.how = inputs
        ctx.dtype, ctx.literal = shard.dtype, _literal(ctx.how[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, back, accumulate, step = ctx.how
        how = back, ctx.dtype, accumulate, step, not ctx.literal
        return None, ReduceScatter.apply(ctx.comms, grad, *how), *[None] * 4  # type: ignore[no-untyped-call]


class ReduceScatter(_Collective):
    """[R * n, ...] -> [n, ...], of dtype `out`: the sum over all ranks of the mesh, sent in dtype `wire`.

    accumulate: what ranks sum in, `Precision.sum_dtype`; None for the backend's sum in `wire`
    replicas: False for the sum over the shard group alone
    """

    @staticmethod
    def forward(
        comms: Ranks,
        full: Tensor,
        wire: torch.dtype,
        out: torch.dtype,
        accumulate: torch.dtype | None = None,
        step: bool = False,
        replicas: bool = True,
    ) -> Tensor:
        return comms.reduce_scatter(full.to(wire).contiguous(), out, accumulate, replicas=replicas)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, full, *ctx.how = inputs
        ctx.dtype, ctx.literal = full.dtype, _literal(ctx.how[-2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wire, _, accumulate, step, replicas = ctx.how
        if ctx.literal and replicas:
            grad = ctx.comms.sum_over_replicas(grad)
        full = AllGather.apply(ctx.comms, grad, ctx.dtype, wire, accumulate, step)  # type: ignore[no-untyped-call]
        return None, full, *[None] * 5


class AllReduce(_Collective):
    """The sum over ranks, on every rank: over the shard group, or with `replicas` over the whole mesh.

    The first is for values that ranks have of their own shards; it is the other's transpose.
    """

    @staticmethod
    def forward(comms: Ranks, values: Tensor, step: bool = False, replicas: bool = False) -> Tensor:
        total = comms.all_reduce_sum if replicas else comms.sum_over_shards
        return total(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, _, *ctx.how = inputs
        ctx.literal = _literal(ctx.how[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        step, replicas = ctx.how
        summed = AllReduce.apply(ctx.comms, grad, step, ctx.literal or not replicas)  # type: ignore[no-untyped-call]
        if ctx.literal and not replicas:  # the sum was of the first replica's values
            summed = summed * (ctx.comms.replica == 0)
        return None, summed, None, None


def _literal(step: bool) -> bool:
    """Whether the backward of what is recorded now belongs to a step, and not to a transform inside of it."""
    return step and not transforms_active()
