"""A call of a block, taken apart: the weights that it visits, its tensors, and all else.

    block(weights..., tensors..., other arguments)  ->  outputs

A `HandleWeights` among the arguments marks the weights of a unit, or of one layer of a stack. These and tensors are
taken out, so that autograd sees flat tensors, and put back when the block runs: in a session (visit.py), or on the pure
path (pure.py). Then, what runs such calls one after the other: `VisitRunner`, a session or a recording.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.markers import BARE
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.split import Call
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.arguments import StepLoss, returned
from yafsdp_fn.runtime.memory import StateMemory, content
from yafsdp_fn.runtime.reductions import Mean
from yafsdp_fn.util.randomness import (
    LOSS,
    States,
    Unnumbered,
    VisitCounter,
    counting,
    drawing_from,
    generators,
    next_visit_seed,
    run_visit,
    seeded,
    states,
)
from yafsdp_fn.util.torch_private import transforms_active

# ---- The weights of a visit.


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class HandleWeights:
    """The weights of one visit to a handle.

    groups: of the handle; units: ids, one for each of them
    columns: shards by unit, which the pure path keeps here, for all layers of the handle
    """

    handle: Sharded
    groups: list[Group]
    columns: dict[int, Tensor]
    layer: int
    units: tuple[int, ...]

    def weights(self, by_unit: Mapping[int, Sequence[Tensor]]) -> Tree:
        """Builds the block's weights from the leaves of each unit. A pinned unit gives a slice, under autograd: its
        gradient is zero but at this layer, and the gradient slot adds up all visits."""
        entry = self.handle.context.entry
        if len(entry.groups) == 1 and not entry.groups[0].pinned:  # all that it usually is
            return entry.spec.unflatten(by_unit[self.units[0]])
        leaves: dict[str, Sequence[Tensor]] = {}
        for unit, group in zip(self.units, self.groups, strict=True):
            leaves[group.name] = group.of_layer(by_unit[unit], self.layer)
        return entry.unflatten(leaves)


def rows_of(handle: Sharded) -> list[HandleWeights]:
    """Returns the weights of each layer, for the visits of one scan; of one visit, if the handle is no stack."""
    groups, layers = handle.groups, handle.entry.length or 1
    by_group = [group.units * layers if group.pinned else group.units for group in groups]
    columns: dict[int, Tensor] = {}
    return [HandleWeights(handle, groups, columns, *of) for of in enumerate(zip(*by_group, strict=True))]


ARGUMENT: Any = object()
"""Marks the position of a tensor among the arguments, or the outputs, of a function."""


# ---- A call, as a function of tensors.


class TensorCall:
    """A call of a function as one of its tensors alone: arguments and outputs are taken apart, and put together again.

    tensors: those among the arguments; structure: of the outputs, known once it has run, or set instead
    seed: of the random numbers of every run; None: the default generators go on, and later runs draw as the first
    ranks: those that its collectives act over
    autocast: (device type, enabled, dtype) of the CPU and of the device when the call was made
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
        device: torch.device,
        seed: int | None,
        ranks: Any,
    ) -> None:
        self._function, self._spec = function, spec
        self._device, self.seed, self.ranks = device, seed, ranks
        # its arguments, taken apart
        self.tensors: list[Tensor] = []
        self._template: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.tensors.append(leaf)
                leaf = ARGUMENT
            self._template.append(leaf)
        self.structure: tuple[Any, list[Any]] = None, []
        # what a later run must find around it
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        enabled, dtypes = map(torch.is_autocast_enabled, kinds), map(torch.get_autocast_dtype, kinds)
        self.autocast = tuple(zip(kinds, enabled, dtypes, strict=True))
        # without a seed of its own, the number of what is inside, and the generators' states
        self._inside = next_visit_seed() if seed is None else None
        self._states: States | None = None

    def run(self, tensors: Sequence[Tensor], by_unit: Mapping[int, Sequence[Tensor]] | None = None) -> list[Tensor]:
        """Runs the function; returns its tensor outputs. by_unit: the leaves of the units of its rows"""
        # arguments, put together
        arguments = iter(tensors)
        args: list[Any] = []
        for leaf in self._template:
            if leaf is ARGUMENT:
                leaf = next(arguments)
            elif isinstance(leaf, HandleWeights):
                assert by_unit is not None
                leaf = leaf.weights(by_unit)
            args.append(leaf)
        leaves, spec = optree.tree_flatten(self._function(*self._spec.unflatten(args)))
        # outputs, taken apart
        outs: list[Tensor] = []
        template: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                outs.append(leaf)
                leaf = ARGUMENT
            template.append(leaf)
        self.structure = spec, template
        return outs

    def replay(self, tensors: Sequence[Tensor], by_unit: Mapping[int, Sequence[Tensor]] | None = None) -> list[Tensor]:
        """Runs the function as every time, in a backward or under a transform too: under the random numbers and the
        autocast of the call, over its ranks."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device):
                    # autocast would cache casts by leaf, which is the same tensor in the next step, with other values
                    stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype, cache_enabled=False))
            if self.seed is not None:
                return run_visit(self.seed, self._device, self.ranks, self.run, tensors, by_unit)
            if self._inside is None:
                stack.enter_context(counting(Unnumbered(self.ranks)))
            else:
                stack.enter_context(counting(VisitCounter(self._inside, 0, inside=True, ranks=self.ranks)))
            if self._states is None:  # 5 kB on the CPU, 16 bytes on a GPU
                self._states = states(generators(self._device))
            else:
                stack.enter_context(drawing_from(self._states))
            return self.run(tensors, by_unit)

    def outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Rebuilds the output, with `tensors` in place of its tensors."""
        spec, template = self.structure
        leaves, results = list(template), iter(tensors)
        for position, leaf in enumerate(template):
            if leaf is ARGUMENT:
                leaves[position] = next(results)
        return spec.unflatten(leaves)


class BlockCall(TensorCall):
    """A call of a block on sharded weights: rows, which stand for them, are among its arguments.

    first: this is the first visit of its scan or apply; signature: equal for calls that run the same code
    carries: the first argument is a scan's carry
    """

    def __init__(
        self,
        name: str,
        block: Callable[..., Any],
        args: Tree,
        *,
        first: bool,
        signature: Hashable = None,
        carries: bool = False,
    ) -> None:
        leaves, spec = optree.tree_flatten(args, namespace=BARE)
        self.name, self.block, self.first = name, block, first
        self._carries, self._code = carries, signature
        self.rows: list[HandleWeights] = []
        self.of_unit: dict[int, tuple[Group, HandleWeights]] = {}
        for leaf in leaves:
            if isinstance(leaf, HandleWeights):
                self.rows.append(leaf)
                for unit, group in zip(leaf.units, leaf.groups, strict=True):
                    known = self.of_unit.setdefault(unit, (group, leaf))[1].handle
                    # a unit has one number in all states, and in trees like them
                    if known is not leaf.handle and list(map(id, known.leaves)) != list(map(id, leaf.handle.leaves)):
                        raise errors.of_two_trees(name, group.name)
        self.units = tuple(self.of_unit)
        ranks = self.rows[0].handle.context.origin.owner.comms
        super().__init__(block, leaves, spec, ranks.device, next_visit_seed(), ranks)

    @property
    def carry_length(self) -> int:
        """The number of leading tensors that belong to a scan's carry."""
        count = self._spec.child(0).num_leaves if self._carries else 0
        return sum(leaf is ARGUMENT for leaf in self._template[:count])

    def run_on(self, weights: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the block on the leaves of each unit (in the order of `units`), as in every run of it."""
        return self.replay(tensors, dict(zip(self.units, weights, strict=True)))

    # ---- keys: calls that are alike

    @property
    def given(self) -> Hashable:
        """Shapes and dtypes of the tensor arguments."""
        return tuple([(x.shape, x.dtype) for x in self.tensors])

    @property
    def signature(self) -> Hashable:
        """A key, equal for calls of the same code with the same arguments, tensors and weights aside."""
        others = (leaf for leaf in self._template if leaf is not ARGUMENT and not isinstance(leaf, HandleWeights))
        return self._code, self._spec, tuple(map(repr, others))

    # ---- its path

    def runner(self) -> Any:
        """Returns the session or tracer that owns the leaves of all rows; None means the pure path."""
        runner = self.rows[0].handle.context.runner
        if runner is None:
            return None
        for row in self.rows:
            context = row.handle.context
            if context.runner is not runner:
                return None
            if runner.closed:
                raise RuntimeError(
                    f"{self.name}: these parameters were given to a step that is over; use the state's params"
                )
            for number, leaf in enumerate(row.handle.leaves, context.first_group):
                if leaf is not runner.leaves[number]:
                    return None
        return None if transforms_active() else runner


# ---- The visits of a loss under way, in a step or while a call is recorded.


class _Root(torch.autograd.Function):
    """Makes the first token. It depends on the leaves, so that a gradient with respect to them inside a loss reaches
    the visits, which refuse it; else it would silently leave them out."""

    @staticmethod
    def forward(ctx: Any, leaf_token: Tensor, *leaves: Tensor) -> Tensor:
        ctx.leaves = len(leaves)
        return leaf_token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.leaves


class VisitRunner:
    """The visits of a loss under way, one after the other: of a step (`Session`), or of a call that is recorded.

    number: of the step; differentiates: there is a backward; trains: weights of the state get gradients
    position: where this rank is, in words; leaves: by group, what the loss gets, rank's shards
    collectives: follows what blocks and the loss communicate (block_collectives.py); None without axes inside blocks
    running: the visit under way, while there is one
    compared: elements of each leaf whose bits are compared after a call, `content`
    """

    compared = 0

    def __init__(self, memory: StateMemory, number: int, *, differentiates: bool, trains: bool) -> None:
        self.memory, self.number, self.differentiates = memory, number, differentiates
        # where it is
        self.microbatch = 0
        self.visits: list[Visit] = []  # of the current microbatch
        self.closed = False
        self.differentiating = False  # the step's own backward is running
        self.position = f"before the first visit of step {number}"
        self.collectives: Any = None
        self._trained = frozenset(memory.trained if trains else ())
        self._failure: tuple[str, BaseException] | None = None
        self.running: Any = None
        # what the loss gets
        self.leaf_token = torch.zeros((), device=memory.comms.device, requires_grad=differentiates)
        self.token = self.leaf_token
        self.leaves: list[Tensor] = []
        for group, master in zip(memory.groups, memory.master.present, strict=True):
            self.leaves.append(master.detach().requires_grad_(trains and group.trainable))

    # ---- calls and visits

    def begin(self, call: Call) -> None:
        """Begins a call of the loss, or its backward."""
        self.microbatch = call.microbatch
        self.differentiating = call.kind != "forward"  # any other backward through a visit is refused
        if call.kind == "forward":
            self.visits = []
            self.token = _Root.apply(self.leaf_token, *self.leaves)  # type: ignore[no-untyped-call]
        if self.collectives is not None:
            self.collectives.begin_call(call)

    def call_loss(self, loss: StepLoss, microbatch: int, *, copied: bool = False) -> tuple[Mean, Tree]:
        """Calls the loss on a microbatch, under its random numbers. Returns its total, and aux. copied: on a copy of
        its part of the batch, which the loss may write to. Raises where it has written to leaves of the state."""
        comms, track = self.memory.comms, self.differentiates
        counter = loss.seed.counter(comms, microbatch)
        masters = self.memory.masters()
        before = content(masters, self.compared)
        with torch.set_grad_enabled(track), counting(counter), seeded(counter.seed_beside(LOSS), comms.device):
            called = returned(loss.arguments.call(microbatch, self, track, copied=copied), loss.has_aux)
        if content(masters, self.compared) != before:
            raise errors.leaf_written()
        held = [*masters, *self.leaves] if self.compared else []
        if any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in held):
            raise errors.leaf_hooked()
        return called

    def end(self) -> None:
        """Ends a call."""
        self.differentiating = False
        if self.collectives is not None:
            self.collectives.end_call()
        self.raise_failure()  # before anything is updated, where the loss went on after it

    def new_visit(self, call: BlockCall) -> Visit:
        """Begins a visit of this microbatch."""
        if self._failure or self.running:
            self._may_begin(call.name)
        trained = tuple(filter(self._trained.__contains__, call.units))
        self.visits.append(Visit(len(self.visits), call.name, call.units, trained))
        return self.visits[-1]

    def _may_begin(self, name: str) -> None:
        self.raise_failure()
        if self.running is not None:
            here = f"{name} (visit {len(self.visits)}, microbatch {self.microbatch}, step {self.number})"
            raise errors.nested_visit(here, self.position)

    def visit(self, call: BlockCall) -> Tree:
        """Runs a visit of the loss. Those without grad, in a step with a backward, are in no program."""
        counts = torch.is_grad_enabled() or not self.differentiates
        if not counts:
            self._may_begin(call.name)
        visit = self.new_visit(call) if counts else None
        try:
            outs = self.outputs_of(call, visit)
        except BaseException as error:
            self._failure = self.position, error
            raise
        return call.outputs(outs)

    def outputs_of(self, call: BlockCall, visit: Visit | None) -> Sequence[Tensor]:
        """Returns the outputs of a visit; None: of one without grad, which is in no program."""
        raise NotImplementedError

    # ---- errors

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise errors.after_failure(*self._failure) from self._failure[1]

    def rank_position(self) -> str:
        """Describes the position in the step, for the watchdog's thread."""
        return self.position

    def close(self) -> None:
        """Ends it, after success: its parameters are of no use any more."""
        self.closed = True
        self.token, self.collectives = self.leaf_token, None  # which hold this object, and so a session's slots

    def abort(self, error: BaseException) -> None:
        """Lets the streams run dry after an exception. If all ranks failed here, the state stays usable."""
        if self.closed:
            return
        VisitRunner.close(self)
        # cycles through the autograd graph and through a traceback, which the collector cannot see or sees late
        self._failure = self.running = None
        try:
            self.memory.comms.abort(self.position, error)
        finally:
            self.memory.board.clear()
