"""Traces a call on fake tensors: the visits, the cost of each, and which visits made what."""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from yafsdp_fn.communication.axes import ADJOINTS
from yafsdp_fn.communication.ranks import Ranks, absent_ranks
from yafsdp_fn.params.layout import TreeLayout
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.tree import Tree, tensors_in
from yafsdp_fn.program.measured import Value
from yafsdp_fn.program.split import Argument
from yafsdp_fn.program.trace import Between, Trace, Visit, chained_order
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.arguments import Arguments, pair_of
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.graph_walks import leaves_behind, saved_by
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.runtime.protocols import movable
from yafsdp_fn.tracing.attention import AttentionRule
from yafsdp_fn.tracing.body import BodyCosts, LiveBytes, Noted, measure, noting
from yafsdp_fn.util.mesh_axes import MeshAxes
from yafsdp_fn.util.randomness import acting_over
from yafsdp_fn.util.torch_private import asks_for_values, memory_key, mixes_traces, not_compiled

# ---- Records which visits each tensor of the loss was made of: these tensors travel when a step is cut into stages.
#
# x = scan(...)          made by the last visit
# y = x * 2 + table      the same: the table is made by none, and every stage has its own

Made = frozenset[int]
"""Visits; empty for tensors that every stage can make for itself."""

DRAW_BY_VALUE = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise"})
"""Operators that draw as many random numbers as the values of their arguments say."""


class Beside(LiveBytes):  # type: ignore[no-untyped-call]
    """Records the operations of the loss between visits: the memory that they take, and the origins of their
    results.

    by_value: those that draw as many random numbers as what a visit has made says
    kept: tensors of the loss's own, by their memory, to which what visits have made is written: running means, say
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__(known)
        self._made: Any = WeakIdKeyDictionary()  # memory -> visits: views and writes in place count alike
        self._numbers: Any = WeakIdKeyDictionary()  # tensor -> its number
        self._count = 0
        self.by_value: list[str] = []
        self.kept: dict[int, tuple[Tensor, Made]] = {}
        self._own: Any = WeakIdKeyDictionary()  # memory of a trace -> the tensor of the loss's own that it stands for

    def made(self, tensor: Tensor) -> Made:
        """Returns the visits whose outputs `tensor` was made of."""
        found: Made = self._made.get(tensor.untyped_storage(), frozenset())
        return found

    def number(self, tensor: Tensor) -> int:
        """Returns a number of `tensor`, its own."""
        found: int = self._numbers.setdefault(tensor, self._count)
        self._count = max(self._count, found + 1)
        return found

    def comes_from(self, tensor: Tensor, made: Made) -> None:
        self._made[tensor.untyped_storage()] = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.paused:
            return out
        given = tensors_in((args, kwargs))
        own = [x for x in given if not isinstance(x, FakeTensor)]
        returns = getattr(getattr(func, "_schema", None), "returns", ())
        if own and any(value.alias_info for value in returns):
            for x in tensors_in(out):
                self._own[x.untyped_storage()] = own[0]
        made = frozenset[int]().union(*map(self.made, given))
        if made:
            for x in tensors_in(out):
                self.comes_from(x, made | self.made(x))
                if (real := self._own.get(x.untyped_storage())) is not None:
                    self.kept[memory_key(real)] = real, self.made(x)
            name = func.overloadpacket.__name__
            if name.rstrip("_") in DRAW_BY_VALUE:
                self.by_value.append(name)
        return out


# ---- Traces a call on fake tensors: the visits and the cost of each, with nothing computed and nothing gathered.
#
# A `Tracer` takes the place of a session: visits reach it through the parameters. One body is run per signature
# (block, layouts, argument shapes), so the cost of tracing a scan does not grow with its depth.

# ---- a trace that is over


class EndedTrace(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode of a trace that is over. Its tensors have no values: where the loss or a block has kept one (in a cache,
    say), whatever uses it raises, in a step too."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = next(x for x in tensors_in((args, kwargs)) if isinstance(x, FakeTensor))
        raise RuntimeError(errors.kept_from_trace(f"a tensor of shape {tuple(kept.shape)} and {kept.dtype}"))


# ---- a trace under way


class TracedResult(NamedTuple):
    """The result of a visit, structure and fake tensors; and what it was given (`BlockCall`)."""

    structure: Any
    tensors: list[Tensor]
    given: Hashable


class Tracer:
    """A session that only records, and then what is known of the call.

    results: of each visit, without values, before the loss gets copies of its outputs; trace: of the call
    out: the loss's result; total: its total
    rule: attention's; beside: records the operations of the loss between visits
    untracked: visits without grad; read: leaves that the loss depends on beside its visits; reached: the gradient of
        the loss reaches visits
    """

    closed = False
    trace: Trace
    out: Any
    total: Tensor
    reached = True

    def __init__(self, placement: Placement[Any], mode: FakeTensorMode, every: bool) -> None:
        self.placement = placement.abstract()
        self.mode = mode
        self._every = every
        # visits
        self.visits: list[Visit] = []
        self.untracked: list[str] = []
        self.read: list[Tensor] = []
        self.rule = AttentionRule()
        self.results: list[TracedResult] = []
        self._seen: dict[Any, BodyCosts] = {}
        self._given: list[tuple[weakref.ref[Tensor], int, str]] = []  # arguments, their versions, of which visit
        self._held: list[Tensor] = []  # what is numbered by its memory, and must not be freed
        # what the loss gets, and does between visits
        with mode:
            shards = self.placement.shards(self.placement.comms.device)
        self.leaves = [x.requires_grad_(g.trainable) for g, x in zip(self.placement.groups, shards, strict=True)]
        self.beside = Beside(self.leaves)
        self._since = 0  # bytes beside visits when the last one ended
        self._peaks: Counter[int] = Counter()  # visit, -1 for before the first -> the most bytes after it
        # values: what goes into visits and comes out of them, by memory
        self._values: dict[int, tuple[int, Tensor]] = {}  # memory: its number, and what it stands for in a real step
        self._count = itertools.count()
        self._saved: list[set[int]] = []  # numbers: by the graph of each visit, and by the loss beside them
        self._saved_beside: set[int] = set()
        # collectives over axes inside blocks
        self.called: Noted = []  # by the loss since the last visit
        self.between: list[Between] = []

    def visit(self, call: BlockCall) -> Tree:
        """Records a visit; visits without grad are not part of a program."""
        self.beside.paused = True
        self._end_beside()
        self._end_between()
        track = torch.is_grad_enabled()
        trained = tuple(unit for unit in call.units if track and self.placement.units[unit].trainable)
        found = self._measured(call, trained, track)
        # outputs of its own
        call.structure = found.structure
        outs = [torch.empty_like(out).requires_grad_(track and out.requires_grad) for out in found.outs]
        fresh = [out.clone() for out in outs]  # the loss may write to these in place
        if not track:
            self.untracked.append(call.name)
        if track or self._every:
            self._record(call, found, trained, fresh)
            self.results.append(TracedResult(call.structure, outs, call.given))
        # outputs live as long as the loss keeps them
        for new, shared in zip(fresh, found.shares, strict=True):
            if shared is None:  # its memory may be used again
                self.beside.adopt(new)
                weakref.finalize(new.untyped_storage(), self._values.pop, memory_key(new), None).atexit = False
            else:
                self._held.append(new)
                self.beside.ignore([new])
        self._since = self.beside.peak = self.beside.bytes
        self.beside.paused, self.beside.mark = False, len(self.visits)
        return call.outputs(fresh)

    def _measured(self, call: BlockCall, trained: tuple[int, ...], track: bool) -> BodyCosts:
        """Returns the costs of a visit's body, which is run once for all visits alike."""
        shapes = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in call.tensors)
        layouts = tuple((call.of_unit[unit][0].layout, unit in trained) for unit in call.units)
        signature = (call.signature, shapes, layouts, track)
        if signature not in self._seen:
            self._seen[signature] = measure(call, trained, track, self.placement, self.rule)
        return self._seen[signature]

    def _record(self, call: BlockCall, found: BodyCosts, trained: tuple[int, ...], outs: Sequence[Tensor]) -> None:
        """Records a visit that returns `outs`: the memory that goes in and out, and what its graph keeps."""
        self._given += [(weakref.ref(x), x._version, call.name) for x in call.tensors]
        takes = []
        for x in call.tensors:
            if self.beside.saw(x) or memory_key(x) in self._values:
                takes.append(self._value(x, x))
        gives = []
        for out, own, shared in zip(outs, found.outs, found.shares, strict=True):
            gives.append(self._value(out, own if shared is None else call.tensors[shared]))
        # of the carry, what an offload would move
        carry = call.tensors[: call.carry_length]
        moved = [memory_key(carry[k]) for k in movable(carry, found.shares)]
        cost = found.cost._replace(
            takes=_once(takes),
            gives=_once(gives),
            carries=tuple(self._numbered(moved)),
            arguments=tuple(self._arguments(call.tensors)),
        )
        # what its graph keeps, and what is made of its outputs
        both = [*call.tensors, *outs]
        saved = [memory_key(both[at]) for at in found.saved]
        self._saved.append(set(self._numbered(saved)))
        self._saved_beside.update(self._numbered(saved_by(call.tensors)))
        self.read += leaves_behind(call.tensors)
        for out in outs:
            self.beside.comes_from(out, frozenset({len(self.visits)}))
        calls = found.collectives, found.adjoints
        self.visits.append(Visit(len(self.visits), call.name, call.units, trained, cost, *calls))

    # ---- what goes into visits, and what the loss does between them

    def _arguments(self, tensors: Sequence[Tensor]) -> Iterator[Argument]:
        """Yields the arguments that visits have made."""
        for place, x in enumerate(tensors):
            made = tuple(sorted(self.beside.made(x)))
            if made:
                dtype = str(x.dtype).removeprefix("torch.")
                grad_bytes = x.nbytes * x.requires_grad
                yield Argument(place, self.beside.number(x), made, x.nbytes, grad_bytes, tuple(x.shape), dtype)

    def _value(self, tensor: Tensor, memory: Tensor) -> Value:
        """The `Value` of `tensor`, an argument or output; memory: the tensor whose memory it has in a real step."""
        key = memory_key(tensor)
        origin = memory_key(memory)
        if key not in self._values:
            number = self._values[origin][0] if origin in self._values else next(self._count)
            self._values[key] = number, memory  # with its graph, which a step would hold
        number, memory = self._values[key]
        return Value(number, memory.untyped_storage().nbytes(), tensor.nbytes * tensor.requires_grad)

    def _end_beside(self) -> None:
        """Ends the operations of the loss since the last visit."""
        last = len(self.visits) - 1
        self._peaks[last] = max(self._peaks[last], self.beside.peak - self._since)

    def _end_between(self) -> None:
        """Ends the collectives of the loss since the last visit. Those of its backward are taken to be all that may
        come: a step has none for what its gradient does not reach."""
        if not self.called:
            return
        adjoints = []
        for call, has_backward in reversed(self.called):
            if has_backward:
                adjoints.append(call._replace(kind=ADJOINTS.get(call.kind, call.kind)))
        calls = tuple(call for call, _ in self.called)
        self.between.append(Between(len(self.visits) - 1, calls, tuple(adjoints)))
        self.called.clear()

    # ---- the end of the loss

    def end(self, out: Any, microbatches: int) -> None:
        """Ends the trace, once the loss has returned `out`: its backward, up to the visits' outputs, counts as
        operations after the last."""
        self._end_between()
        self.out = out
        self.total = total = _total(out)
        # memory that the loss still holds, by the visit after which it was made
        after = Counter[int]()
        for memory, nbytes, mark in self.beside.alive():
            if memory not in self._values:
                after[mark - 1] += nbytes
        self._saved_beside.update(self._numbered(saved_by([total])))
        self.read += leaves_behind([total])
        # the backward of what comes after the visits
        wanted = [out for result in self.results for out in result.tensors if out.requires_grad]
        if total.requires_grad and wanted:
            found = torch.autograd.grad(total, wanted, allow_unused=True)
            self.reached = any(grad is not None for grad in found)
        self._end_beside()
        visits = []
        for visit in self.visits:
            unsaved = self._unsaved(visit)
            peak = self._peaks[visit.id]
            cost = visit.cost._replace(beside_bytes=after[visit.id], beside_peak_bytes=peak, unsaved=unsaved)
            visits.append(visit._replace(cost=cost))
        self.trace = Trace(
            self.placement.units,
            tuple(visits),
            chained_order(visits, microbatches),
            self.placement.mesh_axes,
            microbatches,
            precision=self.placement.precision.names,
            loss_of=tuple(sorted(self.beside.made(total))) if self.reached else (),
            between=tuple(self.between),
        )

    def rewritten(self) -> list[str]:
        """Returns visits with an argument that was written in place afterwards."""
        alive = [(given(), version, name) for given, version, name in self._given]
        return [name for x, version, name in alive if x is not None and x._version != version]

    def _unsaved(self, visit: Visit) -> tuple[int, ...]:
        """Returns the numbers of values that neither the graph of a visit saves nor, of what it gives, the loss."""
        by_graph = self._saved[visit.id]
        by_any = by_graph | self._saved_beside
        takes = [value.number for value in visit.cost.takes]
        gives = [value.number for value in visit.cost.gives]
        unsaved = [number for number in takes if number not in by_graph]
        unsaved += [number for number in gives if number not in by_any]
        return tuple(dict.fromkeys(unsaved))

    def _numbered(self, memory: Iterable[int]) -> list[int]:
        """Returns the numbers of the memory that has one, each once, in its order."""
        numbers = [self._values[key][0] for key in memory if key in self._values]
        return list(dict.fromkeys(numbers))


# ---- a trace of one call


def traced(
    arguments: Arguments,
    placement: Placement[Any],
    mode: FakeTensorMode | None = None,
    *,
    every: bool = False,
    kept: Iterable[tuple[Tensor, Made]] = (),
) -> Tracer:
    """Traces one call of a loss on `placement`. Raises RuntimeError if the loss needs the values of tensors.

    mode: that of fake tensors among the arguments; every: visits without grad are part of it, as in an evaluation
    kept: tensors of the loss's own, and the visits of an earlier call that have written to them
    """
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    tracer = Tracer(placement, mode, every)
    for tensor, made in kept:
        tracer.beside.comes_from(tensor, made)
    try:
        with mode, torch.enable_grad(), tracer.rule, tracer.beside, not_compiled():
            with acting_over(tracer.placement.comms), noting(tracer.placement.comms) as tracer.called:
                out = arguments.call(0, tracer, True, copied=placement.comms.stages > 1)
            tracer.end(out, arguments.microbatches)
    except Exception as error:
        if mixes_traces(error):
            raise RuntimeError(errors.kept_from_trace("a tensor")) from error
        if not asks_for_values(error):
            raise
        if placement.comms.stages > 1:
            raise errors.value_on_other_stage("the loss", error) from error
        raise RuntimeError(
            f"the loss depends on the values of tensors ({error}), which fake tensors do not have: run one step, then "
            "lower; or do without them, in blocks too (torch.where in place of if)"
        ) from error
    finally:
        mode.__class__ = EndedTrace  # a subclass from the start would miss torch's rules for operators of higher order
    return tracer


def trace_abstract(
    fun: Callable[[Tree, Tree], Any],
    layout: TreeLayout,
    axes: MeshAxes,
    precision: Precision,
    batch: Tree,
    microbatches: int,
    has_aux: bool,
) -> tuple[Trace, Placement[Ranks]]:
    """Traces a call of `fun` on parameters of `layout` and a mesh of `axes`, neither of which need exist. Returns the
    trace, and the placement that it is of."""
    placement = Placement(layout, axes, precision, absent_ranks(axes, torch.device("cpu")))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = optree.tree_map(_fake, batch)

    def without_aux(params: Tree, batch: Tree) -> Any:
        return pair_of(fun(params, batch))[0]

    fun_alone = without_aux if has_aux else fun
    arguments = Arguments(fun_alone, (placement.meta_params(), fakes), {}, (0,), microbatches)
    return traced(arguments, placement, mode).trace, placement


def _fake(leaf: Any) -> Any:
    # with its strides: what is not contiguous is copied on its way
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _once(values: Sequence[Value]) -> tuple[Value, ...]:
    """Merges values by memory, adding the gradients of all its views."""
    grads = Counter[tuple[int, int]]()
    for value in dict.fromkeys(values):
        grads[value[:2]] += value.grad_bytes
    return tuple(Value(*memory, grad) for memory, grad in grads.items())


def _total(out: Any) -> Tensor:
    """Returns the tensor to differentiate from a loss's result, with or without aux."""
    while isinstance(out, Sequence) and out:
        out = out[0]
    return out if isinstance(out, Tensor) else torch.zeros(())
