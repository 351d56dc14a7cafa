"""Visits that keep no graph: forward of an evaluation, and of a visit whose block runs again for its backward.

    forward:   run the block without a graph; keep its arguments
    backward:  run it again, under the same random numbers and autocast; differentiate that

Such a visit is one node of the loss's graph, with a graph of its own while its backward runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.nn.linear import AutogradRun
from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.program.ops import Backward, ComputeOp, Forward
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.graph_walks import Asked, alike, depends_again, sample
from yafsdp_fn.runtime.reductions import WEIGHT_DEPENDS
from yafsdp_fn.runtime.shards import GradSlot
from yafsdp_fn.runtime.visit import Running, grad_targets_of, offer, passed_on, refuse_views
from yafsdp_fn.util.torch_private import SingleLevelFunction


class RecomputedVisit(Running):
    """A visit that recomputes. asked: whether its outputs depend on anything, which its next run is to tell"""

    asked: Asked | None = None
    _seen: list[Tensor] | None = None  # of the outputs, in a step that looks

    # ---- forward

    def outputs_in_graph(self, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        session = self.session
        saved = tensors
        with torch.no_grad():
            outs = self.outputs(op, [tensor.detach() for tensor in tensors])
            if op.carry_slot is not None:
                buffers = session.slots.activations
                length = self.call.carry_length
                saved = buffers.save(self.visit.id, op.carry_slot, tensors, length, outs)
        results: list[Tensor]
        session.token, *results = VisitNode.apply(self, outs, saved, session.token, *tensors)
        return results

    def run(
        self, op: ComputeOp, tensors: Sequence[Tensor], track: bool, early: Sequence[GradSlot] = ()
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Runs the block; with `track`, under a graph of its own. Returns the leaves of each unit, and the outputs.

        early: gradient slots of its trained units, if they may be written before its backward begins
        """
        session = self.session
        visit = self.visit
        leaves: list[list[Tensor]] = []
        for unit, slot in zip(visit.units, op.slots, strict=True):
            leaves.append(session.slots.leaves(slot, unit, track and unit in visit.trained))
        offer(self._trained(leaves), early)
        with torch.set_grad_enabled(track):
            outs = self.run_block(leaves, tensors)
        return leaves, outs

    def outputs(self, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of the block, keeping nothing."""
        _, outs = self.run(op, tensors, track=False)
        refuse_views(self.call.name, outs, self.session.slots.storages)
        if self.session.watch:
            self._seen = sample(outs)
            for leaf in self.call.structure[1]:
                if isinstance(within := getattr(leaf, "__dict__", None), dict) and tensors_in(within):
                    raise errors.hidden_outputs(self.visit.name, leaf)
        return outs

    # ---- backward

    def gradients(
        self, op: Backward, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Runs the block again and differentiates it; returns the arguments' gradients, None for those that
        need none. Those of the weights go to their gradient slots, directly or by a copy, or are left for later."""
        if op.carry_slot is not None:
            tensors = self.session.slots.activations.restore(self.visit.id, op.carry_slot, tensors)
        if not self.visit.trained and not any(needs):
            return [None] * len(needs)  # nothing asks for a gradient: nothing to run again
        # forward, for its graph
        inputs = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        calls = self.session.collectives
        if calls is not None:
            calls.again("forward")
        leaves, outs = self.run(op, inputs, track=True, early=self.target.grad_slots)
        if calls is not None:
            calls.end()
            calls.again("backward")
        if self._seen is not None and not alike(self._seen, sample(outs)):
            raise errors.other_outputs(self.visit.name)
        if self.asked is not None and depends_again(self.asked, inputs, outs):
            raise ValueError(f"the loss: {WEIGHT_DEPENDS}")
        # backward, of arguments and weights
        trained = self._trained(leaves)
        wanted = list(inputs)
        for unit_leaves in trained:
            wanted += unit_leaves
        run = AutogradRun()
        self.target.open(grad_targets_of(trained), run)
        found = differentiated(run, outs, grads, wanted)
        if run.number is not None:
            self.session.derived = True
        self.target.close(found[len(inputs) :])
        return found[: len(inputs)]

    def _trained(self, leaves: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        return [leaves[self.visit.units.index(unit)] for unit in self.visit.trained]


def differentiated(
    run: AutogradRun, outs: Sequence[Tensor], grads: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Differentiates, as `run`, the outputs that have a gradient; returns the gradients of `leaves`, None for those
    that need or get none."""
    roots: list[Tensor] = []
    root_grads: list[Tensor] = []
    for out, grad in zip(outs, grads, strict=True):
        if grad is not None and out.requires_grad:
            roots.append(out)
            root_grads.append(grad)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not roots or not wanted:
        return [None] * len(leaves)
    run.begins_with(roots)
    found = iter(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


# ---- Its autograd node.


class VisitNode(SingleLevelFunction):  # type: ignore[misc]
    """A visit that has run beside the graph of the loss, and keeps no graph; its backward runs the block again.

    saved: its arguments, or what is left of them where the carry goes to the host
    """

    @staticmethod
    def forward(
        ctx: Any,
        running: RecomputedVisit,
        outs: list[Tensor],
        saved: Sequence[Tensor],
        token: Tensor,
        *arguments: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.running = running
        ctx.save_for_backward(*saved)
        depends = bool(running.visit.trained) or any(ctx.needs_input_grad[4:])
        return tuple(passed_on(ctx, token, outs, depends))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        running: RecomputedVisit = ctx.running
        op = running.begin_backward()
        input_grads = running.gradients(op, ctx.saved_tensors, ctx.needs_input_grad[4:], grads)
        running.end_backward()
        return None, None, None, None, *input_grads
