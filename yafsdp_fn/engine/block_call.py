"""One call of a block on sharded weights: what is visited, with which arguments, by which path.

    block(weights..., tensors..., other arguments)  ->  outputs

A `Row` stands among the arguments where the weights of a unit, or of one layer of a stack, belong. Rows and tensors
are taken out, so that autograd sees flat tensors, and put back when the block runs.
"""

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.engine import refusals
from yafsdp_fn.engine.randomness import next_visit_seed
from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.torch_private import transforms_active


class Rows:
    """The layers of a handle, for the visits of one scan."""

    def __init__(self, handle: Sharded) -> None:
        self.handle = handle
        self.groups = [group for _, group, _ in handle.group_leaves()]

    @cached_property
    def columns(self) -> dict[str, tuple[Tensor, ...]]:
        """Local shards [n] by group and layer. Only the pure path wants them; they are split once, since indexing a
        stack layer by layer has a quadratic backward."""
        entry, pairs = self.handle.entry, zip(self.groups, self.handle.leaves, strict=True)
        return {group.name: leaf.unbind() if entry.stacked(group) else (leaf,) for group, leaf in pairs}

    def __getitem__(self, layer: int) -> "Row":
        return Row(self, layer)


class Row:
    """The weights of one visit to a handle. units: `(id, group)` of each"""

    __slots__ = ("handle", "layer", "rows", "units")

    def __init__(self, rows: Rows, layer: int) -> None:
        self.rows, self.handle, self.layer = rows, rows.handle, layer
        self.units = [(group.units[0 if group.pinned else layer], group) for group in rows.groups]

    def shard(self, group: Group, n: int) -> Any:
        """This rank's shard [n] of one of the row's groups; where another stage has it, memory for that."""
        place, column = 0 if group.pinned else self.layer, self.rows.columns[group.name]
        if place not in group.here:
            return self.handle.leaves[self.rows.groups.index(group)].new_empty(n)
        return column[group.here.index(place)]

    def weights(self, by_unit: Mapping[int, Sequence[Tensor]]) -> Tree:
        """What the block sees, from the leaves of each unit. Of a pinned unit it is a slice, under autograd: gradients
        of the unit's leaves are zero but at this layer, and a gradient slot adds up those of all visits."""
        entry = self.handle.context.entry
        if len(entry.groups) == 1 and not entry.groups[0].pinned:  # all that it usually is
            return optree.tree_unflatten(entry.spec, by_unit[self.units[0][0]])
        return entry.unflatten({g.name: g.of_layer(by_unit[unit], self.layer) for unit, g in self.units})


class Argument:
    """Marks the place of a tensor among the arguments."""


ARGUMENT: Any = Argument()


def tensors_apart(leaves: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors among `leaves`, and the leaves with a mark in the place of each."""
    tensors: list[Tensor] = []
    template: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            leaf = ARGUMENT
        template.append(leaf)
    return tensors, template


class BlockCall:
    """A block with its arguments taken apart.

    first: whether it is the first visit of its scan or apply; signature: equal for calls that run the same code
    carries: whether the first argument is a scan's carry
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
        leaves, self._spec = optree.tree_flatten(args)
        self.name, self._block, self.first = name, block, first
        self.tensors, self._template = tensors_apart(leaves)
        self._carries, self._code = carries, signature
        self.rows: list[Row] = []
        self.of_unit: dict[int, tuple[Group, Row]] = {}
        for leaf in leaves:
            if isinstance(leaf, Row):
                self.rows.append(leaf)
                for unit, group in leaf.units:
                    self.of_unit.setdefault(unit, (group, leaf))
        self.units = tuple(self.of_unit)
        self._device: str = self.rows[0].handle.context.origin.owner.comms.device.type
        self._autocast = autocast_state(self._device)
        self._out_spec: optree.PyTreeSpec | None = None
        self._out_template: list[Any] = []
        self.seed = next_visit_seed()

    @property
    def carried(self) -> int:
        """How many of the tensors, the first ones, a scan's carry has."""
        count = self._spec.child(0).num_leaves if self._carries else 0
        return sum(leaf is ARGUMENT for leaf in self._template[:count])

    def run(self, weights: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the block on the leaves of each unit (in the order of `units`); returns its tensor outputs."""
        by_unit = dict(zip(self.units, weights, strict=True))
        arguments = iter(tensors)
        args: list[Any] = []
        for leaf in self._template:
            if leaf is ARGUMENT:
                args.append(next(arguments))
            elif isinstance(leaf, Row):
                args.append(leaf.weights(by_unit))
            else:
                args.append(leaf)
        out = self._block(*optree.tree_unflatten(self._spec, args))
        leaves, self._out_spec = optree.tree_flatten(out)
        outs, self._out_template = tensors_apart(leaves)
        return outs

    def outputs(self, tensors: Sequence[Tensor]) -> Tree:
        """The block's output, with `tensors` in place of its tensors."""
        assert self._out_spec is not None
        results = iter(tensors)
        leaves = [next(results) if leaf is ARGUMENT else leaf for leaf in self._out_template]
        return optree.tree_unflatten(self._out_spec, leaves)

    @property
    def signature(self) -> Hashable:
        """Equal for calls that run the same code on the same arguments, tensors and weights aside."""
        others = tuple(repr(leaf) for leaf in self._template if leaf is not ARGUMENT and not isinstance(leaf, Row))
        return self._code, self._spec, others

    @property
    def code(self) -> tuple[Any, ...]:
        """The block, and what it is given beside tensors and weights."""
        return self._code, *(leaf for leaf in self._template if leaf is not ARGUMENT and not isinstance(leaf, Row))

    @property
    def form(self) -> Hashable:
        """How tensors and weights are given to the block, and under which autocast."""
        rows = [
            (self.units.index(unit), row.handle.entry.spec, g.leaves, g.layout, row.layer if g.pinned else None)
            for row in self.rows
            for unit, g in row.units
        ]
        return self._spec, tuple(rows), self._autocast

    @property
    def structure(self) -> Any:
        """Of the outputs, once the block has run; set where it need not."""
        return self._out_spec, self._out_template

    @structure.setter
    def structure(self, of: Any) -> None:
        self._out_spec, self._out_template = of

    def refuse_views(self, outs: Sequence[Tensor], storages: set[int]) -> None:
        """Raises where an output is a view of the weights, whose memory will hold other values."""
        for out in outs:
            address = out.untyped_storage().data_ptr()
            if address in storages and address and out.numel():  # 0: no memory, or a fake tensor
                raise refusals.view_of_weights(self.name, out)

    def runner(self) -> Any:
        """The session, or tracer, whose own leaves all the rows are; None: the pure path."""
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

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Autocast as it was when the call was made, on or off: a backward runs under another."""
        with contextlib.ExitStack() as stack:
            for (device, enabled, dtype), current in zip(self._autocast, autocast_state(self._device), strict=True):
                if (device, enabled, dtype) != current:
                    stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
            yield


def movable(tensors: Sequence[Tensor], passed: Collection[int]) -> list[int]:
    """Which of a visit's carries an offload copies: those that are all of their memory, which would else stay.

    passed: those that come out of the visit in the same memory: every visit would copy it again
    """
    return [
        number
        for number, tensor in enumerate(tensors)
        if number not in passed and 0 < tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    ]


def autocast_state(device: str) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """(device type, on or off, dtype) of the autocast of this moment, of the CPU and of `device`."""
    cpu = "cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    if device == "cpu":
        return (cpu,)
    return cpu, (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
