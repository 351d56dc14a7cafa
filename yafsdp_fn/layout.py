"""Flat layouts: where every leaf of a parameter tree lies in its unit's flat vector.

    unit:  | q_proj ........ | k_proj .. | norm |gap| down_proj ...... | padding |
    rank:  |------- rank 0 -------|------- rank 1 -------|------- rank 2 -------|

Offsets are aligned to 16 bytes and do not depend on the number of ranks; padding is only at the tail, so that every
rank owns an equal, aligned slice. Gaps and padding hold zeros everywhere, always.

    Entry   one subtree of the user's tree that one handle stands for (an unstacked unit, or a whole stack)
    Group   its units of one layout: one per layer; `Unit` and `frozen` inside a stack make further groups
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

    names: dotted paths of the leaves; shapes: of one layer, without the layer axis
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
    """The units of one layout: one per layer of a stack, or a single unstacked one.

    units: ids, by layer; leaves: positions among the entry's leaves; dtype: storage dtype of frozen leaves
    """

    name: str
    layout: FlatLayout
    units: tuple[int, ...]
    leaves: tuple[int, ...]
    trainable: bool
    dtype: torch.dtype | None


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
        return [Param(shape, group.dtype or torch.float32) for shape in group.layout.shapes]


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
    members: dict[tuple[str, bool, torch.dtype | None], list[tuple[int, str, Any]]] = {}
    stacked, seen = False, 0

    def walk(node: Tree, path: str, unit: str, trainable: bool, dtype: torch.dtype | None, top: bool) -> None:
        nonlocal stacked, seen
        if isinstance(node, Stacked):
            if not top:
                raise ValueError(f"{path or 'params'}: a Stacked inside a Unit or another Stacked; stacks do not nest")
            stacked = True
            walk(node.tree, path, unit, trainable, dtype, False)
        elif isinstance(node, Frozen):
            walk(node.tree, path, unit, False, node.dtype or dtype, top)
        elif isinstance(node, Unit):
            walk(node.tree, path, path, trainable, dtype, False)
        elif isinstance(node, Marker) or optree.tree_is_leaf(node):
            members.setdefault((unit, trainable, dtype), []).append((seen, path, node))
            seen += 1
        else:
            accessors = optree.tree_accessors(node, is_leaf=is_marker)
            for accessor, child in zip(accessors, optree.tree_leaves(node, is_leaf=is_marker), strict=True):
                walk(child, join(path, dotted(accessor)), unit, trainable, dtype, False)

    walk(subtree, name, name, True, None, True)
    leaves, spec = optree.tree_flatten(strip(subtree))  # the order of `walk`
    length = _length(name, members) if stacked else None
    groups: list[Group] = []
    for (unit, trainable, dtype), found in members.items():
        _check_leaves(found)
        positions, paths, nodes = zip(*found, strict=True)
        shapes = tuple(tuple(leaf.shape[1:] if stacked else leaf.shape) for leaf in nodes)
        count = 1 if length is None else length
        # layer-major ids: all units of layer 0, then all of layer 1, so that ids follow the order of visits
        ids = tuple(first_unit + layer * len(members) + len(groups) for layer in range(count))
        frozen = "frozen" if dtype is None else f"frozen({str(dtype).removeprefix('torch.')})"
        group_name = unit if trainable or len(members) == 1 else join(unit, frozen)
        groups.append(Group(group_name, FlatLayout(paths, shapes), ids, positions, trainable, dtype))
    return Entry(name, spec, tuple(groups), length), leaves


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
