"""The pure path: differentiable collectives and a rematerialisation that compose with all of torch.func."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual

from yafsdp_fn.communication.differentiable import AllGather
from yafsdp_fn.communication.formats import WHOLE, Encoded
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.nn.linear import DESTINATION, AutogradRun, Destination, destination
from yafsdp_fn.params.tree import Tree, shape_of
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.block_call import BlockCall, HandleWeights
from yafsdp_fn.runtime.graph_walks import OF_VISIT, TensorWatch
from yafsdp_fn.runtime.memory import ALL, address_of, content
from yafsdp_fn.runtime.recompute import differentiated
from yafsdp_fn.runtime.visit import refuse_views
from yafsdp_fn.util.randomness import in_step, ranks_around
from yafsdp_fn.util.torch_private import (
    forward_by_hand,
    forward_derivatives,
    memory_key,
    recorded,
    transforms_active,
)

# ---- Rematerialisation: a function of tensors that saves only its arguments, and runs again in the backward.
#
# outs = Rematerialised.apply(f, *tensors)            # composes with every transform of torch.func
#
# def f(*tensors):
#     return replay.run(block, *tensors)     # the same random numbers and autocast in every run

Flat = Callable[..., tuple[Tensor, ...]]


class Rematerialised(torch.autograd.Function):
    """Applies `f(*tensors) -> tuple of tensors`, saving only the arguments.

    A backward that is itself differentiated (torch.func, create_graph) is the gradient of a sum of products by
    `torch.func.grad`, which composes with every transform; `torch.func.vjp` and `torch.utils.checkpoint` do not. Any
    other backward uses plain autograd, without wrappers.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(f: Flat, *args: Tensor) -> tuple[Tensor, ...]:
        return f(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.f, *args = inputs
        ctx.of_ranks = True  # as a collective, which it may have inside
        ctx.save_for_backward(*args)
        ctx.save_for_forward(*args)
        ctx.set_materialize_grads(False)  # an argument that nobody differentiates has no tangent: a shard, say

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args = ctx.saved_tensors
        if not (torch.is_grad_enabled() or transforms_active()):
            return None, *_first_order(ctx.f, args, ctx.needs_input_grad[1:], grads)
        wanted = tuple(i for i, arg in enumerate(args) if is_smooth(arg))

        def against(*args: Tensor) -> Tensor:
            products: list[Tensor] = []
            for out, grad in zip(ctx.f(*args), grads, strict=True):
                if grad is not None:
                    products.append((out * grad.conj()).real.sum())
            return torch.stack([product.to(products[0].dtype) for product in products]).sum()

        found = dict(zip(wanted, torch.func.grad(against, argnums=wanted)(*args), strict=True))
        return None, *[found.get(i) for i in range(len(args))]

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        with forward_derivatives():
            duals: list[Tensor] = []
            for arg, along in zip(ctx.saved_tensors, tangents, strict=True):
                primal = _primal(arg)
                duals.append(primal if along is None else make_dual(primal, along))  # type: ignore[no-untyped-call]
            return tuple([_tangent(out) if is_smooth(out) else None for out in ctx.f(*duals)])

    @staticmethod
    def vmap(info: Any, dims: Any, f: Flat, *args: Tensor) -> Any:
        outs = Rematerialised.apply(torch.vmap(f, in_dims=dims[1:], randomness=info.randomness), *args)  # type: ignore[no-untyped-call]
        return outs, (0,) * len(outs)


# ---- forward mode


def is_smooth(tensor: Tensor) -> bool:
    """Returns whether `tensor` is differentiable: floating-point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def _primal(tensor: Tensor) -> Tensor:
    """Returns `tensor` without its tangent at this level of torch.func; tangents of outer levels stay."""
    return unpack_dual(tensor).primal if is_smooth(tensor) else tensor  # type: ignore[no-untyped-call]


def _tangent(out: Tensor) -> Tensor:
    """Returns the tangent of an output; zeros without one, such as of counts in floating point: torch takes no None."""
    primal, tangent = unpack_dual(out)  # type: ignore[no-untyped-call]
    return torch.zeros_like(primal) if tangent is None else tangent


# ---- reverse mode


def _first_order(
    f: Flat, args: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns gradients of the arguments that need one, by running `f` under a graph of its own. Gradients go straight
    to the destinations of weights that take one now; of leaves with a hook, which must see its gradient, to none."""
    inputs: list[Tensor] = []
    destinations: list[Destination] = []
    for arg, need in zip(args, needs, strict=True):
        leaf = arg.detach().requires_grad_(need)
        found = destination(arg)
        if found is not None and need and found.takes and found.later is None:
            setattr(leaf, DESTINATION, found)
            destinations.append(found)
        inputs.append(leaf)
    with torch.enable_grad():
        outs = f(*inputs)
    # their tasks, for this run alone
    run = AutogradRun()
    hooked = any(leaf._backward_hooks for leaf in inputs)
    before = [found.task for found in destinations]
    for found in destinations:
        found.task = None if hooked else run
    try:
        return differentiated(run, outs, grads, inputs)
    finally:
        for found, outer in zip(destinations, before, strict=True):
            found.task = outer


# ---- Visits.
#
#     whole = all_gather(shard)            # backward: reduce-scatter, whose backward is all-gather again
#     outs = remat(block)(whole, ...)      # only shards and arguments are saved
#
# It is exact and not overlapped. Visits take it outside a session, under a transform, and on leaves that are not the
# session's own (a `tree_map` of the parameters). Gradients are those of the mean over ranks.

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


NO_RANKS = (
    "a loss or function of its own on a mesh with axes inside blocks ({}): its collectives outside of visits would not "
    "know it. Call it by ya.functional_loss(f), ya.value_and_grad(f) or ya.eval_step(f), as torch.func.grad("
    "ya.functional_loss(f))"
)


def gathered(call: BlockCall, unit: int, shard: Tensor, *, step: bool) -> Tensor:
    """Gathers the whole flat vector of `unit` [padded numel] in its gather dtype, differentiable in `shard` [n]."""
    group, row = call.of_unit[unit]
    owner = row.handle.owner
    wire: Any = owner.gather_dtype(unit)
    if owner.comms.alone and group.wire == WHOLE:
        return shard.to(wire)
    back: Any = owner.wire_dtype(unit)
    wide = owner.sum_dtype(unit)
    if group.wire.gather is not None:
        wire = Encoded(group.wire.gather, shard.dtype, wire)
    if group.wire.reduce is not None:
        back = Encoded(group.wire.reduce, back, owner.precision.decoded_dtype)
    return AllGather(owner.comms.without(group.over), wire, back, wide, step=step)(shard)


LentWeights = dict[int, str]
"""Memory of weights, while it lives -> the visit that saw them."""


def visit(call: BlockCall) -> Tree:
    """Gathers, runs the block, and drops the gathered weights; backward gathers again."""
    return call.outputs(outputs(call))


def outputs(call: BlockCall, *, lent: LentWeights | None = None) -> Sequence[Tensor]:
    """Returns the tensors among the outputs of `visit`.

    lent: in a call that looks for mistakes, which compares the weights' bits, too (no version counts what is written by
        `.data`), and adds their memory to this
    """
    transformed = transforms_active()
    tracked = torch.is_grad_enabled() or transformed
    step = in_step()  # asked here: the backward runs `run` outside the step's context
    # derivatives that would be wrong, or lost, are refused
    if step and recorded():
        raise RuntimeError(RECORDED_IN_A_STEP)
    comms: Ranks = call.rows[0].handle.owner.comms
    if tracked:
        _check_derivatives(call, comms)
    if ranks_around() is None and comms.axes:
        raise RuntimeError(f"{call.name}: {NO_RANKS.format(', '.join(comms.axes))}")
    shards = _shards(call)
    if not tracked:
        shards = [shard.detach() for shard in shards]
    if comms.deterministic and (transformed or (tracked and any(x.requires_grad for x in shards))):
        raise RuntimeError(f"{call.name}: {NOT_HERE}")

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        weights: list[list[Tensor]] = []
        leaves: list[Tensor] = []
        for unit, shard in zip(call.units, flat[: len(shards)], strict=True):
            weights.append(call.of_unit[unit][0].layout.split(gathered(call, unit, shard, step=step)))
            leaves += weights[-1]
        args = flat[len(shards) :]
        # without a graph nothing else would notice a write
        watched = [] if tracked or torch.is_inference_mode_enabled() else leaves
        most = 0 if lent is None else ALL
        before = content(watched, most)
        watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if tracked and call.first:
            watch = TensorWatch([*leaves, *args], call.name)
        with watch:
            outs = call.run_on(weights, args)
        if before != content(watched, most):  # at world size 1 the weights are the shards themselves
            raise errors.weight_written(call.name)
        if lent is not None:
            memory = {memory_key(leaf): leaf.untyped_storage() for leaf in watched}
            # one that the block has let out is found in the graph of the loss, and without a graph by its memory
            for leaf in watched:
                setattr(leaf.requires_grad_(leaf.is_floating_point()), OF_VISIT, call.name)
            for key, storage in memory.items() if not comms.alone else ():
                lent[key] = call.name
                weakref.finalize(storage, lent.pop, key, None).atexit = False  # its number may be given again
        given = set(map(id, args))  # an argument must not be both saved and returned
        return tuple([out.view_as(out) if id(out) in given else out for out in outs])

    # the first visit runs unwrapped: under a transform that is where a closure can be seen. So do all under forward_ad
    # by hand, in which the wrapper's own jvp does not nest
    wrapped = tracked and not call.first and not forward_by_hand()
    outs = Rematerialised.apply(run, *shards, *call.tensors) if wrapped else run(*shards, *call.tensors)  # type: ignore[no-untyped-call]
    if not transformed:  # see above
        refuse_views(call.name, outs, set(map(address_of, shards)))
    found: Sequence[Tensor] = outs
    return found


def _check_derivatives(call: BlockCall, comms: Ranks) -> None:
    """Raises for weights of a step under way that a block closes over, and for weights that are on other stages."""
    for group, row in call.of_unit.values():
        handle = row.handle
        if group.trainable and not handle.owner.stepping.isdisjoint(map(id, handle.leaves)):
            raise errors.closed_over(call.name)
    if comms.stages > 1:
        for row in call.rows:
            _check_rows(row)  # the better error for a part of a stack
        raise RuntimeError(f"{call.name}: {ELSEWHERE}")


SAME_VISITS = "what to communicate (every rank must visit the same units in the same order)"


def without_grad(
    runner: Any, call: BlockCall, visit: Visit | None = None, lent: LentWeights | None = None
) -> Sequence[Tensor]:
    """Returns the outputs of a visit of a `VisitRunner` without grad. No program says what ranks communicate: they
    compare it first.

    visit: None where it is no part of a program; lent: see `outputs`
    """
    number, visit_id = "without grad", None
    if visit is not None:
        number = f"visit {visit.id}"
        visit_id = visit.id
    runner.position = f"forward of {call.name} ({number}, microbatch {runner.microbatch}, step {runner.number})"
    runner.running = call
    runner.memory.comms.must_agree(SAME_VISITS, {"op": runner.position}, runner.position)
    if runner.collectives is not None:
        runner.collectives.begin("forward", visit_id)
    with torch.no_grad():
        outs = outputs(call, lent=lent)
    if runner.collectives is not None:
        runner.collectives.end()
    runner.running = None
    runner.position = f"after {runner.position}"
    if runner.collectives is not None:
        runner.collectives.after("forward", visit_id)
    return outs


# ---- This rank's shards of the units of a visit.


def _shards(call: BlockCall) -> list[Tensor]:
    """Returns each unit's local shard, checked: a collective on other sizes would not fail, but mix units up."""
    shards: list[Tensor] = []
    for unit, (group, row) in call.of_unit.items():
        comms = row.handle.check().owner.comms
        n = group.shard_numel(comms)
        if not row.columns:
            row.columns.update(_columns(row))
        shard = row.columns.get(unit)
        if shard is None:  # another stage has it
            shard = row.handle.leaves[row.groups.index(group)].new_empty(n)
        if comms.stages > 1:
            shard = comms.from_stage(shard, group.home(group.units.index(unit)))
        if not isinstance(shard, Tensor) or tuple(shard.shape) != (n,):
            raise ValueError(f"{call.name}: a local shard of {group.name} is {shape_of(shard)}, expected shape ({n},)")
        shards.append(shard)
    return shards


def _columns(row: HandleWeights) -> dict[int, Tensor]:
    """Returns the local shards [n] of the units that are here, split once: indexing a stack layer by layer has a
    quadratic backward."""
    _check_rows(row)
    found: dict[int, Tensor] = {}
    for group, leaf in zip(row.groups, row.handle.leaves, strict=True):
        found.update(zip(group.held, leaf.unbind() if group.stacked else (leaf,), strict=False))
    return found


def _check_rows(row: HandleWeights) -> None:
    """Raises ValueError if a leaf has not all layers that are here."""
    handle = row.handle
    runner = row.handle.context.runner
    for number, group, leaf in handle.group_leaves():
        layers = len(group.here if runner is None else runner.leaves[number])
        if group.stacked and (not isinstance(leaf, Tensor) or leaf.shape[:1] != (layers,)):
            raise errors.partial_stack(group.name, leaf, layers)
