"""Records a call of a loss, before its first step: which units it visits, in which order.

    forward of v:    ranks compare their positions; the block runs on the pure path, without grad
    its outputs:     copies, in the graph of the loss like those of a step

Blocks and losses may do everything that a step allows: read values, make tensors that Python caches. Costs are not
measured, and no backward runs. The loss may write to its batch, of which it has a copy. Other side effects happen once
more than it has steps.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from yafsdp_fn.params.tree import Tree, tensors_in
from yafsdp_fn.program.split import Call
from yafsdp_fn.program.trace import Trace, Visit, chained_order
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.arguments import INDEPENDENT, StepLoss
from yafsdp_fn.runtime.block_call import BlockCall, VisitRunner
from yafsdp_fn.runtime.graph_walks import of_other_calls, read_as_shards, read_beside_visits
from yafsdp_fn.runtime.memory import ALL
from yafsdp_fn.runtime.pure import SAME_VISITS, LentWeights, without_grad
from yafsdp_fn.runtime.recompute import RecomputedVisit, VisitNode
from yafsdp_fn.util.torch_private import function_mode, memory_key, transforms_active, without_function_mode

# ---- A call before the first step.

FIRST = Call("forward", 0, 0)
"""The call that is recorded."""


class CallRecording(VisitRunner):
    """Runs a call of a loss in place of a session; knows the visits afterwards.

    differentiates: visits without grad are no part of the trace
    """

    compared = ALL

    def record(self, loss: StepLoss) -> Trace:
        """Calls the loss on the first microbatch; returns the trace of a step whose microbatches are all like it.
        Raises if it writes to leaves, or does what `LossWatch` refuses."""
        self.lent: LentWeights = {}
        self.begin(FIRST)
        with LossWatch(self.lent) as watch:
            mean, aux = self.call_loss(loss, 0, copied=True)
        self.end()
        watch.check([mean, aux])
        self._compare(mean.total, aux, loss.arguments.plain)
        visits = tuple(self.visits)
        microbatches = loss.arguments.microbatches
        order = chained_order(visits, microbatches, backward=self.differentiates)
        found = Trace(self.memory.units, visits, order, self.memory.mesh_axes, microbatches)
        return found if self.collectives is None else self.collectives.listed(found)

    def visit(self, call: BlockCall) -> Tree:
        """Runs a visit, outside of `LossWatch`: in that mode its block would be compiled once more. Where something
        keeps weights of an earlier visit, a block that may use them is watched."""
        unwatched = isinstance(function_mode(), LossWatch) and not self.lent
        with without_function_mode() if unwatched else nullcontext():
            return super().visit(call)

    def outputs_of(self, call: BlockCall, visit: Visit | None) -> Sequence[Tensor]:
        if visit is None:
            return without_grad(self, call)
        arguments = call.tensors
        call.tensors = [x.detach() for x in arguments]  # as a block sees them in a step
        outs = [out.clone() for out in without_grad(self, call, visit, self.lent)]
        if self.differentiates:
            # through which no backward goes
            self.token, *outs = VisitNode.apply(RecomputedVisit(self, call, visit), outs, (), self.token, *arguments)
        return outs

    def _compare(self, total: Tensor, aux: Tree, plain: Sequence[Tensor]) -> None:
        """Raises RanksDisagree, on every rank, where they have recorded different calls; ValueError for a loss that
        depends on nothing that is differentiated.

        total: of the loss; plain: the differentiated tensors that are not sharded
        """
        self.position = f"the end of the loss, recorded before step {self.number}"
        # does it depend on anything?
        read, visited, of_modules = read_beside_visits([total], [*self.leaves, *plain])
        if self._trained and not read and not any(visit.trained for visit in self.visits):
            raise errors.nothing_visited()
        # ranks must have recorded the same: reductions pack what is in aux together
        result = optree.tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, aux)
        found = {
            "op": self.position,
            "leaves read outside visits": str(read),
            "whether the loss depends on visits": str(visited),
            "what the function returns": str(result),
        }
        self.memory.comms.must_agree(SAME_VISITS, found, self.position)
        if self._trained and of_modules:
            raise errors.parameter_of_a_module(of_modules[0])
        if self._trained and not (read or visited):
            raise ValueError(INDEPENDENT)
        # shards of a unit that one rank has whole are all of it
        for number in read_as_shards([total], self.leaves):
            group = self.memory.groups[number]
            if any(self.memory.ranks_of[unit].ranks > 1 for unit in group.held):
                warnings.warn(errors.shards_added(group.name), stacklevel=2)
                break


# ---- What a loss depends on, and what it calls itself, where a step looks.


def check_origin(tensors: Sequence[Tensor], runner: VisitRunner) -> list[int]:
    """Raises for tensors of a loss that depend on what gets no gradient: parameters of modules, visits of earlier
    calls. Returns the indices of the leaves that they depend on beside visits."""
    read, _, of_modules = read_beside_visits(tensors, runner.leaves)
    if of_modules:
        raise errors.parameter_of_a_module(of_modules[0])
    if others := of_other_calls(tensors, runner):
        raise errors.of_an_earlier_call(others[0])
    return read


class LossWatch(TorchFunctionMode):
    """Raises where a tensor with a gradient is given to a collective of torch.distributed (an all-gather loses it, of
    which torch does not even warn), or to a GradScaler, which needs one of torch's optimizers to unscale it; and where
    weights are used after their visit. lent: their memory"""

    def __init__(self, lent: LentWeights) -> None:
        super().__init__()
        self.lent = lent

    def check(self, used: Tree) -> None:
        """Raises for weights, without a graph, that a block has let out: their memory holds others then."""
        for tensor in tensors_in(used) if self.lent else ():
            # those with a graph are found there
            detached = not tensor.requires_grad and tensor.layout == torch.strided
            if detached and (visit := self.lent.get(memory_key(tensor))):
                raise errors.used_after(visit, tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (torch.compiler.is_compiling() or transforms_active() or getattr(func, "__name__", "") == "__get__"):
            self.check([args, kwargs])
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            foreign = getattr(func, "__module__", "") == "torch.distributed.distributed_c10d"
            if foreign and any(tensor.requires_grad for tensor in tensors_in([args, kwargs])):
                raise errors.not_by_torch(func.__name__)
            # behind the modes of a trace, if there are any
            if "torch.amp.grad_scaler" in [sys._getframe(n).f_globals.get("__name__") for n in (1, 2, 3)]:
                raise RuntimeError(errors.SCALED)
        return func(*args, **(kwargs or {}))


@contextmanager
def foreign_collectives_refused() -> Iterator[None]:
    """Raises where a backward passes a collective of torch.distributed, unchanged, of which torch only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "c10d::.*an autograd kernel was not registered")
        try:
            yield
        except UserWarning as warned:
            raise errors.not_by_torch(str(warned).partition(": an")[0]) from warned
