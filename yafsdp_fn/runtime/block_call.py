"""A call of a block, taken apart: the weights that it visits, its tensors, and all else.

    block(weights..., tensors..., other arguments)  ->  outputs

A `HandleWeights` among the arguments marks the weights of a unit, or of one layer of a stack. These and tensors are
taken out, so that autograd sees flat tensors, and put back when the block runs: in a session (visit.py), or on the pure
path (pure.py).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree
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
from yafsdp_fn.util.torch_private import transforms_active

# ---- The weights of a visit.


class Rows:
    """The layers of a handle. groups: that they share; columns: their shards, which the pure path keeps here"""

    def __init__(self, handle: Sharded) -> None:
        self.handle = handle
        self.groups = [group for _, group, _ in handle.group_leaves()]
        self.columns: dict[str, tuple[Tensor, ...]] | None = None


class HandleWeights:
    """The weights of one visit to a handle. units: ids, one for each group of its rows"""

    __slots__ = ("handle", "layer", "rows", "units")

    def __init__(self, rows: Rows, layer: int, units: tuple[int, ...]) -> None:
        self.rows, self.handle, self.layer, self.units = rows, rows.handle, layer, units

    def weights(self, by_unit: Mapping[int, Sequence[Tensor]]) -> Tree:
        """Builds the block's weights from the leaves of each unit. A pinned unit gives a slice, under autograd: its
        gradient is zero but at this layer, and the gradient slot adds up all visits."""
        entry = self.handle.context.entry
        if len(entry.groups) == 1 and not entry.groups[0].pinned:  # all that it usually is
            return entry.spec.unflatten(by_unit[self.units[0]])
        leaves: dict[str, Sequence[Tensor]] = {}
        for unit, group in zip(self.units, self.rows.groups, strict=True):
            leaves[group.name] = group.of_layer(by_unit[unit], self.layer)
        return entry.unflatten(leaves)


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
