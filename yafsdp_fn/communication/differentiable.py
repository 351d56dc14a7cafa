"""Differentiable collectives, with rules for every torch.func transform.

A distributed value has one of two inner products, with W ranks in the mesh:

    of ranks      <a, b> = 1/W sum over ranks of a_r b_r        values, activations, whole weights
    of shards     <s, t> = sum over shards of s_i t_i           parameters and their gradients; replicas count once

Each rank differentiates its own value, and the gradient is that of their mean, complete on every replica: what a plain
tree gives on the whole batch, at any number of ranks. The adjoints:

    AllGather      shards -> ranks      ReduceScatter, divided by W
    ReduceScatter  ranks -> shards      AllGather, times W
    SumOfShards    shards -> ranks      SumToShards, divided by W
    SumToShards    ranks -> shards      SumOfShards, times W
    SumOfRanks     ranks -> ranks       itself
    ToShards       ranks -> shards      itself, times the ranks of a copy

A step sums over ranks and replicas itself, at its end, and divides by its weight. With `step=True` the backward outside
transforms is therefore the literal transpose, from each rank's tensors to each rank's, without the sum over replicas.
Gradients by torch.func inside a step are complete; they pass through the transpose with their own `scale`.

All collectives run in order on the communicators' streams, and are waited for.
"""

from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.communication.formats import Encoded, as_sent, straight
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.util.torch_private import asked_by_jacfwd, forward_derivatives, recorded, transforms_active

NO_BASIS = (
    "jacfwd or hessian with respect to sharded parameters, or to what shards are computed from: it makes a basis of "
    "each rank's own shard, which on several ranks is none of the whole. Use torch.func.jvp with directions "
    "(ya.normal_like), torch.func.jacrev for few outputs, or whole weights from ya.unshard where they are small"
)

NO_RECORD = (
    "torch.func.linearize of what is sharded over several ranks: it records the operations of tensors (make_fx), and "
    "collectives are none of these. Use torch.func.jvp, once for each direction"
)


class Collective(torch.autograd.Function):
    """Base of functions of `(comms, tensor, *how)` that are linear in the tensor, and elementwise beyond dim 0.

    of_shards: True if the tensor is part of a shard
    """

    generate_vmap_rule = False
    of_shards = False

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.comms, tensor, *ctx.how = inputs
        ctx.of_ranks = True  # for those who walk through a graph
        ctx.dtype = tensor.dtype
        ctx.in_transform = transforms_active()

    @classmethod
    def jvp(cls, ctx: Any, _: Any, tangent: Tensor, *rest: Any) -> Any:
        if cls.of_shards and ctx.comms.world > 1 and asked_by_jacfwd():
            raise RuntimeError(NO_BASIS)
        if ctx.comms.world > 1 and recorded():
            raise RuntimeError(NO_RECORD)
        with forward_derivatives():
            return cls.apply(ctx.comms, tangent, *map(straight, ctx.how))  # type: ignore[no-untyped-call]

    @classmethod
    def vmap(cls, info: Any, dims: Any, comms: Ranks, values: Tensor, *how: Any) -> Any:
        return cls.apply(comms, values.movedim(dims[1], -1), *how), -1  # type: ignore[no-untyped-call]


class AllGather(Collective):
    """Gathers [n, ...] -> [R * n, ...] in dtype `wire`, times `scale`. The gradient is reduced in dtype `back` and
    summed in `accumulate`. In place of both dtypes may be what travels in a format: derivatives pass by it."""

    of_shards = True

    @staticmethod
    def forward(
        comms: Ranks,
        shard: Tensor,
        wire: torch.dtype | Encoded,
        back: torch.dtype | Encoded,
        accumulate: torch.dtype | None = None,
        step: bool = False,
        scale: float = 1.0,
    ) -> Tensor:
        return comms.all_gather(as_sent(_scaled(shard, scale), wire).contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, back, accumulate, step, scale = ctx.how
        literal = _literal(ctx, step)
        scale = scale if literal else scale / ctx.comms.world
        how = back, ctx.dtype, accumulate, step, scale, not literal
        return None, ReduceScatter.apply(ctx.comms, grad, *how), *[None] * 5  # type: ignore[no-untyped-call]


class ReduceScatter(Collective):
    """Reduces [R * n, ...] -> [n, ...] in dtype `out`: the sum over all ranks of the mesh, sent in `wire`, times
    `scale`.

    accumulate: dtype of the sum, `Precision.sum_dtype_of` the wire; None for the backend's sum in `wire`
    replicas: False for the sum over the shard group alone
    """

    @staticmethod
    def forward(
        comms: Ranks,
        full: Tensor,
        wire: torch.dtype | Encoded,
        out: torch.dtype,
        accumulate: torch.dtype | None = None,
        step: bool = False,
        scale: float = 1.0,
        replicas: bool = True,
    ) -> Tensor:
        sent = as_sent(full, wire).contiguous()
        return _scaled(comms.reduce_scatter(sent, out, accumulate, replicas=replicas), scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wire, _, accumulate, step, scale, replicas = ctx.how
        literal = _literal(ctx, step)
        if literal and replicas:
            grad = ctx.comms.sum_over_replicas(grad)
        scale = scale if literal else scale * ctx.comms.world
        full = AllGather.apply(ctx.comms, grad, ctx.dtype, wire, accumulate, step, scale)  # type: ignore[no-untyped-call]
        return None, full, *[None] * 6


class _Sum(Collective):
    """Sums values over all ranks, times `scale`."""

    @staticmethod
    def forward(comms: Ranks, values: Tensor, step: bool = False, scale: float = 1.0) -> Tensor:
        return _scaled(comms.all_reduce_sum(values.clone(memory_format=torch.contiguous_format)), scale)


class SumOfShards(_Sum):
    """Sums each rank's value for its own shard over the shards of one copy."""

    of_shards = True

    @staticmethod
    def forward(comms: Ranks, values: Tensor, step: bool = False, scale: float = 1.0) -> Tensor:
        return _scaled(comms.sum_over_shards(values.clone(memory_format=torch.contiguous_format)), scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        step, scale = ctx.how
        literal = _literal(ctx, step)
        back = scale if literal else scale / ctx.comms.world
        summed = SumToShards.apply(ctx.comms, grad, step, back)  # type: ignore[no-untyped-call]
        if literal:  # the sum was of the first replica's values
            summed = summed * (ctx.comms.replica == 0)
        return None, summed, None, None


class SumToShards(_Sum):
    """Sums each rank's value over all ranks, for every shard: the adjoint of `SumOfShards`."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        step, scale = ctx.how
        if _literal(ctx, step):
            return None, SumToShards.apply(ctx.comms, grad, step, scale), None, None  # type: ignore[no-untyped-call]
        back = scale * ctx.comms.world
        return None, SumOfShards.apply(ctx.comms, grad, step, back), None, None  # type: ignore[no-untyped-call]


class SumOfRanks(_Sum):
    """Sums each rank's value over all ranks, for every rank."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, SumOfRanks.apply(ctx.comms, grad, *ctx.how), None, None  # type: ignore[no-untyped-call]


class ToShards(Collective):
    """Takes a rank's value for a shard's. back: the adjoint of that"""

    @staticmethod
    def forward(comms: Ranks, values: Tensor, step: bool = False, back: bool = False) -> Tensor:
        return values * (comms.ranks if back else 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        step, back = ctx.how
        back = back if _literal(ctx, step) else not back
        return None, ToShards.apply(ctx.comms, grad, step, back), None, None  # type: ignore[no-untyped-call]


def _scaled(values: Tensor, scale: float) -> Tensor:
    return values if scale == 1.0 else values * scale


def _literal(ctx: Any, step: bool) -> bool:
    """Returns whether a backward belongs to a step, not to a transform inside it."""
    return step and not ctx.in_transform
