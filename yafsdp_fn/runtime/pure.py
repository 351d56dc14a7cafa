"""The pure path: differentiable collectives and a small rematerialisation that compose with all of torch.func.

    whole = all_gather(shard)            # backward: reduce-scatter, whose backward is all-gather again
    outs = remat(block)(whole, ...)      # only shards and arguments are saved

It is exact and not overlapped. Visits take it outside a session, under a transform, and on leaves that are not the
session's own (a `tree_map` of the parameters). Gradients are those of the sum over ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.comm.differentiable import AllGather
from yafsdp_fn.runtime.call import Call
from yafsdp_fn.runtime.closures import Watch
from yafsdp_fn.runtime.randomness import generators, seeded
from yafsdp_fn.tree import Tree, shape_of

Flat = Callable[..., tuple[Tensor, ...]]


class Remat(torch.autograd.Function):
    """`f(*tensors) -> tuple of tensors` that saves its arguments only.

    Its backward differentiates a sum of products with `torch.func.grad`, which composes with every transform;
    `torch.func.vjp` in its place, and `torch.utils.checkpoint`, do not.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(f: Flat, *args: Tensor) -> tuple[Tensor, ...]:
        return f(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.f, *args = inputs
        ctx.save_for_backward(*args)
        ctx.save_for_forward(*args)
        ctx.mark_non_differentiable(*[out for out in output if not out.is_floating_point()])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        args = ctx.saved_tensors
        wanted = tuple(i for i, arg in enumerate(args) if arg.is_floating_point())

        def against(*args: Tensor) -> Tensor:
            outs = ctx.f(*args)
            parts = [(o * g).sum() for o, g in zip(outs, grads, strict=True) if o.is_floating_point()]
            return torch.stack([part.to(parts[0].dtype) for part in parts]).sum()

        found = dict(zip(wanted, torch.func.grad(against, argnums=wanted)(*args), strict=True))
        return None, *[found.get(i) for i in range(len(args))]

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        args = ctx.saved_tensors
        moving = [i for i, arg in enumerate(args) if arg.is_floating_point()]

        def along(*values: Tensor) -> tuple[Tensor, ...]:
            filled = list(args)
            for i, value in zip(moving, values, strict=True):
                filled[i] = value
            return ctx.f(*filled)  # type: ignore[no-any-return]

        given = tuple(torch.zeros_like(args[i]) if tangents[i] is None else tangents[i] for i in moving)
        outs = torch.func.jvp(along, tuple(args[i] for i in moving), given)[1]
        return tuple(out if out.is_floating_point() else None for out in outs)

    @staticmethod
    def vmap(info: Any, dims: Any, f: Flat, *args: Tensor) -> Any:
        outs = Remat.apply(torch.vmap(f, in_dims=dims[1:], randomness=info.randomness), *args)  # type: ignore[no-untyped-call]
        return outs, (0,) * len(outs)


def gathered(call: Call, unit: int, shard: Tensor) -> Tensor:
    """The whole flat vector of `unit` [padded numel] in its gather dtype, differentiable in `shard` [n]."""
    store = call.of_unit[unit][1].handle.store
    wire = store.gather_dtype(unit)
    if store.comms.ranks == 1:
        return shard.to(wire)
    return AllGather.apply(store.comms, shard, wire, store.precision.reduce_dtype)  # type: ignore[no-untyped-call,no-any-return]


def visit(call: Call) -> Tree:
    """Gathers, runs the block, and drops the gathered weights: backward gathers again."""
    shards = _shards(call)
    transformed = torch._C._are_functorch_transforms_active()
    tracked = torch.is_grad_enabled() or transformed
    replay = _Replay(call, shards[0].device)

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        weights = [
            call.of_unit[unit][0].layout.split(gathered(call, unit, shard))
            for unit, shard in zip(call.units, flat[: len(shards)], strict=True)
        ]
        args = flat[len(shards) :]
        watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if tracked and call.first:
            watch = Watch([*(leaf for unit in weights for leaf in unit), *args], call.name)
        with replay.as_before(), watch:
            outs = call.run(weights, args)
        given = {id(arg) for arg in args}  # what passes through must not be saved and returned as one tensor
        return tuple(out.view_as(out) if id(out) in given else out for out in outs)

    # the first visit runs unwrapped: under a transform that is where a closure can be seen
    wrapped = tracked and not call.first
    outs = Remat.apply(run, *shards, *call.tensors) if wrapped else run(*shards, *call.tensors)  # type: ignore[no-untyped-call]
    if not transformed:  # at world size 1 the weights are the shards themselves
        call.refuse_views(outs, {shard.untyped_storage().data_ptr() for shard in shards})
    return call.outputs(outs)


def _shards(call: Call) -> list[Tensor]:
    """The local shard of each unit, checked: at other sizes a collective would not fail, but mix units up."""
    shards = []
    for group, row in call.of_unit.values():
        store = row.handle.check().store
        shard, n = row.shard(group), group.layout.shard_numel(store.comms.ranks)
        if not isinstance(shard, Tensor) or tuple(shard.shape) != (n,):
            raise ValueError(f"{call.name}: a local shard of {group.name} is {shape_of(shard)}, expected shape ({n},)")
        shards.append(shard)
    return shards


class _Replay:
    """Gives every run after the first the random numbers and the autocast of the first."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call, self._device = call, device
        self._states: list[Tensor] | None = None

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        if self._call.seed is not None:
            with self._call.replayed(), seeded(self._call.seed, self._device):
                yield
            return
        found = generators(self._device)
        now = [generator.get_state() for generator in found]
        if self._states is None:
            self._states = now
            yield
            return
        for generator, state in zip(found, self._states, strict=True):
            generator.set_state(state)
        try:
            with self._call.replayed():
                yield
        finally:
            for generator, state in zip(found, now, strict=True):
                generator.set_state(state)
