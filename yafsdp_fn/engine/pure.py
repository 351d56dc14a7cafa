"""The pure path: differentiable collectives and a rematerialisation that compose with all of torch.func.

    whole = all_gather(shard)            # backward: reduce-scatter, whose backward is all-gather again
    outs = remat(block)(whole, ...)      # only shards and arguments are saved

It is exact and not overlapped. Visits take it outside a session, under a transform, and on leaves that are not the
session's own (a `tree_map` of the parameters). Gradients are those of the mean over ranks.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.comm.differentiable import AllGather
from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.engine.block_call import BlockCall
from yafsdp_fn.engine.closures import Watch
from yafsdp_fn.engine.randomness import in_step
from yafsdp_fn.engine.rematerialise import Rematerialised, Replay
from yafsdp_fn.params.tree import Tree, shape_of
from yafsdp_fn.torch_private import forward_by_hand, recorded, transforms_active

RECORDED_IN_A_STEP = (
    "torch.func.linearize inside of a step or ya.grad: the parameters are constants in what it records, so that no "
    "gradient would come back through it. Use torch.func.jvp, once for each direction"
)


NOT_HERE = (
    "a derivative with respect to sharded parameters by torch.func, or by torch.autograd outside of a step, adds up "
    "what ranks have at the moment: on a deterministic mesh another number at another number of ranks. Use "
    "ya.value_and_grad or ya.train_step on a loss without such derivatives, or a mesh without deterministic"
)


ELSEWHERE = (
    "a derivative outside of a step: the weights of other stages are not here. Use ya.train_step, ya.value_and_grad or "
    "ya.eval_step, torch.no_grad() where no derivative is wanted, or a mesh without stages (ya.shard(state, mesh=...))"
)


def gathered(call: BlockCall, unit: int, shard: Tensor, *, step: bool) -> Tensor:
    """The whole flat vector of `unit` [padded numel] in its gather dtype, differentiable in `shard` [n]."""
    owner = call.of_unit[unit][1].handle.owner
    wire = owner.gather_dtype(unit)
    if owner.comms.alone:
        return shard.to(wire)
    precision = owner.precision
    how = wire, precision.reduce_dtype, precision.sum_dtype, step
    return AllGather.apply(owner.comms, shard, *how)  # type: ignore[no-untyped-call,no-any-return]


def visit(call: BlockCall) -> Tree:
    """Gathers, runs the block, and drops the gathered weights: backward gathers again."""
    if in_step() and recorded():
        raise RuntimeError(RECORDED_IN_A_STEP)
    transformed = transforms_active()
    tracked = torch.is_grad_enabled() or transformed
    if tracked and _comms(call).stages > 1:
        raise RuntimeError(f"{call.name}: {ELSEWHERE}")
    shards = _shards(call)
    if (transformed or (tracked and any(x.requires_grad for x in shards))) and _comms(call).deterministic:
        raise RuntimeError(f"{call.name}: {NOT_HERE}")
    step = in_step()  # here: the backward runs it again elsewhere
    replay = Replay(shards[0].device, call.seed)

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        weights = [
            call.of_unit[unit][0].layout.split(gathered(call, unit, shard, step=step))
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

    # the first visit runs unwrapped: under a transform that is where a closure can be seen. So do all under forward_ad
    # by hand, in which the wrapper's own jvp does not nest
    wrapped = tracked and not call.first and not forward_by_hand()
    outs = Rematerialised.apply(run, *shards, *call.tensors) if wrapped else run(*shards, *call.tensors)  # type: ignore[no-untyped-call]
    if not transformed:  # at world size 1 the weights are the shards themselves
        call.refuse_views(outs, {shard.untyped_storage().data_ptr() for shard in shards})
    return call.outputs(outs)


def _comms(call: BlockCall) -> Ranks:
    comms: Ranks = next(iter(call.of_unit.values()))[1].handle.owner.comms
    return comms


def _shards(call: BlockCall) -> list[Tensor]:
    """The local shard of each unit, checked: at other sizes a collective would not fail, but mix units up."""
    shards = []
    for unit, (group, row) in call.of_unit.items():
        comms = row.handle.check().owner.comms
        n, place = group.layout.shard_numel(comms.ranks), group.units.index(unit)
        shard = row.shard(group, n) if comms.stages == 1 else comms.from_stage(row.shard(group, n), group.home(place))
        if not isinstance(shard, Tensor) or tuple(shard.shape) != (n,):
            raise ValueError(f"{call.name}: a local shard of {group.name} is {shape_of(shard)}, expected shape ({n},)")
        shards.append(shard)
    return shards
