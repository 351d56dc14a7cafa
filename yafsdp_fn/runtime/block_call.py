"""One call of a block on sharded weights: the units it visits, its arguments, and tensors that it closes over."""

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.runtime import errors
from yafsdp_fn.util.randomness import next_visit_seed
from yafsdp_fn.util.torch_private import is_transform_wrapper, transforms_active

# ---- A call of a block on sharded weights: the visited units, the arguments, and the path it takes.
#
#     block(weights..., tensors..., other arguments)  ->  outputs
#
# A `Row` among the arguments marks the weights of a unit, or of one layer of a stack. Rows and tensors are taken out,
# so that autograd sees flat tensors, and put back when the block runs.


class Rows:
    """The layers of a handle, for the visits of one scan."""

    def __init__(self, handle: Sharded) -> None:
        self.handle = handle
        self.groups = [group for _, group, _ in handle.group_leaves()]
        runner = handle.context.runner
        for number, group, leaf in handle.group_leaves():
            layers = len(group.here if runner is None else runner.leaves[number])
            if handle.entry.stacked(group) and (not isinstance(leaf, Tensor) or leaf.shape[:1] != (layers,)):
                raise errors.partial_stack(group.name, leaf, layers)

    @cached_property
    def columns(self) -> dict[str, tuple[Tensor, ...]]:
        """Local shards [n] by group and layer. Only the pure path uses them. They are split once: indexing a stack
        layer by layer has a quadratic backward."""
        entry, pairs = self.handle.entry, zip(self.groups, self.handle.leaves, strict=True)
        return {group.name: leaf.unbind() if entry.stacked(group) else (leaf,) for group, leaf in pairs}

    def __getitem__(self, layer: int) -> "Row":
        return Row(self, layer)


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
            return optree.tree_unflatten(entry.spec, by_unit[self.units[0][0]])
        return entry.unflatten({g.name: g.of_layer(by_unit[unit], self.layer) for unit, g in self.units})


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


class BlockCall:
    """A block with its arguments taken apart.

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
        leaves, self._spec = optree.tree_flatten(args)
        self.name, self.block, self.first = name, block, first
        self.tensors, self._template = split_tensors(leaves)
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
        """The number of leading tensors that belong to a scan's carry."""
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
        out = self.block(*optree.tree_unflatten(self._spec, args))
        leaves, self._out_spec = optree.tree_flatten(out)
        outs, self._out_template = split_tensors(leaves)
        return outs

    def outputs(self, tensors: Sequence[Tensor]) -> Tree:
        """Rebuilds the block's output, with `tensors` in place of its tensors."""
        assert self._out_spec is not None
        results = iter(tensors)
        leaves = [next(results) if leaf is ARGUMENT else leaf for leaf in self._out_template]
        return optree.tree_unflatten(self._out_spec, leaves)

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
        return self._spec, tuple(rows), self._autocast

    @property
    def structure(self) -> Any:
        """The structure of the outputs, known once the block has run; may be set instead."""
        return self._out_spec, self._out_template

    @structure.setter
    def structure(self, of: Any) -> None:
        self._out_spec, self._out_template = of

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

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Restores the autocast state of the call, on or off: a backward runs under another."""
        with contextlib.ExitStack() as stack:
            for (device, enabled, dtype), current in zip(self._autocast, autocast_state(self._device), strict=True):
                if (device, enabled, dtype) != current:
                    stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
            yield


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


def autocast_state(device: str) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Returns the current autocast state of the CPU and of `device` as (device type, enabled, dtype)."""
    cpu = "cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    if device == "cpu":
        return (cpu,)
    return cpu, (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


# ---- Finds tensors that reach a block from outside: neither arguments, nor weights, nor made inside.
#
# They would silently receive no gradient, so they are an error. On the fast path, a walk of the block's local graph
# to its leaves finds them. Under torch.func the graph hides behind wrappers, and a function mode inspects each call.

HOW = "pass it as an argument, in xs, or in consts; or detach it if it needs no gradient"


def check_graph(
    outs: Sequence[Tensor], allowed: Iterable[Tensor], name: str, again: Callable[[], Sequence[Tensor]]
) -> None:
    """Raises if the graph of `outs` ends in a leaf that is neither in `allowed` nor made by the block itself.

    again: runs the block once more. If a leaf is unknown, a mode then finds out whether it was made inside, as forces
    are
    """
    allowed = list(allowed)
    if _foreign_leaf(outs, allowed, name) is None:
        return
    watch = Watch(allowed, name)
    with watch:
        outs = again()
    if (leaf := _foreign_leaf(outs, watch.known(), name)) is not None:
        raise RuntimeError(_message(name, _shown(leaf)))


def _foreign_leaf(outs: Iterable[Tensor], allowed: Iterable[Tensor], name: str) -> Tensor | None:
    """Returns a leaf at an end of the graph of `outs` that is not in `allowed`, or None."""
    known = {id(tensor) for tensor in allowed}
    seen: set[Any] = set()
    todo: list[Any] = [out.grad_fn for out in outs if out.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        running = getattr(node, "running", None)  # the autograd node of a visit: the graph around this block
        if running is not None:
            raise RuntimeError(_message(name, f"the output of an earlier visit ({running.visit.name})"))
        todo += [below for below, _ in node.next_functions if below is not None]
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return leaf
    return None


class Watch(TorchFunctionMode):
    """Raises if a block uses an unknown tensor that requires grad."""

    def __init__(self, allowed: Iterable[Tensor], name: str) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in allowed}  # keeps them alive: ids must not be reused
        self._name = name

    def known(self) -> list[Tensor]:
        """Returns the allowed tensors and all tensors made since."""
        return list(self._known.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Any = [args, kwargs or {}]
        for leaf in optree.tree_leaves(given):
            if isinstance(leaf, Tensor) and id(leaf) not in self._known and _tracked(leaf):
                raise RuntimeError(_message(self._name, _shown(leaf)))
        out = func(*args, **(kwargs or {}))
        for leaf in optree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._known[id(leaf)] = leaf
        return out


def _tracked(tensor: Tensor) -> bool:
    return tensor.requires_grad or is_transform_wrapper(tensor)


def _shown(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} that requires grad"


def _message(name: str, what: str) -> str:
    return f"{name}: {what} reaches the block from outside, where no gradient would come back to it: {HOW}"
