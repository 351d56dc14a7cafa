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
Gradients by torch.func inside a step are complete; they pass through the transpose with their own factor.

All collectives run in order on the communicators' streams, and are waited for.

    whole = AllGather(comms, wire, back)(shard)      # a collective as a value; autograd asks it for its adjoint
"""

import dataclasses
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


# ---- Collectives as values, and the node of autograd that they share.


@dataclasses.dataclass(frozen=True)
class Collective:
    """Base of functions that are linear in a tensor, and elementwise beyond dim 0: `run`, differentiable when it is
    called.

    step: its backward outside transforms is that of a step
    of_shards: True if the tensor is part of a shard
    """

    of_shards = False
    comms: Ranks
    _: dataclasses.KW_ONLY
    step: bool = False

    def __call__(self, values: Tensor) -> Tensor:
        found: Tensor = _Node.apply(self, values)  # type: ignore[no-untyped-call]
        return found

    def run(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def gradient(self, grad: Tensor, dtype: torch.dtype, literal: bool) -> Tensor:
        """Returns the adjoint of `grad`. dtype: of the tensor; literal: for a step, not for a transform inside it"""
        raise NotImplementedError

    def derivative(self, tangent: Tensor) -> Tensor:
        """Returns the derivative along `tangent`. Raises where that would be of something else."""
        if self.of_shards and self.comms.world > 1 and asked_by_jacfwd():
            raise RuntimeError(NO_BASIS)
        if self.comms.world > 1 and recorded():
            raise RuntimeError(NO_RECORD)
        passes_formats: dict[str, Any] = {name: straight(value) for name, value in vars(self).items()}
        return dataclasses.replace(self, **passes_formats)(tangent)


class _Node(torch.autograd.Function):
    """Applies a collective to a tensor."""

    generate_vmap_rule = False

    @staticmethod
    def forward(collective: Collective, values: Tensor) -> Tensor:
        return collective.run(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.collective, values = inputs
        ctx.of_ranks = True  # for those who walk through a graph
        ctx.dtype = values.dtype
        ctx.in_transform = transforms_active()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        literal = ctx.collective.step and not ctx.in_transform
        return None, ctx.collective.gradient(grad, ctx.dtype, literal)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor) -> Tensor:
        with forward_derivatives():
            along: Tensor = ctx.collective.derivative(tangent)
            return along

    @staticmethod
    def vmap(info: Any, dims: Any, collective: Collective, values: Tensor) -> tuple[Tensor, int]:
        return collective(values.movedim(dims[1], -1)), -1


# ---- The collectives.


@dataclasses.dataclass(frozen=True)
class AllGather(Collective):
    """Gathers [n, ...] -> [R * n, ...] in dtype `wire`. The gradient is reduced in dtype `back` and summed in
    `accumulate`. In place of both dtypes may be what travels in a format: derivatives pass by it."""

    of_shards = True
    wire: torch.dtype | Encoded
    back: torch.dtype | Encoded
    accumulate: torch.dtype | None = None

    def run(self, values: Tensor) -> Tensor:
        return self.comms.all_gather(as_sent(values, self.wire).contiguous())

    def gradient(self, grad: Tensor, dtype: torch.dtype, literal: bool) -> Tensor:
        how = self.back, dtype, self.accumulate, not literal
        reduced = ReduceScatter(self.comms, *how, step=self.step)(grad)
        return reduced if literal else reduced * (1 / self.comms.world)


@dataclasses.dataclass(frozen=True)
class ReduceScatter(Collective):
    """Reduces [R * n, ...] -> [n, ...] in dtype `out`: the sum over all ranks of the mesh, sent in `wire`.

    accumulate: dtype of the sum, `Precision.sum_dtype_of` the wire; None for the backend's sum in `wire`
    replicas: False for the sum over the shard group alone
    """

    wire: torch.dtype | Encoded
    out: torch.dtype
    accumulate: torch.dtype | None
    replicas: bool

    def run(self, values: Tensor) -> Tensor:
        sent = as_sent(values, self.wire).contiguous()
        return self.comms.reduce_scatter(sent, self.out, self.accumulate, replicas=self.replicas)

    def gradient(self, grad: Tensor, dtype: torch.dtype, literal: bool) -> Tensor:
        if not literal:
            grad = grad * self.comms.world
        elif self.replicas:
            grad = self.comms.sum_over_replicas(grad)
        return AllGather(self.comms, dtype, self.wire, self.accumulate, step=self.step)(grad)


class SumOfRanks(Collective):
    """Sums each rank's value over all ranks, for every rank."""

    def run(self, values: Tensor) -> Tensor:
        return self.comms.all_reduce_sum(values.clone(memory_format=torch.contiguous_format))

    def gradient(self, grad: Tensor, dtype: torch.dtype, literal: bool) -> Tensor:
        return self(grad)


class SumToShards(SumOfRanks):
    """Sums each rank's value over all ranks, for every shard: the adjoint of `SumOfShards`."""

    def gradient(self, grad: Tensor, dtype: torch.dtype, literal: bool) -> Tensor:
        if literal:
            return self(grad)
        return SumOfShards(self.comms, step=self.step)(grad) * self.comms.world


class SumOfShards(Collective):
    """Sums each rank's value for its own shard over the shards of one copy."""

    of_shards = True

    def run(self, values: Tensor) -> Tensor:
        return self.comms.sum_over_shards(values.clone(memory_format=torch.contiguous_format))

    def gradient(self, grad: Tensor, dtype: torch.dtype, literal: bool) -> Tensor:
        summed = SumToShards(self.comms, step=self.step)(grad)
        if literal:  # the sum was of the first replica's values
            return summed * (self.comms.replica == 0)
        return summed * (1 / self.comms.world)


@dataclasses.dataclass(frozen=True)
class ToShards(Collective):
    """Takes a rank's value for a shard's. back: the adjoint of that"""

    back: bool = False

    def run(self, values: Tensor) -> Tensor:
        return values * (self.comms.ranks if self.back else 1)

    def gradient(self, grad: Tensor, dtype: torch.dtype, literal: bool) -> Tensor:
        return ToShards(self.comms, self.back if literal else not self.back, step=self.step)(grad)
