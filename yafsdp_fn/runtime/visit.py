"""A visit: one block on the weights in its slots, and its backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.nn.linear import Later, Place, Task, close_all, destination, open_all
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.ops import Backward, ComputeOp, Forward
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors, pure
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.graph_walks import Asked, check_graph, depends_again
from yafsdp_fn.runtime.protocols import Outs
from yafsdp_fn.runtime.reductions import WEIGHT_DEPENDS
from yafsdp_fn.runtime.session import Session
from yafsdp_fn.util.torch_private import SingleLevelFunction

# ---- A visit: one block on the weights in its slots, and its backward.
#
#     forward:   wait for the slots; run the block on views of them; keep its local graph, or only its arguments
#     backward:  wait again; recompute if need be; write the weights' gradients to the gradient slots
#
# On plain tensors it is just `block(weights, *arguments)`, under autograd. Visits are chained by a token: each
# consumes the previous one's and returns one. So backward runs in exactly the reverse order of the forward, every
# visit has one, and all ranks issue in one order.

LocalGraph = tuple[Sequence[Tensor], list[list[Tensor]], list[Tensor]]
"""The ends of a kept graph: arguments, leaves of the weights per unit, outputs."""


def visit(call: BlockCall) -> Tree:
    """Runs `call` on the fast path inside a session on its own leaves, else on the pure path."""
    session = call.runner()
    if session is None:
        return pure.visit(call)
    if not isinstance(session, Session):  # a tracer
        return session.visit(call)
    segment, number = session.segment, len(session.visits)
    if segment is not None and segment.enter(call, number):
        session.new_visit(call.name, call.units)
        return segment.placeholders(call, number)
    if session.blocks is not None:
        session.blocks.saw(call.block)
    if torch.is_grad_enabled() and session.differentiates:
        running = _Running(session, call, session.new_visit(call.name, call.units))
        session.token, *outs = _VisitFunction.apply(running, session.token, *call.tensors)
    else:
        outs = _forward_only(session.for_no_grad(), call)
    out = call.outputs(outs)
    return out if segment is None else segment.checked(call, out, number)


class _Running:
    """A visit of a running session, as its autograd node sees it."""

    def __init__(self, session: Session, call: BlockCall, visit: Visit) -> None:
        self.session, self.call, self.visit, self.microbatch = session, call, visit, session.microbatch
        self.local: LocalGraph | None = None
        self.asked: Asked | None = None
        self.done = False

    def run(self, op: ComputeOp, tensors: Sequence[Tensor], track: bool, early: Sequence[Place] = ()) -> LocalGraph:
        """Runs the block; with `track`, under a local graph of its own.

        early: gradient slots of its trained units, if they may be written before its backward begins
        """
        session, visit = self.session, self.visit
        leaves = [
            session.slots.leaves(slot, unit, track and unit in visit.trained)
            for unit, slot in zip(visit.units, op.slots, strict=True)
        ]
        for unit, place in zip(visit.trained, early, strict=False):
            if not place.add:
                for leaf, view in zip(leaves[visit.units.index(unit)], place.views.leaves, strict=True):
                    if (found := destination(leaf)) is not None:
                        found.offer(view)
        with torch.set_grad_enabled(track):
            outs = self.call.run_on(leaves, tensors)
        for unit_leaves in leaves:
            for leaf in unit_leaves:
                if leaf._version:
                    raise errors.weight_written(visit.name)
        if track and session.watch:
            known = [*tensors, *(leaf for unit_leaves in leaves for leaf in unit_leaves)]
            check_graph(outs, known, visit.name, again=lambda: self._again(leaves, tensors))
        return tensors, leaves, outs

    def _again(self, leaves: list[list[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            return self.call.run_on(leaves, tensors)

    def outputs(self, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of the block, keeping nothing."""
        outs = self.run(op, tensors, track=False)[2]
        self.call.refuse_views(outs, self.session.slots.storages)
        return outs

    def gradients(
        self,
        op: Backward,
        places: Sequence[Place],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> Outs:
        """Runs the block again and differentiates it; returns the arguments' gradients, None for those that
        need none."""
        return _differentiate(places, self.again(op, tensors, needs, places), self.visit, grads)

    def again(
        self, op: Backward, tensors: Sequence[Tensor], needs: Sequence[bool], places: Sequence[Place] = ()
    ) -> LocalGraph:
        """Runs the block once more, for its graph."""
        inputs = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        local = self.run(op, inputs, track=True, early=places)
        if self.asked is not None and depends_again(self.asked, inputs, local[2]):
            raise ValueError(f"the loss: {WEIGHT_DEPENDS}")
        return local


def _forward_only(session: Session, call: BlockCall) -> list[Tensor]:
    running = _Running(session, call, session.new_visit(call.name, call.units))
    with session.compute("forward", running.visit, running.microbatch) as op:
        _, _, outs = running.run(op, call.tensors, track=False)
        call.refuse_views(outs, session.slots.storages)
    return outs


class _VisitFunction(SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, running: _Running, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        session, call = running.session, running.call
        with session.compute("forward", running.visit, running.microbatch) as op:
            assert isinstance(op, Forward)
            inputs = [tensor.detach().requires_grad_(op.keep and tensor.requires_grad) for tensor in tensors]
            versions = [tensor._version for tensor in tensors]
            if op.keep:
                early = session.interpreter.early_places(op, running.visit.trained) if op.early else ()
                running.local = running.run(op, inputs, track=True, early=early)
                outs = running.local[2]
                call.refuse_views(outs, session.slots.storages)
            else:
                replays = session.replays
                outs = running.outputs(op, inputs) if replays is None else replays.outputs(running, op, inputs)
            for tensor, before in zip(tensors, versions, strict=True):
                if tensor._version != before:
                    raise errors.argument_written(running.visit.name, tensor)
            saved: Sequence[Tensor] = () if op.keep else tensors
            if op.carry_slot is not None:
                saved = session.slots.carries.save(running.visit.id, op.carry_slot, tensors, call.carried, outs)
        ctx.running = running
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        call.tensors = []  # else every visit's arguments would live until the loss dies
        results, constants = [], []
        depends = bool(running.visit.trained) or any(ctx.needs_input_grad[2:])
        for out in outs:
            results.append(out.detach())
            smooth = out.is_floating_point() or out.is_complex()
            if not smooth or not (out.requires_grad if op.keep else depends):
                constants.append(results[-1])
        ctx.mark_non_differentiable(*constants)
        return token.detach(), *results

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        running: _Running = ctx.running
        session, name = running.session, running.visit.name
        if running.done:
            raise errors.second_backward(name)
        if not session.differentiating:
            raise errors.backward_inside(name)
        if torch.is_grad_enabled():
            raise errors.second_order(name)
        running.done = True
        # taken out first: a graph left on ctx keeps every visit's output alive until the loss dies
        (inputs, local), running.local = (ctx.saved_tensors, running.local), None
        with session.compute("backward", running.visit, running.microbatch) as op:
            assert isinstance(op, Backward)
            if op.carry_slot is not None:
                inputs = session.slots.carries.restore(running.visit.id, op.carry_slot, inputs)
            needs = ctx.needs_input_grad[2:]
            later = None
            if op.half == "inputs":  # the other half is found by the session, when its turn comes
                later = session.later_half(running.visit, running.microbatch)
            if local is None and not running.visit.trained and not any(needs):
                return None, None, *(None for _ in needs)  # nothing asks for a gradient: nothing to run again
            if later is not None:
                local = local or running.again(op, inputs, needs)
                return None, None, *_differentiate((), local, running.visit, grads, later)
            places, replays = session.interpreter.places(op, running.visit.trained), session.replays
            if local is not None:
                input_grads = _differentiate(places, local, running.visit, grads)
            elif replays is None:
                input_grads = running.gradients(op, places, inputs, needs, grads)
            else:
                input_grads = replays.gradients(running, op, places, inputs, needs, grads)
        return None, None, *input_grads


def _differentiate(
    places: Sequence[Place],
    local: LocalGraph,
    visit: Visit,
    grads: Sequence[Tensor | None],
    later: Later | None = None,
) -> Outs:
    """Returns gradients of the arguments; those of the weights go to their gradient slots, directly or by a copy.

    later: receives the weights' gradients instead; there are no places then
    """
    inputs, leaves, outs = local
    roots, root_grads = [], []
    for out, grad in zip(outs, grads, strict=True):
        if grad is not None and out.requires_grad:
            roots.append(out)
            root_grads.append(grad)
    trained = [leaves[visit.units.index(unit)] for unit in visit.trained]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    smooth = len(wanted)
    for unit_leaves in trained:
        wanted += unit_leaves
    task = Task(roots)
    if later is None:
        open_all(trained, places, task)
    else:
        later.open(trained, task)
    fresh: Outs = [None] * len(wanted)
    if roots and wanted:
        fresh = list(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))
    if later is None:
        close_all(trained, places, fresh[smooth:])
    else:
        later.close(fresh[smooth:])
    results = iter(fresh)
    return [next(results) if tensor.requires_grad else None for tensor in inputs]
