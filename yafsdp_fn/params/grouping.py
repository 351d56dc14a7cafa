"""From a marked tree to its layout: which leaves make up which unit.

    {"layers": Stacked({"gain": Pinned(..), "w": .., "side": Unit({"u": ..}), "base": frozen(..)})}

    entry layers:   groups layers.pinned | layers.frozen | layers.side | layers
    units               0                | 1, 4, ..      | 2, 5, ..    | 3, 6, ..        ids in the order of visits

Leaves keep optree's order, in an entry and in each group.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import torch

from yafsdp_fn.params.layout import Entry, FlatLayout, Group, TreeLayout
from yafsdp_fn.params.markers import Frozen, Marker, Pinned, Stacked, Unit, has_marker, is_marker, strip
from yafsdp_fn.params.tree import Tree, dotted, join, shape_of


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
            if not hasattr(node, "shape") or not hasattr(node, "dtype"):
                raise TypeError(f"{path}: expected a Param, a tensor or a Lazy leaf, got {type(node).__name__}")
            if not node.dtype.is_floating_point:
                raise TypeError(f"{path}: parameters are floating point, got {node.dtype}; pass integers in the batch")
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
        positions, paths, nodes = zip(*members[kind], strict=True)
        shapes = tuple(tuple(leaf.shape[1:] if stacked and not kind.pinned else leaf.shape) for leaf in nodes)
        count = 1 if length is None or kind.pinned else length
        ids = tuple(first_unit + len(groups) + layer * (len(kinds) - pinned) for layer in range(count))
        layout, name_of = FlatLayout(paths, shapes), kind.name(alone=len(kinds) == 1)
        groups.append(Group(name_of, layout, ids, positions, kind.trainable, kind.dtype, kind.pinned))
    twice = [a.name for a, b in itertools.combinations(groups, 2) if a.name == b.name]
    if twice:
        raise ValueError(f"{twice[0]}: a Unit here has the name of the stack's pinned or frozen leaves; rename it")
    members.clear()  # `walk` holds itself, and so would hold the leaves until a collection
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
        if not leaf.shape:
            raise ValueError(f"{path}: a leaf of a Stacked needs a leading layer axis, got {shape_of(leaf)}")
        lengths.setdefault(leaf.shape[0], path)
    if len(lengths) > 1:
        found = ", ".join(f"{path} has {length}" for length, path in lengths.items())
        raise ValueError(f"Stacked {name!r}: leaves disagree on the number of layers: {found}")
    if not lengths or 0 in lengths:
        raise ValueError(f"Stacked {name!r} has no {'layers' if lengths else 'leaves'}")
    return next(iter(lengths))
