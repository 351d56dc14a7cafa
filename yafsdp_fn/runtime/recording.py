"""Records a call of a loss, before its first step: which units it visits, in which order.

    forward of v:    ranks compare their positions; the block runs on the pure path, without grad
    its outputs:     copies, in the graph of the loss like those of a step

Blocks and losses may do everything that a step allows: read values, make tensors that Python caches. Costs are not
measured, and no backward runs. The loss may write to its batch, of which it has a copy. Other side effects happen once
more than it has steps.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from yafsdp_fn.params.tree import Tree, tensors_in
from yafsdp_fn.program.trace import Trace, Visit, chained_order
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.arguments import INDEPENDENT
from yafsdp_fn.runtime.block_call import BlockCall, VisitRunner
from yafsdp_fn.runtime.graph_walks import read_beside_visits
from yafsdp_fn.runtime.pure import SAME_VISITS, without_grad
from yafsdp_fn.runtime.recompute import RecomputedVisit, VisitNode
from yafsdp_fn.util.torch_private import function_mode, without_function_mode

# ---- A call before the first step.


class CallRecording(VisitRunner):
    """Runs a call of a loss in place of a session; knows the visits afterwards.

    differentiates: visits without grad are no part of the trace
    """

    watch = True

    def visit(self, call: BlockCall) -> Tree:
        """Runs a visit, outside of `LossWatch`: in that mode its block would be compiled once more."""
        with without_function_mode() if isinstance(function_mode(), LossWatch) else nullcontext():
            return super().visit(call)

    def outputs_of(self, call: BlockCall, visit: Visit | None) -> Sequence[Tensor]:
        if visit is None:
            return without_grad(self, call)
        arguments = call.tensors
        call.tensors = [x.detach() for x in arguments]  # as a block sees them in a step
        outs = [out.clone() for out in without_grad(self, call, visit)]
        if self.differentiates:
            # through which no backward goes
            self.token, *outs = VisitNode.apply(RecomputedVisit(self, call, visit), outs, (), self.token, *arguments)
        return outs

    def compare(self, total: Tensor, result: str, plain: Sequence[Tensor]) -> None:
        """Raises RanksDisagree, on every rank, where they have recorded different calls; ValueError for a loss that
        depends on nothing that is differentiated.

        total: of the loss; result: its outline; plain: the differentiated tensors that are not sharded
        """
        self.position = f"the end of the loss, recorded before step {self.number}"
        # does it depend on anything?
        read, visited, of_modules = read_beside_visits([total], [*self.leaves, *plain])
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


# ---- What a loss itself calls.


class LossWatch(TorchFunctionMode):
    """Raises where a tensor with a gradient is given to a collective of torch.distributed (an all-gather loses it, of
    which torch does not even warn), or to a GradScaler, which needs one of torch's optimizers to unscale it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            foreign = getattr(func, "__module__", "") == "torch.distributed.distributed_c10d"
            if foreign and any(tensor.requires_grad for tensor in tensors_in([args, kwargs])):
                raise errors.not_by_torch(func.__name__)
            # behind the modes of a trace, if there are any
            if "torch.amp.grad_scaler" in [sys._getframe(n).f_globals.get("__name__") for n in (1, 2, 3)]:
                raise RuntimeError(errors.SCALED)
        return func(*args, **(kwargs or {}))
