"""A visit: one block on the weights in its slots, and its backward.

    forward:   wait for the slots; run the block on views of them; keep its local graph, or only its arguments
    backward:  wait again; recompute if need be; gradients of the weights go to the gradient slots

Visits are chained by a token: each consumes the previous one's and returns one. Backward therefore runs in exactly the
reverse of the forward, every visit has one, and all ranks issue in one order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction  # see linear.py: no transform is active here

from yafsdp_fn.runtime import pure
from yafsdp_fn.runtime.call import Call
from yafsdp_fn.runtime.closures import check_graph
from yafsdp_fn.runtime.destination import Destination, Task, destination
from yafsdp_fn.runtime.engine import GradPlaces
from yafsdp_fn.runtime.graphs import Work
from yafsdp_fn.runtime.randomness import seeded
from yafsdp_fn.runtime.session import Session
from yafsdp_fn.runtime.tracing import Tracer
from yafsdp_fn.schedules.ops import Backward, Forward
from yafsdp_fn.schedules.trace import Visit
from yafsdp_fn.tree import Tree

LocalGraph = tuple[list[Tensor], list[list[Tensor]], list[Tensor]]
"""Arguments, leaves of the weights per unit, outputs: what a kept graph hangs on."""


def visit(call: Call) -> Tree:
    """Runs `call` on the fast path inside a session on its own leaves, else on the pure path."""
    session = call.session()
    if session is None:
        return pure.visit(call)
    if isinstance(session, Tracer):
        return session.visit(call)
    session.refuse_nesting(call.name)
    microbatch = call.rows[0].handle.context.microbatch
    if not torch.is_grad_enabled() or session.grads is None:
        return call.outputs(_forward_only(session.for_no_grad(), call, microbatch))
    trained = tuple(unit for unit in call.units if session.store.units[unit].trainable)
    running = _Running(session, call, session.record(call.name, call.units, trained), microbatch)
    session.token, *outs = _VisitFunction.apply(running, session.token, *call.tensors)  # type: ignore[attr-defined]
    return call.outputs(outs)


class _Running:
    """A visit of a running session, as its autograd node sees it."""

    def __init__(self, session: Session, call: Call, visit: Visit, microbatch: int) -> None:
        self.session, self.call, self.visit, self.microbatch = session, call, visit, microbatch
        self.local: LocalGraph | None = None
        self.done = False

    def run(
        self, op: Forward | Backward, tensors: list[Tensor], track: bool, places: GradPlaces | None = None
    ) -> LocalGraph:
        """Runs the block; with `track`, under a local graph of its own.

        places: where its weights' gradients go, if they may be written before its backward begins
        """
        session = self.session
        leaves = [
            session.slots.leaves(slot, unit, track and unit in self.visit.trained)
            for unit, slot in zip(self.visit.units, op.slots, strict=True)
        ]
        if places:
            by_unit = dict(zip(self.visit.units, leaves, strict=True))
            for unit, (_, views, add) in zip(self.visit.trained, places, strict=True):
                for leaf, view in () if add else zip(by_unit[unit], views, strict=True):
                    _destination(leaf).offer(view)
        with torch.set_grad_enabled(track), seeded(self.call.seed, session.store.comms.device):
            outs = self.call.run(leaves, tensors)
        if any(leaf._version for unit in leaves for leaf in unit):
            raise RuntimeError(f"{self.visit.name}: the block writes into its weights in place; work on a copy")
        if track and session.watch:
            check_graph(outs, [*tensors, *(leaf for unit in leaves for leaf in unit)], self.visit.name)
        return tensors, leaves, outs

    def forward(self, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the block, of which nothing is kept."""

        def work(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            outs = self.run(op, list(tensors), track=False)[2]
            self.call.refuse_views(outs, self.session.slots.storages())
            return [*outs]

        return [out for out in self._replay(op, "forward", (), work, tensors) if out is not None]

    def backward(
        self, op: Backward, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Runs the block again, and differentiates it: gradients of the arguments, None for those that need none."""
        places = self.session.engine.grad_views(op, self.visit.trained)
        given = [grad is not None for grad in grads]

        def work(both: Sequence[Tensor]) -> list[Tensor | None]:
            inputs = [x.detach().requires_grad_(need) for x, need in zip(both, needs, strict=False)]
            left = iter(both[len(inputs) :])
            with self.call.replayed():
                local = self.run(op, inputs, track=True, places=places)
            return _differentiate(self.session, places, local, self.visit, [next(left) if g else None for g in given])

        trained = tuple(unit in self.visit.trained for unit in self.visit.units)
        what = (tuple(needs), tuple(given), trained, tuple(add for _, _, add in places))
        both = [*tensors, *(grad for grad in grads if grad is not None)]
        return self._replay(op, what, [flat for flat, _, _ in places], work, both)

    def _replay(
        self, op: Forward | Backward, what: Hashable, grads: Sequence[Tensor], work: Work, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """`work(tensors)`, from a captured graph if the session has any. grads: the gradient slots it writes"""
        session = self.session
        if session.graphs is None:
            return work(tensors)
        memory = [session.slots.weight(slot, unit)[0] for slot, unit in zip(op.slots, self.visit.units, strict=True)]
        return session.graphs.run(self.call, what, (*memory, *grads), work, tensors, pure=isinstance(op, Forward))


def _forward_only(session: Session, call: Call, microbatch: int) -> list[Tensor]:
    running = _Running(session, call, session.record(call.name, call.units, ()), microbatch)
    with session.compute("forward", running.visit, microbatch) as op:
        _, _, outs = running.run(op, call.tensors, track=False)
        call.refuse_views(outs, session.slots.storages())
    return outs


class _VisitFunction(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, running: _Running, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        session = running.session
        with session.compute("forward", running.visit, running.microbatch) as op:
            assert isinstance(op, Forward)
            inputs = [tensor.detach().requires_grad_(op.keep and tensor.requires_grad) for tensor in tensors]
            versions = [tensor._version for tensor in tensors]
            if op.keep:
                running.local = running.run(op, inputs, track=True, places=session.engine.early)
                outs = running.local[2]
                running.call.refuse_views(outs, session.slots.storages())
            else:
                outs = running.forward(op, inputs)
            _refuse_writes(running.visit.name, tensors, versions)
            saved: Sequence[Tensor] = () if op.keep else tensors
            if op.carry_slot is not None:
                carries = session.slots.carries
                saved = carries.save(running.visit.id, op.carry_slot, tensors, running.call.carried, outs)
        ctx.running = running
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        running.call.tensors = []  # else every visit's arguments would live until the loss dies
        results = [out.detach() for out in outs]
        depends = bool(running.visit.trained) or any(tensor.requires_grad for tensor in tensors)
        ctx.mark_non_differentiable(
            *[
                result
                for result, out in zip(results, outs, strict=True)
                if not out.is_floating_point() or not (out.requires_grad if op.keep else depends)
            ]
        )
        return token.detach(), *results

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        running: _Running = ctx.running
        session, name = running.session, running.visit.name
        if running.done:
            raise RuntimeError(f"{name}: a second backward through a visit; its graph is gone after the first")
        if not session.differentiating:
            raise RuntimeError(
                f"{name}: a backward through a visit outside the step's own, as by torch.autograd.grad or .backward() "
                "inside the loss, would be added to the step's gradients; use torch.func.grad on a function of params"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(f"{name}: create_graph through a step; for second order use torch.func on the loss")
        running.done = True
        # taken out first: a graph left on ctx keeps every visit's output alive until the loss dies
        (inputs, local), running.local = (ctx.saved_tensors, running.local), None
        with session.compute("backward", running.visit, running.microbatch) as op:
            assert isinstance(op, Backward)
            if op.carry_slot is not None:
                inputs = session.slots.carries.restore(running.visit.id, op.carry_slot, inputs)
            needs = ctx.needs_input_grad[2:]
            if local is None and not running.visit.trained and not any(needs):
                return None, None, *(None for _ in needs)  # nothing asks for a gradient: nothing to run again
            if local is None:
                input_grads = running.backward(op, inputs, needs, grads)
            else:
                places = session.engine.grad_views(op, running.visit.trained)
                input_grads = _differentiate(session, places, local, running.visit, grads)
        return None, None, *input_grads


def _differentiate(
    session: Session, places: GradPlaces, local: LocalGraph, visit: Visit, grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the arguments; those of the weights go to their gradient slots, straight or by a copy.

    places: as `Engine.grad_views` gives them
    """
    inputs, leaves, outs = local
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
    task = Task([out for out, _ in pairs]) if places else None
    by_unit = dict(zip(visit.units, leaves, strict=True))
    weights: list[Tensor] = []
    destinations: list[Destination] = []
    for unit, (flat, views, add) in zip(visit.trained, places, strict=True):
        for start, stop in () if add else session.store.layout_of(unit).gaps(flat.numel()):
            flat[start:stop].zero_()
        for leaf, view in zip(by_unit[unit], views, strict=True):
            found = _destination(leaf)
            found.open(view, None if leaf._backward_hooks else task, add=add)  # a hook is to see the gradient
            weights.append(leaf)
            destinations.append(found)
    wanted = [tensor for tensor in inputs if tensor.requires_grad] + weights
    fresh: list[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        roots, root_grads = zip(*pairs, strict=True)
        fresh = list(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))
    results = iter(fresh)
    input_grads = [next(results) if tensor.requires_grad else None for tensor in inputs]
    for found, grad in zip(destinations, results, strict=True):
        found.close(grad)
    return input_grads


def _destination(leaf: Tensor) -> Destination:
    found = destination(leaf)
    assert found is not None  # every leaf of a trained unit has one
    return found


def _refuse_writes(name: str, tensors: tuple[Tensor, ...], versions: list[int]) -> None:
    for tensor, before in zip(tensors, versions, strict=True):
        if tensor._version != before:
            raise RuntimeError(
                f"{name}: the block writes into an argument of shape {tuple(tensor.shape)} in place; a recomputation "
                "would write again. Work on a copy, or run it under no_grad"
            )
