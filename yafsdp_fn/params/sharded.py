"""The handle that stands for a sharded subtree in a parameter tree.

`state.params` is the user's own container with one `Sharded` per unit or stack. A handle is a pytree node whose
leaves are this rank's flat shards: [L, n] for a stack, [n] for a unit, also for a stack's pinned one. `tree_map` over
it is therefore for elementwise functions; whole weights exist only inside `scan`, `apply` and `map_layers`.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.params.layout import Entry, Group, TreeLayout
from yafsdp_fn.params.markers import Frozen
from yafsdp_fn.params.nodes import register_node
from yafsdp_fn.params.not_whole import NotWhole
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.tree import Tree


class Owner(Protocol):
    """What has a layout: a state's memory, a placement that has no memory yet, the units of an optimizer's step.

    generation: of what it holds; it moves on when a step takes the memory for the next state
    """

    generation: int

    @property
    def comms(self) -> Ranks: ...
    @property
    def precision(self) -> Precision: ...

    def gather_dtype(self, unit: int) -> torch.dtype:
        """What a unit is gathered in."""

    def owns(self, number: int, leaf: object) -> bool:
        """Whether `leaf` is its own memory of group `number`, which a later generation overwrites."""

    def why_gone(self) -> str:
        """What happened to an earlier generation."""

    def why_not_whole(self) -> str:
        """Why nothing can be gathered, where it cannot."""


class Runner(Protocol):
    """Who runs the visits to the handles that it gave to a loss: a step's session, or a tracer. leaves: by group"""

    leaves: list[Tensor]

    @property
    def closed(self) -> bool: ...


class Origin(NamedTuple):
    """Where a handle comes from: owner and generation of its memory, or of the memory that it is sharded like; seed and
    step of the state. record: who observes the step that made it, if it is a gradient"""

    owner: Owner
    generation: int
    seed: int = 0
    step: int = 0
    record: Any = None


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Context:
    """The static part of a handle. Equal where layouts are, since torch.func compares those of its inputs and outputs.

    entry, first_group: what the handle stands for, and the number of its first group in the whole tree
    only: numbers of the groups that it holds, where some are left out, as for an optimizer; runner: of its visits,
        inside a loss
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


class Sharded(NotWhole):
    """One entry of a sharded tree. leaves: a local flat shard per group, [L, n] or [n]"""

    __slots__ = ("context", "leaves")

    def __init__(self, leaves: tuple[Any, ...], context: Context) -> None:
        self.leaves, self.context = leaves, context

    @property
    def entry(self) -> Entry:
        return self.context.entry

    @property
    def origin(self) -> Origin:
        return self.context.origin

    @property
    def owner(self) -> Owner:
        return self.context.origin.owner

    def group_leaves(self) -> list[tuple[int, Group, Any]]:
        """`(number of the group in the whole tree, group, leaf)`."""
        numbered = enumerate(self.context.entry.groups, self.context.first_group)
        only = self.context.only
        kept = [(number, group) for number, group in numbered if only is None or number in only]
        return [(number, group, leaf) for (number, group), leaf in zip(kept, self.leaves, strict=True)]

    def counted(self) -> list[Any]:
        """The leaves, without units that an earlier stage holds, too: sums over all stages are of each unit once."""
        out = []
        for _, group, leaf in self.group_leaves():
            if len(group.counted) < len(group.here):
                leaf = leaf[..., list(group.counted), :] if self.entry.stacked(group) else leaf[..., :0]
            out.append(leaf)
        return out

    def of(self, numbers: Iterable[int]) -> "Sharded":
        """The same place with these groups alone."""
        only = frozenset(numbers)
        leaves = tuple(leaf for number, _, leaf in self.group_leaves() if number in only)
        return Sharded(leaves, dataclasses.replace(self.context, only=only, runner=None))

    def check(self) -> "Sharded":
        """This handle. Raises RuntimeError where its leaves are the memory of a state that was donated since."""
        owner, generation = self.context.origin[:2]
        if generation != owner.generation and any(owner.owns(k, leaf) for k, _, leaf in self.group_leaves()):
            name = self.entry.name or "params"
            raise RuntimeError(f"{name}: these are parameters of a state that {owner.why_gone()}")
        return self

    def run_by(self, runner: Runner) -> "Sharded":
        """The handle that `runner` gives to a loss: on leaves of its own, so that it runs the visits."""
        leaves = tuple(runner.leaves[k] for k, _, _ in self.group_leaves())
        return Sharded(leaves, Context(self.entry, self.context.first_group, self.origin, runner=runner))

    def gradient(self, leaves: tuple[Any, ...], record: Any) -> "Sharded":
        """The same place with gradients in it, from a step that `record` has observed."""
        origin = self.origin._replace(record=record)
        return Sharded(leaves, dataclasses.replace(self.context, origin=origin, runner=None))

    def _whole_by(self) -> tuple[str, str]:
        verb = "ya.scan(f, x, params...)" if self.entry.length is not None else "ya.apply(f, params..., x)"
        return self.entry.name or "params", verb

    def __repr__(self) -> str:
        length = "" if self.entry.length is None else f", L={self.entry.length}"
        shapes = ", ".join(str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves)
        return f"Sharded({self.entry.name!r}{length}, local shards {shapes})"


# whoever takes the leaves out is to learn that a later state has written over them
register_node(Sharded, lambda h: (h.check().leaves, h.context), lambda context, leaves: Sharded(leaves, context))


def placed(layout: TreeLayout, leaves: Sequence[Any], origin: Origin) -> Tree:
    """The user's container with a handle per entry on `leaves`, one per group of the layout."""
    nodes, first = [], 0
    for entry in layout.entries:
        nodes.append(Sharded(tuple(leaves[first : first + len(entry.groups)]), Context(entry, first, origin)))
        first += len(entry.groups)
    return optree.tree_unflatten(layout.container, nodes)


def is_sharded(node: object) -> bool:
    return isinstance(node, Sharded)


def handles(tree: Tree) -> list[Sharded]:
    """All handles in `tree`, in order."""
    return [node for node in optree.tree_leaves(tree, is_leaf=is_sharded) if isinstance(node, Sharded)]


def trainable(tree: Tree) -> Tree:
    """`tree` without what is frozen: what an optimizer sees. Frozen plain subtrees become None."""

    def select(node: Any) -> Any:
        if not isinstance(node, Sharded):
            return None if isinstance(node, Frozen) else node
        return node.of([number for number, group, _ in node.group_leaves() if group.trainable])

    return optree.tree_map(select, tree, is_leaf=lambda node: isinstance(node, Sharded | Frozen))
