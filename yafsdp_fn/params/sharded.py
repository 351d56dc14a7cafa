"""The handle that stands for a sharded subtree in a parameter tree."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.params.layout import Entry, Group, TreeLayout
from yafsdp_fn.params.markers import Frozen, register_node
from yafsdp_fn.params.not_a_tensor import NotATensor
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.tree import Tree, shape_of

# ---- The handle of a sharded subtree in a parameter tree.
#
# `state.params` is the user's own container with one `Sharded` per unit or stack. A handle is a pytree node whose
# leaves are this rank's flat shards: [L, n] for a stack, [n] for a unit, also for a stack's pinned one. `tree_map`
# over it is therefore for elementwise functions; whole weights exist only inside `scan`, `apply` and
# `map_whole_layers`.


# ---- what a handle needs of others


class Owner(Protocol):
    """The owner of a layout: a state's memory, a placement without memory, the units of an optimizer's step.

    generation: of its content; it advances when a step takes the memory for the next state
    stepping: ids of its leaves, if a training step of theirs runs now
    """

    generation: int
    stepping: frozenset[int]

    @property
    def comms(self) -> Ranks: ...
    @property
    def precision(self) -> Precision: ...

    def gather_dtype(self, unit: int) -> torch.dtype:
        """Returns the dtype in which a unit is gathered."""

    def wire_dtype(self, unit: int) -> torch.dtype:
        """Returns the dtype in which a unit's gradient travels."""

    def sum_dtype(self, unit: int) -> torch.dtype | None:
        """Returns the dtype in which ranks sum a unit's gradient themselves; None if the backend does."""

    def owns(self, number: int, leaf: object) -> bool:
        """Returns whether `leaf` is its own memory of group `number`, which a later generation overwrites."""

    def why_gone(self) -> str:
        """Says what happened to an earlier generation."""

    def why_not_whole(self) -> str:
        """Says why nothing can be gathered, if so."""


class Runner(Protocol):
    """Runs the visits to the handles that it gave to a loss: a step's session, or a tracer. leaves: by group"""

    leaves: list[Tensor]

    @property
    def closed(self) -> bool: ...


class Origin(NamedTuple):
    """The origin of a handle: owner and generation of its memory, or of the memory that it is sharded like; seed and
    step of the state. record: the observer of the step that made it, if it is a gradient"""

    owner: Owner
    generation: int
    seed: int = 0
    step: int = 0
    record: Any = None


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Context:
    """The static part of a handle. Equal if layouts are, since torch.func compares those of its inputs and outputs.

    entry, first_group: the handle's entry, and the number of its first group in the whole tree
    only: numbers of the groups that it holds, if some are left out, as for an optimizer; runner: of its visits, inside
        a loss
    """

    entry: Entry
    first_group: int
    origin: Origin
    _: dataclasses.KW_ONLY
    runner: Runner | None = None
    only: frozenset[int] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context):
            return NotImplemented
        return self.entry == other.entry and self.only == other.only

    def __hash__(self) -> int:
        return hash(self.entry)

    def __repr__(self) -> str:
        return f"<{self.entry.name}>"


# ---- the handle


class Sharded(NotATensor):
    """One entry of a sharded tree. leaves: a local flat shard per group, [L, n] or [n]

    >>> handle = state.params["layers"]
    >>> type(handle).__name__, [tuple(leaf.shape) for leaf in handle.leaves]
    ('Sharded', [(4, 512)])
    """

    __slots__ = ("context", "leaves")

    def __init__(self, leaves: tuple[Any, ...], context: Context) -> None:
        self.leaves = leaves
        self.context = context

    @property
    def entry(self) -> Entry:
        return self.context.entry

    @property
    def origin(self) -> Origin:
        return self.context.origin

    @property
    def owner(self) -> Owner:
        return self.context.origin.owner

    # ---- its leaves

    def group_leaves(self) -> list[tuple[int, Group, Any]]:
        """Returns `(number of the group in the whole tree, group, leaf)` for each group."""
        numbered = enumerate(self.context.entry.groups, self.context.first_group)
        only = self.context.only
        kept = [(number, group) for number, group in numbered if only is None or number in only]
        return [(number, group, leaf) for (number, group), leaf in zip(kept, self.leaves, strict=True)]

    @property
    def groups(self) -> list[Group]:
        """Its groups, in the order of its leaves."""
        return [group for _, group, _ in self.group_leaves()]

    def counted(self) -> list[Any]:
        """The leaves without units that an earlier stage holds too: sums over all stages include each unit once."""
        out = []
        for _, group, leaf in self.group_leaves():
            if len(group.counted) < len(group.here):
                leaf = leaf[..., list(group.counted), :] if group.stacked else leaf[..., :0]
            out.append(leaf)
        return out

    def of(self, numbers: Iterable[int]) -> "Sharded":
        """Returns the handle with these groups only."""
        only = frozenset(numbers)
        leaves = tuple(leaf for number, _, leaf in self.group_leaves() if number in only)
        some = only if len(leaves) < len(self.entry.groups) else None  # all: equal to handles of the whole tree
        return Sharded(leaves, dataclasses.replace(self.context, only=some, runner=None))

    def map_groups(self, work: Callable[[Group, Any], tuple[Group, Any]]) -> "Sharded":
        """Returns a handle on `work(group, leaf)` of each of its groups."""
        groups = list(self.entry.groups)
        leaves = []
        for number, group, leaf in self.group_leaves():
            groups[number - self.context.first_group], new = work(group, leaf)
            leaves.append(new)
        entry = dataclasses.replace(self.entry, groups=tuple(groups))
        return Sharded(tuple(leaves), dataclasses.replace(self.context, entry=entry, runner=None))

    # ---- generations of memory

    def check(self) -> "Sharded":
        """Returns this handle. Raises RuntimeError if its leaves are the memory of a state that was donated since."""
        if self._gone():
            name = self.entry.name or "params"
            raise RuntimeError(f"{name}: these are parameters of a state that {self.owner.why_gone()}")
        return self

    def _gone(self) -> bool:
        owner, generation = self.context.origin[:2]
        return generation != owner.generation and any(owner.owns(k, leaf) for k, _, leaf in self.group_leaves())

    def run_by(self, runner: Runner) -> "Sharded":
        """Returns the handle that `runner` gives to a loss, on its own leaves, so that it runs the visits."""
        leaves = tuple(runner.leaves[k] for k, _, _ in self.group_leaves())
        return Sharded(leaves, Context(self.entry, self.context.first_group, self.origin, runner=runner))

    def gradient(self, leaves: tuple[Any, ...], record: Any) -> "Sharded":
        """Returns the handle with gradients in it, from a step that `record` has observed."""
        origin = self.origin._replace(record=record)
        return Sharded(leaves, dataclasses.replace(self.context, origin=origin, runner=None))

    def _visited_by(self) -> tuple[str, str]:
        verb = "ya.scan(f, x, params...)" if self.entry.length is not None else "ya.apply(f, params..., x)"
        return self.entry.name or "params", verb

    def __repr__(self) -> str:
        if self._gone():
            return f"Sharded({self.entry.name!r}, of a state that {self.owner.why_gone()})"
        return f"Sharded({self.entry.name!r}, {self.described()})"

    # ---- in words

    def described(self) -> str:
        """Says the names and global shapes of its leaves, and what this rank has of them."""
        wholes = [f"{path.removeprefix(self.entry.name + '.')} {shape}" for path, shape, _ in self.wholes()]
        return f"{', '.join(wholes)}; local shards {', '.join(map(shape_of, self.leaves))}"

    def wholes(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Yields the path, the global shape and the bytes of each leaf."""
        for _, group, shard in self.group_leaves():
            layers = (len(group.units),) if group.stacked else ()
            itemsize = shard.element_size() if isinstance(shard, Tensor) else 0
            for path, shape in zip(group.layout.names, group.whole.shapes, strict=True):
                whole = (*layers, *shape)
                yield path, whole, math.prod(whole) * itemsize


# flattening raises if a later state has overwritten the leaves
register_node(Sharded, lambda h: (h.check().leaves, h.context), lambda context, leaves: Sharded(leaves, context))


# ---- Trees of handles.


def placed(layout: TreeLayout, leaves: Sequence[Any], origin: Origin) -> Tree:
    """Returns the user's container with a handle per entry on `leaves`, one per group of the layout."""
    nodes = []
    first = 0
    for entry in layout.entries:
        nodes.append(Sharded(tuple(leaves[first : first + len(entry.groups)]), Context(entry, first, origin)))
        first += len(entry.groups)
    return optree.tree_unflatten(layout.container, nodes)


def is_sharded(node: object) -> bool:
    return isinstance(node, Sharded)


def handles(tree: Tree) -> list[Sharded]:
    """Returns all handles in `tree`, in order."""
    return [node for node in optree.tree_leaves(tree, is_leaf=is_sharded) if isinstance(node, Sharded)]


def handles_and_leaves(tree: Tree) -> list[tuple[optree.PyTreeAccessor, Any]]:
    """Returns `(accessor, node)` of each handle in `tree`, and of each leaf outside of handles, in order."""
    accessors, nodes, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_sharded)
    return list(zip(accessors, nodes, strict=True))


# ---- what an optimizer sees


def trainable(tree: Tree) -> Tree:
    """Returns `tree` without frozen leaves, as an optimizer sees it. Frozen plain subtrees become None."""

    def select(node: Any) -> Any:
        if not isinstance(node, Sharded):
            return None if isinstance(node, Frozen) else node
        return node.of([number for number, group, _ in node.group_leaves() if group.trainable])

    return optree.tree_map(select, tree, is_leaf=lambda node: isinstance(node, Sharded | Frozen))
