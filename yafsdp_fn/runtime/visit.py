"""A visit in a session: one block on the weights in its slots, and its backward.

    forward:   wait for the slots; run the block on views of them; keep its graph, or only its arguments
    backward:  wait again; recompute if need be; write the weights' gradients to the gradient slots

On plain tensors it is just `block(weights, *arguments)`, under autograd. Visits are chained by a token: each consumes
the previous one's and returns one. So backward runs in exactly the reverse order of the forward, every visit has one,
and all ranks issue in one order.

A visit that keeps its graph is a part of the loss's graph, between two nodes that only pass on what they are given:

    token, arguments --> _Open --> block on its weights --> _Close --> token, outputs

Weights and arguments are outputs of _Open, so that its backward comes when all their gradients are there, and ends the
visit's; the backward of _Close begins it. A visit that recomputes is one node (recompute.py).
"""

import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.nn.linear import DESTINATION, AutogradRun, Destination, destination
from yafsdp_fn.program.ops import Backward, Forward
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.graph_walks import SAMPLES, check_graph
from yafsdp_fn.runtime.memory import content
from yafsdp_fn.runtime.shards import GradSlot
from yafsdp_fn.util.torch_private import SingleLevelFunction, foreach_copy, graph_task_id

# ---- Destinations of the weights' gradients (nn/linear.py), which a visit opens while its backward runs.

GradTarget = tuple[Destination, bool]
"""The destination of a leaf in a visit, and whether gradients go straight there: not where a hook is to see them."""

GradTargets = Sequence[Sequence[GradTarget | None]]
"""The targets of the leaves of each trained unit; None for those that have no destination."""


def grad_targets_of(leaves: Sequence[Sequence[Tensor]]) -> GradTargets:
    """Returns the targets of the leaves of each unit, once the block has run on them."""
    found: list[list[GradTarget | None]] = []
    for unit in leaves:
        here: list[GradTarget | None] = []
        for leaf in unit:
            to: Destination | None = getattr(leaf, DESTINATION, None)
            here.append(None if to is None else (to, not leaf._backward_hooks))
        found.append(here)
    return found


class ToSlots:
    """Takes the gradients of a visit to its gradient slots, where blocks write them, or autograd's are copied.

    grad_slots: the slots, by trained unit
    """

    def __init__(self, grad_slots: Sequence[GradSlot]) -> None:
        self.grad_slots = grad_slots
        self._targets: GradTargets = ()

    def open(self, targets: GradTargets, task: AutogradRun) -> None:
        """Opens the destinations of each unit's leaves on its slot, for writes in `task`."""
        self._targets = targets
        for unit, grad_slot in zip(targets, self.grad_slots, strict=True):
            if not grad_slot.add:
                for gap in grad_slot.views.gaps:
                    gap.zero_()
            for target, view in zip(unit, grad_slot.views.leaves, strict=True):
                if target is not None:
                    found, direct = target
                    found.view, found._early = view, None
                    found.task = task if direct else None
                    if found.state != "early":
                        found.state = "written" if grad_slot.add else "free"

    def close(self, grads: Sequence[Tensor | None]) -> None:
        """Closes the destinations, and adds gradients that came by autograd. grads: of all leaves, in order"""
        found_grads = iter(grads)
        # what is copied, in one call for all leaves
        views: list[Tensor] = []
        values: list[Tensor] = []
        for unit, grad_slot in zip(self._targets, self.grad_slots, strict=True):
            for target, view in zip(unit, grad_slot.views.leaves, strict=True):
                written, grad = grad_slot.add, next(found_grads)
                if target is not None:
                    found = target[0]
                    written = found.state == "written"
                    found.view, found.task, found.state = None, None, "free"
                if grad is None:
                    if not written:
                        view.zero_()
                elif written:
                    view.add_(grad)
                else:
                    views.append(view)
                    values.append(grad)
        if views:
            foreach_copy(views, values)


# ---- The visit, as its autograd nodes see it.


VERSION = operator.attrgetter("_version")


class Running:
    """A visit of a running session (execute.py), as its autograd nodes see it.

    target: takes the gradients of the weights while its backward runs: `ToSlots`, or what keeps them for the later half
    """

    def __init__(self, session: Any, call: BlockCall, visit: Visit) -> None:
        self.session, self.call, self.visit, self.microbatch = session, call, visit, session.microbatch
        self.target: Any = None
        self._done = False

    # ---- forward

    def forward(self, op: Any) -> list[Tensor]:
        """Runs the block, in a step with a backward; returns its outputs, in the graph of the loss."""
        call = self.call
        tensors, call.tensors = call.tensors, []  # else every visit's arguments would live until the loss dies
        versions = list(map(VERSION, tensors))
        outs = self.outputs_in_graph(op, tensors)
        for tensor, before in zip(tensors, versions, strict=True):
            if tensor._version != before:
                raise errors.argument_written(self.visit.name, tensor)
        return outs

    def outputs_in_graph(self, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of the block on `tensors`, in the graph of the loss."""
        raise NotImplementedError

    def run_block(self, leaves: list[list[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs the block; returns its outputs. Raises if it has written to its weights; where a step looks, also by
        `.data`, which no version counts, and if tensors reach it from outside."""
        watch = self.session.watch
        weights = list(itertools.chain.from_iterable(leaves))
        before = content(weights, SAMPLES) if watch else None
        outs = self.call.run_on(leaves, inputs)
        for leaf in weights:
            if leaf._version:
                raise errors.weight_written(self.visit.name)
        if watch:
            if content(weights, SAMPLES) != before:
                raise errors.weight_written(self.visit.name)
            if torch.is_grad_enabled():

                def once_more() -> list[Tensor]:
                    if self.session.collectives is not None:
                        self.session.collectives.again("forward")
                    return self.call.run_on(leaves, inputs)

                check_graph(outs, [*inputs, *weights], self.visit.name, once_more, self)
        return outs

    # ---- backward

    def begin_backward(self) -> Backward:
        """Begins the compute of the backward, and learns where gradients of the weights go. Raises where it is not the
        step's own, or comes twice."""
        session = self.session
        # is it the step's own?
        if self._done:
            raise errors.second_backward(self.visit.name)
        if not session.differentiating:
            raise errors.backward_inside(self.visit.name)
        if torch.is_grad_enabled():
            raise errors.second_order(self.visit.name)
        self._done = True
        op = session.begin_compute("backward", self.visit, self.microbatch)
        assert isinstance(op, Backward)
        self.target = session.target(op, self.visit)
        return op

    def end_backward(self) -> None:
        """Ends the compute of the backward."""
        self.target = None  # the graph may outlive what is left for later
        self.session.end_compute()


class KeptVisit(Running):
    """A visit that keeps its graph. targets: where the gradients of its weights go"""

    targets: GradTargets = ()

    def outputs_in_graph(self, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        session, visit = self.session, self.visit
        slots, trained = session.slots, visit.trained
        # leaves of the weights: trained ones are this visit's own
        leaves: list[list[Tensor]] = []
        own: list[list[Tensor]] = []
        weights: list[Tensor] = []
        for unit, slot in zip(visit.units, op.slots, strict=True):
            if unit not in trained:
                leaves.append(slots.leaves(slot, unit, False))
                continue
            fresh = list[Tensor]()
            for shared in slots.made_leaves.get((slot, unit, True)) or slots.leaves(slot, unit, True):
                leaf = shared.data  # not `detach`: see `weight_leaf`
                found: Destination | None = getattr(shared, DESTINATION, None)
                if found is not None:
                    setattr(leaf, DESTINATION, found)
                fresh.append(leaf)
            leaves.append(fresh)
            own.append(fresh)
            weights += fresh
        if op.early:
            offer(own, session.early_grad_slots(op, trained))
        # the block, between the two nodes
        token, *opened = _Open.apply(self, weights, session.token, *tensors)
        inputs = opened[: len(tensors)]
        outs = self.run_block(leaves, inputs)
        self.targets = grad_targets_of(own)
        refuse_views(self.call.name, outs, slots.storages)
        results: list[Tensor]
        session.token, *results = _Close.apply(self, token, *outs)
        return results


def refuse_views(name: str, outs: Sequence[Tensor], storages: Collection[int]) -> None:
    """Raises if an output of a block is a view of its weights, at `storages`, whose memory will hold other values."""
    for out in outs:
        address = out.untyped_storage().data_ptr()
        if address in storages and address and out.numel():  # 0: no memory, or a fake tensor
            raise errors.view_of_weights(name, out)


def offer(leaves: Sequence[Sequence[Tensor]], grad_slots: Sequence[GradSlot]) -> None:
    """Lets blocks write gradients of `leaves`, by unit, before their backward begins, in slots that are empty."""
    for unit_leaves, grad_slot in zip(leaves, grad_slots, strict=False):
        if not grad_slot.add:
            for leaf, view in zip(unit_leaves, grad_slot.views.leaves, strict=True):
                found = destination(leaf)
                if found is not None:
                    found.offer(view)


# ---- The autograd nodes of a visit that keeps its graph.


def passed_on(ctx: Any, token: Tensor, tensors: Sequence[Tensor], depends: bool | None = None) -> list[Tensor]:
    """Returns the token and tensors as the outputs of a node. Its backward gets None for those that the loss does not
    use.

    depends: whether they have gradients, as far as their dtype has; None: those that require grad
    """
    ctx.set_materialize_grads(False)
    outs = [token.detach()]
    constants: list[Tensor] = []
    for tensor in tensors:  # on the way of every visit: no further calls
        outs.append(tensor.detach())
        varies = tensor.requires_grad
        if depends is not None:
            varies = depends and (tensor.is_floating_point() or tensor.is_complex())
        if not varies:
            constants.append(outs[-1])
    ctx.mark_non_differentiable(*constants)
    return outs


class _Open(SingleLevelFunction):  # type: ignore[misc]
    """Passes on the token, arguments and weights of a visit that keeps its graph; its backward ends the visit's."""

    @staticmethod
    def forward(
        ctx: Any, running: KeptVisit, weights: list[Tensor], token: Tensor, *arguments: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.opens, ctx.arguments = running, len(arguments)
        return *passed_on(ctx, token, arguments), *weights

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        running: KeptVisit = ctx.opens
        running.target.close(grads[ctx.arguments :])
        running.end_backward()
        return None, None, None, *grads[: ctx.arguments]


class _Close(SingleLevelFunction):  # type: ignore[misc]
    """Passes on the token and outputs of a visit that keeps its graph; its backward begins the visit's."""

    @staticmethod
    def forward(ctx: Any, running: KeptVisit, token: Tensor, *outs: Tensor) -> tuple[Tensor, ...]:
        ctx.closes = running
        return tuple(passed_on(ctx, token, outs))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        running: KeptVisit = ctx.closes
        running.begin_backward()
        if running.session.watch and any(grad is not None for grad in grads):
            running.session.derived = True
        run = AutogradRun()
        run.number = graph_task_id()
        running.target.open(running.targets, run)
        return None, None, *grads
