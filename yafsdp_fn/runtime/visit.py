"""A visit: one call of a block on the weights of its units, and its backward.

    block(weights..., tensors..., other arguments)  ->  outputs

Here are the call, taken apart, and what a session does with it (execute.py). Without a session a visit takes the pure
path (pure.py).
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.nn.linear import DESTINATION, AutogradRun, Destination, destination
from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.ops import Backward, Forward
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.graph_walks import check_graph
from yafsdp_fn.runtime.memory import GradSlot
from yafsdp_fn.util.randomness import (
    States,
    Unnumbered,
    VisitCounter,
    counting,
    drawing_from,
    generators,
    next_visit_seed,
    run_visit,
    states,
)
from yafsdp_fn.util.torch_private import SingleLevelFunction, foreach_copy, graph_task_id, transforms_active

# ---- A call of a block on sharded weights: the visited units, the arguments, and the path it takes.
#
# A `HandleWeights` among the arguments marks the weights of a unit, or of one layer of a stack. These and tensors are
# taken out, so that autograd sees flat tensors, and put back when the block runs.


# ---- the weights of a visit


class Rows:
    """The layers of a handle: the groups that they share and, on the pure path, their shards."""

    def __init__(self, handle: Sharded) -> None:
        self.handle = handle
        self.groups = [group for _, group, _ in handle.group_leaves()]

    @cached_property
    def columns(self) -> dict[str, tuple[Tensor, ...]]:
        """Local shards [n] by group and layer. Only the pure path uses them: a runner's own leaves are whole. They are
        split once: indexing a stack layer by layer has a quadratic backward."""
        self.check()
        entry, pairs = self.handle.entry, zip(self.groups, self.handle.leaves, strict=True)
        return {group.name: leaf.unbind() if entry.stacked(group) else (leaf,) for group, leaf in pairs}

    def check(self) -> None:
        """Raises ValueError if a leaf has not all layers that are here."""
        runner = self.handle.context.runner
        for number, group, leaf in self.handle.group_leaves():
            layers = len(group.here if runner is None else runner.leaves[number])
            if self.handle.entry.stacked(group) and (not isinstance(leaf, Tensor) or leaf.shape[:1] != (layers,)):
                raise errors.partial_stack(group.name, leaf, layers)


class HandleWeights:
    """The weights of one visit to a handle. units: ids, one for each group of its rows"""

    __slots__ = ("handle", "layer", "rows", "units")

    def __init__(self, rows: Rows, layer: int, units: tuple[int, ...]) -> None:
        self.rows, self.handle, self.layer, self.units = rows, rows.handle, layer, units

    def shard(self, group: Group, n: int) -> Any:
        """Returns this rank's shard [n] of one of the row's groups, or uninitialised memory of its size if another
        stage has it."""
        index = 0 if group.pinned else self.layer
        column = self.rows.columns[group.name]
        if index not in group.here:
            return self.handle.leaves[self.rows.groups.index(group)].new_empty(n)
        return column[group.here.index(index)]

    def weights(self, by_unit: Mapping[int, Sequence[Tensor]]) -> Tree:
        """Builds the block's weights from the leaves of each unit. A pinned unit gives a slice, under autograd: its
        gradient is zero but at this layer, and the gradient slot adds up all visits."""
        entry = self.handle.context.entry
        if len(entry.groups) == 1 and not entry.groups[0].pinned:  # all that it usually is
            return entry.spec.unflatten(by_unit[self.units[0]])
        pairs = zip(self.units, self.rows.groups, strict=True)
        return entry.unflatten({g.name: g.of_layer(by_unit[unit], self.layer) for unit, g in pairs})


def rows_of(handle: Sharded) -> list[HandleWeights]:
    """Returns the weights of each layer, for the visits of one scan; of one visit, if the handle is no stack."""
    rows, layers = Rows(handle), handle.entry.length or 1
    columns = [group.units * layers if group.pinned else group.units for group in rows.groups]
    return [HandleWeights(rows, layer, units) for layer, units in enumerate(zip(*columns, strict=True))]


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
        leaves, spec = optree.tree_flatten(args)
        self.name, self.block, self.first = name, block, first
        self._carries, self._code = carries, signature
        self.rows: list[HandleWeights] = []
        self.of_unit: dict[int, tuple[Group, HandleWeights]] = {}
        for leaf in leaves:
            if isinstance(leaf, HandleWeights):
                self.rows.append(leaf)
                for unit, group in zip(leaf.units, leaf.rows.groups, strict=True):
                    self.of_unit.setdefault(unit, (group, leaf))
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
        code, *others = self.code
        return code, self._spec, tuple(map(repr, others))

    @property
    def code(self) -> tuple[Any, ...]:
        """The block and its arguments, without tensors and weights."""
        others = (leaf for leaf in self._template if leaf is not ARGUMENT and not isinstance(leaf, HandleWeights))
        return self._code, *others

    @property
    def form(self) -> Hashable:
        """A key of how tensors and weights are passed to the block, and of its autocast."""
        rows = [
            (self.units.index(unit), row.handle.entry.spec, g.leaves, g.layout, row.layer if g.pinned else None)
            for row in self.rows
            for unit, g in zip(row.units, row.rows.groups, strict=True)
        ]
        return self._spec, tuple(rows), self.autocast

    # ---- checks

    def refuse_views(self, outs: Sequence[Tensor], storages: set[int]) -> None:
        """Raises if an output is a view of the weights, whose memory will hold other values."""
        for out in outs:
            address = out.untyped_storage().data_ptr()
            if address in storages and address and out.numel():  # 0: no memory, or a fake tensor
                raise errors.view_of_weights(self.name, out)

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


# ---- A visit in a session: one block on the weights in its slots, and its backward.
#
#     forward:   wait for the slots; run the block on views of them; keep its graph, or only its arguments
#     backward:  wait again; recompute if need be; write the weights' gradients to the gradient slots
#
# On plain tensors it is just `block(weights, *arguments)`, under autograd. Visits are chained by a token: each
# consumes the previous one's and returns one. So backward runs in exactly the reverse order of the forward, every
# visit has one, and all ranks issue in one order.
#
# A visit that keeps its graph is a part of the loss's graph, between two nodes that only pass on what they are given:
#
#     token, arguments --> _Open --> block on its weights --> _Close --> token, outputs
#
# Weights and arguments are outputs of _Open, so that its backward comes when all their gradients are there, and ends
# the visit's; the backward of _Close begins it. A visit that recomputes is one node (recompute.py).


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

    def check(self, leaves: list[list[Tensor]], inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Raises if the block has written to its weights; in a first step, also if tensors reach it from outside."""
        for unit_leaves in leaves:
            for leaf in unit_leaves:
                if leaf._version:
                    raise errors.weight_written(self.visit.name)
        if self.session.watch and torch.is_grad_enabled():
            known = [*inputs, *(leaf for unit_leaves in leaves for leaf in unit_leaves)]
            check_graph(outs, known, self.visit.name, lambda: self._once_more(leaves, inputs), self)

    def _once_more(self, leaves: list[list[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.session.collectives is not None:
            self.session.collectives.again("forward")
        return self.call.run_on(leaves, inputs)

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
        outs = self.call.run_on(leaves, inputs)
        self.check(leaves, inputs, outs)
        self.targets = grad_targets_of(own)
        self.call.refuse_views(outs, slots.storages)
        results: list[Tensor]
        session.token, *results = _Close.apply(self, token, *outs)
        return results


def offer(leaves: Sequence[Sequence[Tensor]], grad_slots: Sequence[GradSlot]) -> None:
    """Lets blocks write gradients of `leaves`, by unit, before their backward begins, in slots that are empty."""
    for unit_leaves, grad_slot in zip(leaves, grad_slots, strict=False):
        if not grad_slot.add:
            for leaf, view in zip(unit_leaves, grad_slot.views.leaves, strict=True):
                if (found := destination(leaf)) is not None:
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
        run = AutogradRun()
        run.number = graph_task_id()
        running.target.open(running.targets, run)
        return None, None, *grads
