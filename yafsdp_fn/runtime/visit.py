"""A visit: one block on the weights in its slots, and its backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.nn.linear import Later, Place, Task, Uses, close_all, destination, open_all, uses_of
from yafsdp_fn.program.ops import Backward, ComputeOp, Forward
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.graph_walks import Asked, check_graph, depends_again
from yafsdp_fn.runtime.protocols import Outs
from yafsdp_fn.runtime.reductions import WEIGHT_DEPENDS
from yafsdp_fn.util.torch_private import SingleLevelFunction

# ---- A visit: one block on the weights in its slots, and its backward.
#
#     forward:   wait for the slots; run the block on views of them; keep its graph, or only its arguments
#     backward:  wait again; recompute if need be; write the weights' gradients to the gradient slots
#
# On plain tensors it is just `block(weights, *arguments)`, under autograd. Visits are chained by a token: each
# consumes the previous one's and returns one. So backward runs in exactly the reverse order of the forward, every
# visit has one, and all ranks issue in one order.
#
# A visit that keeps its graph is a part of the loss's graph, between two nodes that only pass on what they are given:
#
#     token, arguments --> _Open --> block on its weights --> _Close --> token, outputs
#
# Weights and arguments are outputs of _Open, so that its backward comes when all their gradients are there, and ends
# the visit's; the backward of _Close begins it. A visit that recomputes is one node, with a graph of its own while its
# backward runs.

LocalGraph = tuple[Sequence[Tensor], list[list[Tensor]], list[Tensor]]
"""The ends of the graph of a recomputation: arguments, leaves of the weights per unit, outputs."""


class Running:
    """A visit of a running session (execute.py), as its autograd nodes see it.

    uses: where the gradients of a kept graph's weights go
    """

    def __init__(self, session: Any, call: BlockCall, visit: Visit) -> None:
        self.session, self.call, self.visit, self.microbatch = session, call, visit, session.microbatch
        self.asked: Asked | None = None
        self.uses: Uses = ()
        self._done = False
        self._places: Sequence[Place] = ()
        self._later: Later | None = None

    def forward(self) -> list[Tensor]:
        """Runs the block, and returns its outputs in the graph of the loss."""
        session, call = self.session, self.call
        with session.compute("forward", self.visit, self.microbatch) as op:
            assert isinstance(op, Forward)
            tensors, call.tensors = call.tensors, []  # else every visit's arguments would live until the loss dies
            versions = [tensor._version for tensor in tensors]
            outs = self._keep(op, tensors) if op.keep else self._recompute_later(op, tensors)
            for tensor, before in zip(tensors, versions, strict=True):
                if tensor._version != before:
                    raise errors.argument_written(self.visit.name, tensor)
        return outs

    def evaluated(self) -> list[Tensor]:
        """Runs the block in a step without a backward, and returns its outputs."""
        with self.session.compute("forward", self.visit, self.microbatch) as op:
            return self.outputs(op, self.call.tensors)

    def _keep(self, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        session, visit = self.session, self.visit
        slots, trained = session.slots, visit.trained
        leaves: list[list[Tensor]] = []
        own: list[list[Tensor]] = []
        weights: list[Tensor] = []
        for unit, slot in zip(visit.units, op.slots, strict=True):
            if unit in trained:
                leaves.append(slots.kept_leaves(slot, unit))
                own.append(leaves[-1])
                weights += leaves[-1]
            else:
                leaves.append(slots.leaves(slot, unit, False))
        if op.early:
            _offer(own, session.early_places(op, trained))
        token, *opened = _Open.apply(self, weights, session.token, *tensors)
        inputs = opened[: len(tensors)]
        outs = self.call.run_on(leaves, inputs)
        self._check(leaves, inputs, outs)
        self.uses = uses_of(own)
        self.call.refuse_views(outs, slots.storages)
        results: list[Tensor]
        session.token, *results = _Close.apply(self, token, *outs)
        return results

    def _recompute_later(self, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        results: list[Tensor]
        self.session.token, *results = _Recomputed.apply(self, op, self.session.token, *tensors)
        return results

    def _trained(self, leaves: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        return [leaves[self.visit.units.index(unit)] for unit in self.visit.trained]

    def _check(self, leaves: list[list[Tensor]], inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Raises if the block has written to its weights; in a first step, also if tensors reach it from outside."""
        for unit_leaves in leaves:
            for leaf in unit_leaves:
                if leaf._version:
                    raise errors.weight_written(self.visit.name)
        if self.session.watch and torch.is_grad_enabled():
            known = [*inputs, *(leaf for unit_leaves in leaves for leaf in unit_leaves)]
            check_graph(outs, known, self.visit.name, lambda: self._once_more(leaves, inputs), self)

    def _once_more(self, leaves: list[list[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.session.collectives is not None:
            self.session.collectives.again("forward")
        return self.call.run_on(leaves, inputs)

    # ---- without a graph until the backward

    def run(self, op: ComputeOp, tensors: Sequence[Tensor], track: bool, early: Sequence[Place] = ()) -> LocalGraph:
        """Runs the block; with `track`, under a graph of its own.

        early: gradient slots of its trained units, if they may be written before its backward begins
        """
        session, visit = self.session, self.visit
        leaves = [
            session.slots.leaves(slot, unit, track and unit in visit.trained)
            for unit, slot in zip(visit.units, op.slots, strict=True)
        ]
        _offer(self._trained(leaves), early)
        with torch.set_grad_enabled(track):
            outs = self.call.run_on(leaves, tensors)
            self._check(leaves, tensors, outs)
        return tensors, leaves, outs

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
        self._places = places
        return self._differentiate(self._again(op, tensors, needs), grads)

    def _again(self, op: Backward, tensors: Sequence[Tensor], needs: Sequence[bool]) -> LocalGraph:
        """Runs the block once more, for its graph."""
        inputs = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        calls = self.session.collectives
        if calls is not None:
            calls.again("forward")
        local = self.run(op, inputs, track=True, early=self._places)
        if calls is not None:
            calls.end()
            calls.again("backward")
        if self.asked is not None and depends_again(self.asked, inputs, local[2]):
            raise ValueError(f"the loss: {WEIGHT_DEPENDS}")
        return local

    def _differentiate(self, local: LocalGraph, grads: Sequence[Tensor | None]) -> Outs:
        """Returns gradients of the arguments; those of the weights go to their gradient slots, directly or by a copy,
        or are left for later."""
        inputs, leaves, outs = local
        roots, root_grads = [], []
        for out, grad in zip(outs, grads, strict=True):
            if grad is not None and out.requires_grad:
                roots.append(out)
                root_grads.append(grad)
        trained = self._trained(leaves)
        self.uses = uses_of(trained)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        smooth = len(wanted)
        for unit_leaves in trained:
            wanted += unit_leaves
        self.open(Task(roots))
        fresh: Outs = [None] * len(wanted)
        if roots and wanted:
            fresh = list(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))
        self.close(fresh[smooth:])
        results = iter(fresh)
        return [next(results) if tensor.requires_grad else None for tensor in inputs]

    # ---- backward

    def begin_backward(self) -> Backward:
        """Begins the compute of the backward, and finds where gradients of the weights go: to gradient slots, or to the
        other half, which the session has in its turn. Raises where it is not the step's own, or comes twice."""
        if self._done:
            raise errors.second_backward(self.visit.name)
        session = self.session
        if not session.differentiating:
            raise errors.backward_inside(self.visit.name)
        if torch.is_grad_enabled():
            raise errors.second_order(self.visit.name)
        self._done = True
        op = session.begin_compute("backward", self.visit, self.microbatch)
        assert isinstance(op, Backward)
        if op.half == "inputs":
            self._later = session.later_half(self.visit, self.microbatch)
        else:
            self._places = session.places(op, self.visit.trained)
        return op

    def recomputed(
        self, op: Backward, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> Outs:
        """Runs the whole backward of a visit that recomputes; returns the arguments' gradients."""
        if op.carry_slot is not None:
            tensors = self.session.slots.carries.restore(self.visit.id, op.carry_slot, tensors)
        if not self.visit.trained and not any(needs):
            return [None] * len(needs)  # nothing asks for a gradient: nothing to run again
        if self._later is not None:
            return self._differentiate(self._again(op, tensors, needs), grads)
        if (replays := self.session.replays) is not None:
            return replays.gradients(self, op, self._places, tensors, needs, grads)
        return self.gradients(op, self._places, tensors, needs, grads)

    def open(self, task: Task) -> None:
        """Opens the destinations of the weights' gradients, in the run of autograd `task`."""
        if self._later is not None:
            self._later.open(self.uses, task)
        else:
            open_all(self.uses, self._places, task)

    def close(self, fresh: Sequence[Tensor | None]) -> None:
        """Closes the destinations. fresh: autograd's gradients of the weights"""
        later, self._later = self._later, None  # the graph may outlive what is left for later
        if later is not None:
            later.close(fresh)
        else:
            close_all(self.uses, self._places, fresh)


def _offer(leaves: Sequence[Sequence[Tensor]], places: Sequence[Place]) -> None:
    """Lets blocks write gradients of `leaves`, by unit, before their backward begins, in slots that are empty."""
    for unit_leaves, place in zip(leaves, places, strict=False):
        if not place.add:
            for leaf, view in zip(unit_leaves, place.views.leaves, strict=True):
                if (found := destination(leaf)) is not None:
                    found.offer(view)


def _passed_on(ctx: Any, token: Tensor, tensors: Sequence[Tensor], smooth: Sequence[bool]) -> list[Tensor]:
    """Returns the token and tensors as the outputs of a node, of which those that are not smooth are constants. Its
    backward gets None for those that the loss does not use."""
    ctx.set_materialize_grads(False)
    outs, constants = [token.detach()], []
    for tensor, varies in zip(tensors, smooth, strict=True):  # on the way of every visit: no further calls
        outs.append(tensor.detach())
        if not varies:
            constants.append(outs[-1])
    ctx.mark_non_differentiable(*constants)
    return outs


class _Open(SingleLevelFunction):  # type: ignore[misc]
    """Passes on the token, arguments and weights of a visit that keeps its graph; its backward ends the visit's."""

    @staticmethod
    def forward(
        ctx: Any, running: Running, weights: list[Tensor], token: Tensor, *arguments: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.opens, ctx.arguments = running, len(arguments)
        return *_passed_on(ctx, token, arguments, [x.requires_grad for x in arguments]), *weights

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        running: Running = ctx.opens
        running.close(grads[ctx.arguments :])
        running.session.end_compute()
        return None, None, None, *grads[: ctx.arguments]


class _Close(SingleLevelFunction):  # type: ignore[misc]
    """Passes on the token and outputs of a visit that keeps its graph; its backward begins the visit's."""

    @staticmethod
    def forward(ctx: Any, running: Running, token: Tensor, *outs: Tensor) -> tuple[Tensor, ...]:
        ctx.closes = running
        return tuple(_passed_on(ctx, token, outs, [x.requires_grad for x in outs]))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        running: Running = ctx.closes
        running.begin_backward()
        running.open(Task((), now=True))
        return None, None, *grads


class _Recomputed(SingleLevelFunction):  # type: ignore[misc]
    """A visit that keeps no graph; its backward runs the block again."""

    @staticmethod
    def forward(ctx: Any, running: Running, op: Forward, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        session, call, replays = running.session, running.call, running.session.replays
        inputs = [tensor.detach() for tensor in tensors]
        outs = running.outputs(op, inputs) if replays is None else replays.outputs(running, op, inputs)
        saved: Sequence[Tensor] = tensors
        if op.carry_slot is not None:
            saved = session.slots.carries.save(running.visit.id, op.carry_slot, tensors, call.carried, outs)
        ctx.running = running
        ctx.save_for_backward(*saved)
        depends = bool(running.visit.trained) or any(ctx.needs_input_grad[3:])
        smooth = [depends and (out.is_floating_point() or out.is_complex()) for out in outs]
        return tuple(_passed_on(ctx, token, outs, smooth))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        running: Running = ctx.running
        op = running.begin_backward()
        input_grads = running.recomputed(op, ctx.saved_tensors, ctx.needs_input_grad[3:], grads)
        running.session.end_compute()
        return None, None, None, *input_grads
