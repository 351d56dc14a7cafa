"""Traces a call on fake tensors: the visits, and what each costs, with nothing computed and nothing gathered.

A `Tracer` stands where a session would: visits reach it through the parameters. One body is run per signature (block,
layouts, argument shapes), so the cost of tracing a scan does not grow with its depth.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from yafsdp_fn.engine.block_call import BlockCall, movable
from yafsdp_fn.engine.placement import Placement
from yafsdp_fn.engine.steps import Arguments
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.schedules.measured import Argument, Value
from yafsdp_fn.schedules.trace import Trace, Visit, chained_order
from yafsdp_fn.torch_private import FAKE_HAS_NO_VALUE, memory_key
from yafsdp_fn.tracing.attention import AttentionRule
from yafsdp_fn.tracing.measuring import Measured, measure
from yafsdp_fn.tracing.origins import Beside, Made

COMPILES = ("torch._dynamo", "torch.nn.attention.flex_attention")


class Tracer:
    """A session that only looks.

    rule: attention's; beside: sees what the loss does between visits
    """

    closed = False

    def __init__(self, placement: Placement[Any], mode: FakeTensorMode, every: bool = False) -> None:
        self.placement, self.mode, self._every = placement.abstract(), mode, every
        self.untracked: list[str] = []  # visits without grad
        self._given: list[tuple[weakref.ref[Tensor], int, str]] = []  # arguments, their versions, of which visit
        self.visits: list[Visit] = []
        self.rule = AttentionRule()
        self.results: list[tuple[Any, list[Tensor]]] = []  # of visits with grad: structure, outputs
        self._outputs: list[Tensor] = []  # of visits, as the loss gets them
        with mode:
            shards = self.placement.shards(self.placement.comms.device)
        self.leaves = [x.requires_grad_(g.trainable) for g, x in zip(self.placement.groups, shards, strict=True)]
        self.beside = Beside(self.leaves)
        self._since = 0  # bytes beside visits when the last one ended
        self._values: dict[int, tuple[int, Tensor]] = {}  # memory: its number; held, so that it is not used again
        self._seen: dict[Any, Measured] = {}

    def visit(self, call: BlockCall) -> Tree:
        """Records a visit; visits without grad are not part of a program."""
        track = torch.is_grad_enabled()
        trained = tuple(unit for unit in call.units if track and self.placement.units[unit].trainable)
        shapes = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in call.tensors)
        layouts = tuple((call.of_unit[unit][0].layout, unit in trained) for unit in call.units)
        signature = (call.signature, shapes, layouts, track)
        self.beside.paused = True
        self._end_beside()
        if signature not in self._seen:
            self._seen[signature] = measure(call, trained, track, self.placement, self.rule)
        found = self._seen[signature]
        call.structure = found.call.structure
        fresh = [torch.empty_like(out).requires_grad_(track and out.requires_grad) for out in found.outs]
        if not track:
            self.untracked.append(call.name)
        if track or self._every:
            self._given += [(weakref.ref(x), x._version, call.name) for x in call.tensors]
            takes = [self._value(x, x) for x in call.tensors if self.beside.saw(x) or memory_key(x) in self._values]
            gives = [
                self._value(new, out if shared is None else call.tensors[shared])
                for new, out, shared in zip(fresh, found.outs, found.shares, strict=True)
            ]
            passed = {number for number in found.shares if number is not None}
            moved = [call.tensors[k] for k in movable(call.tensors[: call.carried], passed)]
            carries = dict.fromkeys(self._values[memory_key(x)][0] for x in moved if memory_key(x) in self._values)
            cost = found.cost._replace(takes=_once(takes), gives=_once(gives), carries=tuple(carries))
            cost = cost._replace(arguments=tuple(self._arguments(call.tensors)))
            for out in fresh:
                self.beside.comes_from(out, frozenset({len(self.visits)}))
            self.visits.append(Visit(len(self.visits), call.name, call.units, trained, cost))
            self.results.append((call.structure, fresh))
        self._outputs += fresh
        self.beside.ignore(fresh)
        self._since = self.beside.peak = self.beside.bytes
        self.beside.paused, self.beside.mark = False, len(self.visits)
        return call.outputs(fresh)

    def _arguments(self, tensors: Sequence[Tensor]) -> Iterator[Argument]:
        """Those that visits have made."""
        for place, x in enumerate(tensors):
            if made := self.beside.made(x):
                nbytes = x.numel() * x.element_size()
                grad_bytes, shape, dtype = nbytes * x.requires_grad, tuple(x.shape), str(x.dtype).removeprefix("torch.")
                yield Argument(place, self.beside.number(x), tuple(sorted(made)), nbytes, grad_bytes, shape, dtype)

    def _value(self, tensor: Tensor, memory: Tensor) -> Value:
        """`tensor` as what goes in or out; memory: whose it is in a real step."""
        if memory_key(tensor) not in self._values:
            number = self._values[memory_key(memory)][0] if memory_key(memory) in self._values else len(self._values)
            self._values[memory_key(tensor)] = number, memory  # with its graph, which a step would hold
        number, memory = self._values[memory_key(tensor)]
        grad = tensor.numel() * tensor.element_size() if tensor.requires_grad else 0
        return Value(number, memory.untyped_storage().nbytes(), grad)

    def _end_beside(self) -> None:
        """What the loss did since the last visit is over."""
        if self.visits:
            last = self.visits[-1]
            most = max(last.cost.beside_peak_bytes, self.beside.peak - self._since)
            self.visits[-1] = last._replace(cost=last.cost._replace(beside_peak_bytes=most))

    def reads_leaves(self, total: Tensor) -> bool:
        """Whether `total` depends on sharded leaves by another way than visits."""
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not total.requires_grad or not leaves:
            return False
        self.beside.paused = True  # no part of the step
        found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        self.beside.paused = False
        return any(grad is not None for grad in found)

    def rewritten(self) -> list[str]:
        """Visits of whose arguments one was written in place since."""
        alive = [(given(), version, name) for given, version, name in self._given]
        return [name for x, version, name in alive if x is not None and x._version != version]

    def finish(self, total: Tensor) -> tuple[Visit, ...]:
        """The visits, when the loss is known: its backward, up to the visits' outputs, is what comes after the last."""
        after = Counter[int]()
        for memory, nbytes, mark in self.beside.alive():
            if memory not in self._values:
                after[mark - 1] += nbytes
        wanted = [out for out in self._outputs if out.requires_grad]
        if total.requires_grad and wanted:
            torch.autograd.grad(total, wanted, allow_unused=True)
        self._end_beside()
        return tuple(v._replace(cost=v.cost._replace(beside_bytes=after[v.id])) for v in self.visits)


def trace_call(arguments: Arguments, placement: Placement[Any], mode: FakeTensorMode | None = None) -> Trace:
    """The trace of one call of a loss on `placement`. Raises RuntimeError where the loss needs the values of tensors.

    mode: the one that fake tensors among the arguments are of
    """
    return traced(arguments, placement, mode).trace


class Traced(NamedTuple):
    """results: structure and fake outputs of each visit; out: what the loss returned, its total, and by which visits
    each tensor of it was made

    untracked: visits without grad; reads_leaves: whether the loss reads sharded leaves beside its visits, asked where
    there are stages; rewritten: visits of whose arguments one was written in place later on
    """

    trace: Trace
    results: list[tuple[Any, list[Tensor]]]
    out: Any
    total: Tensor
    made: dict[int, Made]
    untracked: list[str]
    reads_leaves: bool
    rewritten: list[str]


def traced(
    arguments: Arguments, placement: Placement[Any], mode: FakeTensorMode | None = None, *, every: bool = False
) -> Traced:
    """The same with what a loss had at hand. every: visits without grad are part of it, as in an evaluation"""
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    tracer = Tracer(placement, mode, every)
    try:
        with mode, torch.enable_grad(), tracer.rule, tracer.beside, not_compiled():
            out = arguments.call(0, tracer, True)
            total = _total(out)
            made = {id(x): tracer.beside.made(x) for x in optree.tree_leaves(out) if isinstance(x, Tensor)}
            reads = placement.comms.stages > 1 and tracer.reads_leaves(total)
            visits = tracer.finish(total)
    except FAKE_HAS_NO_VALUE as error:
        advice = "run one step, then lower"
        if placement.comms.stages > 1:
            advice = "across stages each has the values of its own visits alone"
        raise RuntimeError(
            f"the loss depends on the values of tensors ({error}), which fake tensors do not have: {advice}"
        ) from error
    order = chained_order(visits, arguments.parts)
    whole = tracer.placement
    units, axes, names = whole.units, whole.mesh_axes, placement.precision.names
    loss_of = tuple(sorted(tracer.beside.made(total)))
    trace = Trace(units, visits, order, axes, arguments.parts, precision=names, loss_of=loss_of)
    return Traced(trace, tracer.results, out, total, made, tracer.untracked, reads, tracer.rewritten())


def not_compiled() -> AbstractContextManager[Any]:
    """Compiled functions run as they were written: a compiled one would show no operations, and refuses to."""
    compiled = not sys.modules.keys().isdisjoint(COMPILES)  # else there are none, and to import it takes seconds
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _once(values: Sequence[Value]) -> tuple[Value, ...]:
    """Each memory once, with the gradients of all views of it."""
    grads = Counter[tuple[int, int]]()
    for value in dict.fromkeys(values):
        grads[value[:2]] += value.grad_bytes
    return tuple(Value(*memory, grad) for memory, grad in grads.items())


def _total(out: Any) -> Tensor:
    """The tensor to differentiate, of what a loss returned, with or without aux."""
    while isinstance(out, Sequence) and out:
        out = out[0]
    return out if isinstance(out, Tensor) else torch.zeros(())
