"""One call of a block on sharded weights: the units it visits, and its arguments, taken apart."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import optree
from torch import Tensor

from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.runtime import errors
from yafsdp_fn.util.randomness import Replay, next_visit_seed
from yafsdp_fn.util.torch_private import transforms_active

# ---- A call of a block on sharded weights: the visited units, the arguments, and the path it takes.
#
#     block(weights..., tensors..., other arguments)  ->  outputs
#
# A `Row` among the arguments marks the weights of a unit, or of one layer of a stack. Rows and tensors are taken out,
# so that autograd sees flat tensors, and put back when the block runs.


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


class Row:
    """The weights of one visit to a handle. units: `(id, group)` pairs"""

    __slots__ = ("handle", "layer", "rows", "units")

    def __init__(self, rows: Rows, layer: int) -> None:
        self.rows, self.handle, self.layer = rows, rows.handle, layer
        self.units = [(group.units[0 if group.pinned else layer], group) for group in rows.groups]

    def shard(self, group: Group, n: int) -> Any:
        """Returns this rank's shard [n] of one of the row's groups, or uninitialised memory of its size if another
        stage has it."""
        place, column = 0 if group.pinned else self.layer, self.rows.columns[group.name]
        if place not in group.here:
            return self.handle.leaves[self.rows.groups.index(group)].new_empty(n)
        return column[group.here.index(place)]

    def weights(self, by_unit: Mapping[int, Sequence[Tensor]]) -> Tree:
        """Builds the block's weights from the leaves of each unit. A pinned unit gives a slice, under autograd: its
        gradient is zero but at this layer, and the gradient slot adds up all visits."""
        entry = self.handle.context.entry
        if len(entry.groups) == 1 and not entry.groups[0].pinned:  # all that it usually is
            return entry.spec.unflatten(by_unit[self.units[0][0]])
        return entry.unflatten({g.name: g.of_layer(by_unit[unit], self.layer) for unit, g in self.units})


def rows_of(handle: Sharded) -> list[Row]:
    """Returns the weights of each layer, for the visits of one scan; of one visit, if the handle is no stack."""
    rows = Rows(handle)
    return [Row(rows, layer) for layer in range(handle.entry.length or 1)]


class Argument:
    """Marks a tensor's position among the arguments."""


ARGUMENT: Any = Argument()


def split_tensors(leaves: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """Splits `leaves` into its tensors, and the leaves with a mark at each tensor's position."""
    tensors: list[Tensor] = []
    template: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            leaf = ARGUMENT
        template.append(leaf)
    return tensors, template


class TensorCall:
    """A call of a function as one of its tensors alone: arguments and outputs are taken apart, and put together again.

    tensors: those among the arguments; structure: of the outputs, known once it has run, or set instead
    """

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> None:
        self._function, self._spec = function, spec
        self.tensors, self._template = split_tensors(leaves)
        self.structure: tuple[Any, list[Any]] = None, []

    def run(self, tensors: Sequence[Tensor], by_unit: Mapping[int, Sequence[Tensor]] | None = None) -> list[Tensor]:
        """Runs the function; returns its tensor outputs. by_unit: the leaves of the units of its rows"""
        arguments = iter(tensors)
        args: list[Any] = []
        for leaf in self._template:
            if leaf is ARGUMENT:
                leaf = next(arguments)
            elif isinstance(leaf, Row):
                assert by_unit is not None
                leaf = leaf.weights(by_unit)
            args.append(leaf)
        leaves, spec = optree.tree_flatten(self._function(*self._spec.unflatten(args)))
        outs, template = split_tensors(leaves)
        self.structure = spec, template
        return outs

    def outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Rebuilds the output, with `tensors` in place of its tensors."""
        spec, template = self.structure
        results = iter(tensors)
        return spec.unflatten([next(results) if leaf is ARGUMENT else leaf for leaf in template])


class BlockCall(TensorCall):
    """A call of a block on sharded weights: rows, which stand for them, are among its arguments.

    first: this is the first visit of its scan or apply; signature: equal for calls that run the same code
    carries: the first argument is a scan's carry; replay: runs it under the random numbers and autocast of the call
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
        super().__init__(block, leaves, spec)
        self.name, self.block, self.first = name, block, first
        self._carries, self._code = carries, signature
        self.rows: list[Row] = []
        self.of_unit: dict[int, tuple[Group, Row]] = {}
        for leaf in leaves:
            if isinstance(leaf, Row):
                self.rows.append(leaf)
                for unit, group in leaf.units:
                    self.of_unit.setdefault(unit, (group, leaf))
        self.units = tuple(self.of_unit)
        self.seed = next_visit_seed()
        ranks = self.rows[0].handle.context.origin.owner.comms
        self.replay = Replay(ranks.device, self.seed, ranks)

    @property
    def carried(self) -> int:
        """The number of leading tensors that belong to a scan's carry."""
        count = self._spec.child(0).num_leaves if self._carries else 0
        return sum(leaf is ARGUMENT for leaf in self._template[:count])

    def run_on(self, weights: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the block on the leaves of each unit (in the order of `units`), as in every run of it."""
        return self.replay.run(self.run, tensors, dict(zip(self.units, weights, strict=True)))

    @property
    def given(self) -> Hashable:
        """Shapes and dtypes of the tensor arguments."""
        return tuple([(x.shape, x.dtype) for x in self.tensors])

    @property
    def source(self) -> Hashable:
        """The block's code object, equal even if each step makes the function anew; None if it is no function."""
        block = self._code[0] if isinstance(self._code, tuple) else self._code
        return getattr(block, "__code__", None)

    @property
    def signature(self) -> Hashable:
        """A key, equal for calls of the same code with the same arguments, tensors and weights aside."""
        others = tuple(repr(leaf) for leaf in self._template if leaf is not ARGUMENT and not isinstance(leaf, Row))
        return self._code, self._spec, others

    @property
    def code(self) -> tuple[Any, ...]:
        """The block and its arguments, without tensors and weights."""
        return self._code, *(leaf for leaf in self._template if leaf is not ARGUMENT and not isinstance(leaf, Row))

    @property
    def form(self) -> Hashable:
        """A key of how tensors and weights are passed to the block, and of its autocast."""
        rows = [
            (self.units.index(unit), row.handle.entry.spec, g.leaves, g.layout, row.layer if g.pinned else None)
            for row in self.rows
            for unit, g in row.units
        ]
        return self._spec, tuple(rows), self.replay.autocast

    def refuse_views(self, outs: Sequence[Tensor], storages: set[int]) -> None:
        """Raises if an output is a view of the weights, whose memory will hold other values."""
        for out in outs:
            address = address_of(out)
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


def address_of(tensor: Tensor) -> int:
    """Returns the address of the tensor's memory; 0 where it has none."""
    return tensor.untyped_storage().data_ptr()


def movable(tensors: Sequence[Tensor], passed: Collection[int]) -> list[int]:
    """Returns the indices of a visit's carries that an offload copies: those that are the whole of their storage, which
    a copy can free.

    passed: indices of carries that leave the visit in the same memory; every visit would copy them again
    """
    return [
        number
        for number, tensor in enumerate(tensors)
        if number not in passed and 0 < tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    ]
