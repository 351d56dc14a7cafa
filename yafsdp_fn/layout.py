"""Flat layouts: where every leaf of a parameter tree lies in its unit's flat vector.

    unit:  | q_proj ........ | k_proj .. | norm |gap| down_proj ...... | padding |
    rank:  |------- rank 0 -------|------- rank 1 -------|------- rank 2 -------|

Offsets are aligned to 16 bytes and do not depend on the number of ranks; padding is only at the tail, so that every
rank owns an equal, aligned slice. Gaps and padding hold zeros everywhere, always.

    Entry   one subtree of the user's tree that one handle stands for (an unstacked unit, or a whole stack)
    Group   its units of one layout: one per layer; `Unit` and `frozen` inside a stack make further groups, and
            `Pinned` one whose single unit holds all layers
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.tree import (
    Frozen,
    Marker,
    Param,
    Pinned,
    Stacked,
    Tree,
    Unit,
    dotted,
    has_marker,
    is_marker,
    join,
    shape_of,
    strip,
)

ALIGN = 8
"""Elements; 16 bytes in bf16, the narrowest dtype that is gathered, so that every view is aligned for vector loads."""


def round_up(n: int, multiple: int = ALIGN) -> int:
    return -(-n // multiple) * multiple


class Piece(NamedTuple):
    """Elements `[start, stop)` of a slice hold leaf number `leaf` from its element `origin` on."""

    leaf: int
    start: int
    stop: int
    origin: int


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The leaves of one unit in one flat vector of `numel` elements.

    names: dotted paths of the leaves; shapes: of one layer, without the layer axis, but with it in a pinned unit
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        out, at = [], 0
        for size in self.sizes:
            out.append(at)
            at = round_up(at + size)
        return tuple(out)

    @cached_property
    def numel(self) -> int:
        """Elements up to the end of the last leaf: the same for every number of ranks."""
        return self.offsets[-1] + self.sizes[-1] if self.sizes else 0

    def shard_numel(self, ranks: int) -> int:
        """Elements of one rank's slice: equal on all ranks, aligned."""
        return round_up(-(-self.numel // ranks))

    def padded_numel(self, ranks: int) -> int:
        return self.shard_numel(ranks) * ranks

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of the leaves in a flat vector of at least `numel` elements."""
        return [
            flat.narrow(0, offset, size).view(shape)
            for offset, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=True)
        ]

    def gaps(self, length: int) -> list[tuple[int, int]]:
        """`(start, stop)` of the elements of a flat vector of `length` that belong to no leaf."""
        starts = (*self.offsets[1:], length)
        ends = [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parts of leaves that lie in the slice `[start, stop)` of the flat vector."""
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            a, b = max(offset, start), min(offset + size, stop)
            if a < b:
                yield Piece(index, a - start, b - start, a - offset)


@dataclasses.dataclass(frozen=True)
class Group:
    """The units of one layout: one per layer of a stack, or a single one: unstacked, or pinned, of all layers.

    units: ids, by layer, or the only one; leaves: positions among the entry's leaves; dtype: storage dtype of frozen
    leaves. A shard of the group is [L, n], or [n] where there is a single unit.
    """

    name: str
    layout: FlatLayout
    units: tuple[int, ...]
    leaves: tuple[int, ...]
    trainable: bool
    dtype: torch.dtype | None
    pinned: bool = False

    def unit(self, layer: int) -> int:
        """The unit that holds `layer` (0 where unstacked)."""
        return self.units[0 if self.pinned else layer]

    def of_layer(self, leaves: Sequence[Tensor], layer: int) -> Sequence[Tensor]:
        """What a block sees of the leaves of `unit(layer)`: views of one layer, where they hold all."""
        return [leaf[layer] for leaf in leaves] if self.pinned else leaves

    @property
    def layer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the leaves of one layer."""
        shapes = self.layout.shapes
        return tuple(shape[1:] for shape in shapes) if self.pinned else shapes


@dataclasses.dataclass(frozen=True)
class Entry:
    """One subtree of the user's tree. `spec`: its structure without markers; `length`: L, or None if unstacked."""

    name: str
    spec: optree.PyTreeSpec
    groups: tuple[Group, ...]
    length: int | None

    @cached_property
    def leaf_count(self) -> int:
        return self.spec.num_leaves

    def unflatten(self, by_group: Mapping[str, Sequence[Any]]) -> Tree:
        """The subtree from the leaves of its groups, by their names; leaves of a group that is absent are None."""
        if len(self.groups) == 1 and by_group:
            return optree.tree_unflatten(self.spec, by_group[self.groups[0].name])
        out: list[Any] = [None] * self.leaf_count
        for group in self.groups:
            if group.name in by_group:
                for position, leaf in zip(group.leaves, by_group[group.name], strict=True):
                    out[position] = leaf
        return optree.tree_unflatten(self.spec, out)

    def params(self, group: Group) -> list[Param]:
        """The abstract per-layer parameters of `group`."""
        return [Param(shape, group.dtype or torch.float32) for shape in group.layer_shapes]

    def stacked(self, group: Group) -> bool:
        """Whether `group` has a unit per layer: shards [L, n]."""
        return self.length is not None and not group.pinned


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """The layout of a whole tree: its entries, in unit order, and the container that holds them."""

    entries: tuple[Entry, ...]
    container: optree.PyTreeSpec

    @cached_property
    def _hash(self) -> int:
        return hash((self.entries, self.container))

    def __hash__(self) -> int:
        return self._hash  # a layout is a key at every step

    def build(self, per_entry: Sequence[Any]) -> Tree:
        """The user's container with one object per entry."""
        return optree.tree_unflatten(self.container, per_entry)

    @cached_property
    def groups(self) -> tuple[tuple[Entry, Group], ...]:
        return tuple((entry, group) for entry in self.entries for group in entry.groups)


def tree_layout(tree: Tree) -> tuple[TreeLayout, list[list[Any]]]:
    """The layout of `tree`, and the leaves of each entry (in the order of `Entry.spec`)."""
    tree = push_frozen(tree)
    subtrees = [
        (name, subtree) for name, subtree in _subtrees(tree) if is_marker(subtree) or optree.tree_leaves(subtree)
    ]
    entries, leaves, next_unit = [], [], 0
    for name, subtree in subtrees:
        entry, entry_leaves = _entry(name, subtree, next_unit)
        next_unit += sum(len(group.units) for group in entry.groups)
        entries.append(entry)
        leaves.append(entry_leaves)
    container = optree.tree_structure(tree, is_leaf=lambda node: any(node is subtree for _, subtree in subtrees))
    return TreeLayout(tuple(entries), container), leaves


def push_frozen(tree: Tree) -> Tree:
    """`tree` with each `frozen` that stands around whole units or stacks moved down onto them."""

    def push(node: Any) -> Any:
        if not isinstance(node, Frozen) or is_marker(node.tree) or not has_marker(node.tree):
            return node
        inner, dtype = node.tree, node.dtype
        return push_frozen(optree.tree_map(lambda child: Frozen(child, dtype), inner, is_leaf=lambda n: n is not inner))

    return optree.tree_map(push, tree, is_leaf=is_marker)


def _subtrees(tree: Tree, name: str = "", root: bool = True) -> Iterator[tuple[str, Tree]]:
    """The subtrees that are entries: children of the root, or of any container with a marker below it."""
    container = not is_marker(tree) and not optree.tree_is_leaf(tree)
    if not (container and (root or has_marker(tree))):
        yield name, tree
        return
    accessors = optree.tree_accessors(tree, is_leaf=lambda node: node is not tree)
    children = optree.tree_leaves(tree, is_leaf=lambda node: node is not tree)
    for accessor, child in zip(accessors, children, strict=True):
        if child is not None:
            yield from _subtrees(child, join(name, dotted(accessor)), root=False)


def _entry(name: str, subtree: Tree, first_unit: int) -> tuple[Entry, list[Any]]:
    members: dict[_Kind, list[tuple[int, str, Any]]] = {}
    stacked, seen = False, 0

    def walk(node: Tree, path: str, kind: _Kind, top: bool) -> None:
        nonlocal stacked, seen
        if isinstance(node, Stacked):
            if not top:
                raise ValueError(f"{path or 'params'}: a Stacked inside a Unit or another Stacked; stacks do not nest")
            stacked = True
            walk(node.tree, path, kind, False)
        elif isinstance(node, Frozen):
            walk(node.tree, path, kind._replace(trainable=False, dtype=node.dtype or kind.dtype), top)
        elif isinstance(node, Unit):
            walk(node.tree, path, kind._replace(unit=path), False)
        elif isinstance(node, Pinned):
            if not stacked:
                raise ValueError(
                    f"{path or 'params'}: a Pinned outside of a Stacked; it puts small leaves of all layers of a stack "
                    "in one unit, so it stands inside; a subtree outside is one unit anyway"
                )
            walk(node.tree, path, kind._replace(pinned=True), False)
        elif isinstance(node, Marker) or optree.tree_is_leaf(node):
            members.setdefault(kind, []).append((seen, path, node))
            seen += 1
        else:
            accessors = optree.tree_accessors(node, is_leaf=is_marker)
            for accessor, child in zip(accessors, optree.tree_leaves(node, is_leaf=is_marker), strict=True):
                walk(child, join(path, dotted(accessor)), kind, False)

    walk(subtree, name, _Kind(name, True, None, False), True)
    leaves, spec = optree.tree_flatten(strip(subtree))  # the order of `walk`
    length = _length(name, members) if stacked else None
    groups: list[Group] = []
    # ids follow the order of visits: pinned units, all other units of layer 0, then all of layer 1
    kinds = sorted(members, key=lambda kind: not kind.pinned)
    pinned = sum(kind.pinned for kind in kinds)
    for kind in kinds:
        _check_leaves(members[kind])
        positions, paths, nodes = zip(*members[kind], strict=True)
        shapes = tuple(tuple(leaf.shape[1:] if stacked and not kind.pinned else leaf.shape) for leaf in nodes)
        count = 1 if length is None or kind.pinned else length
        ids = tuple(first_unit + len(groups) + layer * (len(kinds) - pinned) for layer in range(count))
        layout = FlatLayout(paths, shapes)
        groups.append(
            Group(kind.name(len(kinds) == 1), layout, ids, positions, kind.trainable, kind.dtype, kind.pinned)
        )
    twice = [a.name for a, b in itertools.combinations(groups, 2) if a.name == b.name]
    if twice:
        raise ValueError(f"{twice[0]}: a Unit here has the name of the stack's pinned or frozen leaves; rename it")
    return Entry(name, spec, tuple(groups), length), leaves


class _Kind(NamedTuple):
    """What leaves of one group have in common. unit: the path of the `Unit`, or of the entry, that they belong to."""

    unit: str
    trainable: bool
    dtype: torch.dtype | None
    pinned: bool

    def name(self, alone: bool) -> str:
        """Of the group; `alone`: it is the only one of its entry."""
        frozen = "frozen" if self.dtype is None else f"frozen({str(self.dtype).removeprefix('torch.')})"
        return join(self.unit, "" if self.trainable or alone else frozen, "pinned" if self.pinned else "")


def _length(name: str, members: dict[Any, list[tuple[int, str, Any]]]) -> int:
    lengths: dict[int, str] = {}
    for _, path, leaf in itertools.chain(*members.values()):
        if not getattr(leaf, "shape", ()):
            raise ValueError(f"{path}: a leaf of a Stacked needs a leading layer axis, got {shape_of(leaf)}")
        lengths.setdefault(leaf.shape[0], path)
    if len(lengths) > 1:
        found = ", ".join(f"{path} has {length}" for length, path in lengths.items())
        raise ValueError(f"Stacked {name!r}: leaves disagree on the number of layers: {found}")
    if not lengths or 0 in lengths:
        raise ValueError(f"Stacked {name!r} has no {'layers' if lengths else 'leaves'}")
    return next(iter(lengths))


def _check_leaves(found: list[tuple[int, str, Any]]) -> None:
    for _, path, leaf in found:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(f"{path}: expected a Param, a tensor or a Lazy leaf, got {type(leaf).__name__}")
        if not leaf.dtype.is_floating_point:
            raise TypeError(f"{path}: parameters are floating point, got {leaf.dtype}; pass integers in the batch")


LeafRule = Callable[[str, Param], bool]
"""A rule over logical leaves: dotted path and per-layer abstract parameter."""
