"""A visit: one block on the weights in its slots, and its backward.

    forward:   wait for the slots; run the block on views of them; keep its local graph, or only its arguments
    backward:  wait again; recompute if need be; gradients of the weights go to the gradient slots

Visits are chained by a token: each consumes the previous one's and returns one. Backward therefore runs in exactly the
reverse of the forward, every visit has one, and all ranks issue in one order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.runtime import pure
from yafsdp_fn.runtime.call import Call
from yafsdp_fn.runtime.closures import check_graph
from yafsdp_fn.runtime.destination import DESTINATION, Destination, destination
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
    session.token, *outs = _VisitFunction.apply(running, session.token, *call.tensors)  # type: ignore[no-untyped-call]
    return call.outputs(outs)


class _Running:
    """A visit of a running session, as its autograd node sees it."""

    def __init__(self, session: Session, call: Call, visit: Visit, microbatch: int) -> None:
        self.session, self.call, self.visit, self.microbatch = session, call, visit, microbatch
        self.local: LocalGraph | None = None
        self.done = False

    def run(self, op: Forward | Backward, tensors: list[Tensor], track: bool) -> LocalGraph:
        """Runs the block; with `track`, under a local graph of its own."""
        session = self.session
        # `.data`, not `detach`: a view with a version counter of its own, since slots are overwritten by design
        leaves = [
            [view.data.requires_grad_(track and unit in self.visit.trained) for view in views]
            for unit, views in zip(self.visit.units, session.engine.weights(op, self.visit.units), strict=True)
        ]
        for unit, views in zip(self.visit.units, leaves, strict=True):
            if track and unit in self.visit.trained:
                for leaf in views:
                    setattr(leaf, DESTINATION, Destination())
        with torch.set_grad_enabled(track), seeded(self.call.seed, session.store.comms.device):
            outs = self.call.run(leaves, tensors)
        if any(leaf._version for unit in leaves for leaf in unit):
            raise RuntimeError(f"{self.visit.name}: the block writes into its weights in place; work on a copy")
        if track and session.watch:
            check_graph(outs, [*tensors, *(leaf for unit in leaves for leaf in unit)], self.visit.name)
        return tensors, leaves, outs


def _forward_only(session: Session, call: Call, microbatch: int) -> list[Tensor]:
    running = _Running(session, call, session.record(call.name, call.units, ()), microbatch)
    with session.compute("forward", running.visit, microbatch) as op:
        _, _, outs = running.run(op, call.tensors, track=False)
        call.refuse_views(outs, session.slots.storages())
    return outs


class _VisitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: _Running, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        session = running.session
        with session.compute("forward", running.visit, running.microbatch) as op:
            assert isinstance(op, Forward)
            inputs = [tensor.detach().requires_grad_(op.keep and tensor.requires_grad) for tensor in tensors]
            versions = [tensor._version for tensor in tensors]
            local = running.run(op, inputs, track=op.keep)
            outs = local[2]
            _refuse_writes(running.visit.name, tensors, versions)
            running.call.refuse_views(outs, session.slots.storages())
        ctx.running = running
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(() if op.keep else tensors))
        running.call.tensors = []  # else every visit's arguments would live until the loss dies
        running.local = local if op.keep else None
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
            needs = ctx.needs_input_grad[2:]
            if local is None and not running.visit.trained and not any(needs):
                return None, None, *(None for _ in needs)  # nothing asks for a gradient: nothing to run again
            if local is None:
                detached = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needs, strict=True)]
                with running.call.replayed():
                    local = running.run(op, detached, track=True)
            input_grads = _differentiate(session, op, local, running.visit, grads)
        return None, None, *input_grads


def _differentiate(
    session: Session, op: Backward, local: LocalGraph, visit: Visit, grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Gradients of the arguments; those of the weights go to their gradient slots, straight or by a copy."""
    inputs, leaves, outs = local
    by_unit = dict(zip(visit.units, leaves, strict=True))
    weights: list[Tensor] = []
    for unit, (flat, views, add) in zip(visit.trained, session.engine.grad_views(op, visit.trained), strict=True):
        for start, stop in () if add else session.store.layout_of(unit).gaps(flat.numel()):
            flat[start:stop].zero_()
        for leaf, view in zip(by_unit[unit], views, strict=True):
            _destination(leaf).open(view, session.store.scratch, add=add)
            weights.append(leaf)
    wanted = [tensor for tensor in inputs if tensor.requires_grad] + weights
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
    fresh: list[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        roots, root_grads = zip(*pairs, strict=True)
        fresh = list(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))
    found = iter(fresh)
    input_grads = [next(found) if tensor.requires_grad else None for tensor in inputs]
    for leaf, grad in zip(weights, found, strict=True):
        _destination(leaf).close(grad)
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
