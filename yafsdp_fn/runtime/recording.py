"""Records a call of a loss, before its first step: which units it visits, in which order.

    forward of v:    ranks compare their positions; the block runs on the pure path, without grad
    its outputs:     copies, in the graph of the loss like those of a step

Blocks and losses may do everything that a step allows: read values, make tensors that Python caches. Costs are not
measured, and no backward runs. Side effects of a loss happen once more than it has steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.trace import Trace, Visit, chained_order
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.arguments import INDEPENDENT
from yafsdp_fn.runtime.execute import SAME_VISITS, VisitRunner
from yafsdp_fn.runtime.graph_walks import read_beside_visits
from yafsdp_fn.runtime.pure import is_smooth
from yafsdp_fn.runtime.visit import BlockCall
from yafsdp_fn.util.torch_private import SingleLevelFunction

# ---- A call before the first step.


class CallRecording(VisitRunner):
    """Runs a call of a loss in place of a session; knows the visits afterwards.

    differentiates: visits without grad are no part of the trace
    """

    def visit(self, call: BlockCall) -> Tree:
        """Runs a visit, and records it."""
        if self.differentiates and not torch.is_grad_enabled():
            return call.outputs(self.without_grad(call))
        visit, arguments = self.new_visit(call.name, call.units), call.tensors
        call.tensors = [x.detach() for x in arguments]  # as a block sees them in a step
        outs = [out.clone() for out in self.without_grad(call, visit)]
        if self.differentiates:
            self.token, *outs = _Passed.apply(visit, outs, self.token, *arguments)
        return call.outputs(outs)

    def compare(self, total: Tensor, result: str, plain: Sequence[Tensor]) -> None:
        """Raises RanksDisagree, on every rank, where they have recorded different calls; ValueError for a loss that
        depends on nothing that is differentiated.

        total: of the loss; result: its outline; plain: the differentiated tensors that are not sharded
        """
        self.position = f"the end of the loss, recorded before step {self.number}"
        # does it depend on anything?
        read, visited, of_modules = read_beside_visits(total, [*self.leaves, *plain])
        if self._trained and not read and not any(visit.trained for visit in self.visits):
            raise errors.nothing_visited()
        # ranks must have recorded the same
        found = {
            "op": self.position,
            "leaves read outside visits": str(read),
            "whether the loss depends on visits": str(visited),
            "what the function returns": result,
        }
        self.memory.comms.must_agree(SAME_VISITS, found, self.position)
        if self._trained and of_modules:
            raise errors.parameter_of_a_module(of_modules[0])
        if self._trained and not (read or visited):
            raise ValueError(INDEPENDENT)

    def trace(self, microbatches: int) -> Trace:
        """Returns the trace of a step whose microbatches are all like the recorded one."""
        visits = tuple(self.visits)
        order = chained_order(visits, microbatches, backward=self.differentiates)
        found = Trace(self.memory.units, visits, order, self.memory.mesh_axes, microbatches)
        return found if self.collectives is None else self.collectives.listed(found)


# ---- The graph of a recorded loss, without its blocks.


class _Passed(SingleLevelFunction):  # type: ignore[misc]
    """Passes on the token and outputs of a recorded visit, which depend on its arguments. No backward goes through."""

    @staticmethod
    def forward(
        ctx: Any, visit: Visit, outs: Sequence[Tensor], token: Tensor, *arguments: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.recorded = visit  # as graph_walks.py knows it
        depends = bool(visit.trained) or any(ctx.needs_input_grad[3:])
        ctx.mark_non_differentiable(*[out for out in outs if not (depends and is_smooth(out))])
        return token.detach(), *outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise errors.backward_inside(ctx.recorded.name)
