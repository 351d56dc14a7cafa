"""Derives the layout of a marked tree: the leaves of each unit.

    {"layers": Stacked({"gain": Pinned(..), "w": .., "side": Unit({"u": ..}), "base": frozen(..)})}

    entry layers:   groups layers.pinned | layers.frozen | layers.side | layers
    units               0                | 1, 4, ..      | 2, 5, ..    | 3, 6, ..        ids in the order of visits

Leaves keep optree's order, in an entry and in each group.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.formats import WHOLE, Wire
from yafsdp_fn.params.layout import Entry, FlatLayout, Group, TreeLayout
from yafsdp_fn.params.markers import Frozen, Marker, Pinned, Stacked, Unit, has_marker, is_marker, without_markers
from yafsdp_fn.params.tree import Tree, dotted, join, no_leaf, shape_of

# ---- Entries: the subtrees of handles.


def tree_layout(tree: Tree) -> tuple[TreeLayout, list[list[Any]]]:
    """Returns the layout of `tree`, and the leaves of each entry (in the order of `Entry.spec`)."""
    tree = push_frozen(tree)

    def is_entry(node: Any) -> bool:
        """Entries are markers, and other children of the root, or of any container with a marker below it."""
        if is_marker(node):
            return True
        return node is not tree and not has_marker(node) and bool(optree.tree_leaves(node))

    accessors, subtrees, container = optree.tree_flatten_with_accessor(tree, is_leaf=is_entry)
    entries = []
    leaves = []
    next_unit = 0
    seen = set[str]()
    for accessor, subtree in zip(accessors, subtrees, strict=True):
        entry, entry_leaves = _entry(dotted(accessor), subtree, next_unit)
        next_unit += sum(len(group.units) for group in entry.groups)
        entries.append(entry)
        leaves.append(entry_leaves)
        for name in itertools.chain.from_iterable(group.layout.names for group in entry.groups):
            if name in seen:  # checkpoints and `like=` would take one for the other
                raise ValueError(f"two leaves are called {name}: rename one, such as a key of a dict with a dot in it")
            seen.add(name)
    return TreeLayout(tuple(entries), container), leaves


def push_frozen(tree: Tree) -> Tree:
    """Returns `tree` with each `frozen` around whole units or stacks moved down onto them."""

    def push(node: Any) -> Any:
        if not isinstance(node, Frozen) or is_marker(node.tree) or not has_marker(node.tree):
            return node
        pushed = optree.tree_map(
            lambda child: Frozen(child, node.dtype), node.tree, is_leaf=lambda n: n is not node.tree
        )
        return push_frozen(pushed)

    return optree.tree_map(push, tree, is_leaf=is_marker)


_Leaves = list[tuple[int, str, Any]]
"""Leaves of one kind: the position of each among the entry's leaves, its path, and its value."""


def _entry(name: str, subtree: Tree, first_unit: int) -> tuple[Entry, list[Any]]:
    """Returns the entry of a subtree, whose units are numbered from `first_unit`, and its leaves."""
    # leaves by what markers around them say
    stacked = _is_stack(subtree)
    members: dict[_Kind, _Leaves] = {}
    for position, (kind, *leaf) in enumerate(_marked(subtree, name, _Kind(name, stacked), top=True)):
        members.setdefault(kind, []).append((position, *leaf))
    leaves, spec = optree.tree_flatten(without_markers(subtree))  # the order of `_marked`
    length = _length(name, members.values()) if stacked else None
    # a group for each kind; ids follow the order of visits: pinned units, all other units of layer 0, then of layer 1
    kinds = sorted(members, key=lambda kind: not kind.pinned)
    each_layer = sum(not kind.pinned for kind in kinds)
    groups: dict[str, Group] = {}
    for number, kind in enumerate(kinds, first_unit):
        own_name = kind.name(alone=len(kinds) == 1)
        if own_name in groups:
            raise ValueError(
                f"{own_name}: a Unit here has the name of other leaves of the stack: pinned, frozen, or of their own "
                "dtype or format; rename it"
            )
        layers = 1 if length is None or kind.pinned else length
        units = tuple(number + layer * each_layer for layer in range(layers))
        groups[own_name] = _group(own_name, kind, units, members[kind], length)
    return Entry(name, spec, tuple(groups.values())), leaves


def _group(name: str, kind: "_Kind", units: tuple[int, ...], leaves: _Leaves, length: int | None) -> Group:
    positions, paths, values = zip(*leaves, strict=True)
    stacked = length is not None and not kind.pinned  # the axis of layers is none of a unit's
    shapes = tuple(tuple(value.shape[stacked:]) for value in values)
    layout = FlatLayout(paths, shapes, kind.wire.align)
    splits = tuple(value.split for value in values) if kind.over else ()
    common = kind.trainable, kind.dtype, kind.pinned, kind.reduce, length, stacked
    return Group(name, layout, units, positions, *common, splits=splits, wire=kind.wire)


# ---- Leaves, and what markers say of them.


def _is_stack(node: Tree) -> bool:
    while isinstance(node, Frozen):
        node = node.tree
    return isinstance(node, Stacked)


def _marked(node: Tree, path: str, kind: "_Kind", top: bool) -> Iterator[tuple["_Kind", str, Any]]:
    """Yields each leaf below `node`, with its path and its kind. kind: by the markers above; top: none is, but
    `frozen`"""
    if isinstance(node, Marker):
        below = _below(node, path, kind, top)
        yield from _marked(node.tree, path, below, top and isinstance(node, Frozen))
    elif optree.tree_is_leaf(node):
        if not isinstance(getattr(node, "dtype", None), torch.dtype):
            raise TypeError(no_leaf(path, node))
        if not node.dtype.is_floating_point:
            raise TypeError(f"{path}: parameters are floating point, got {node.dtype}; pass integers in the batch")
        yield kind if isinstance(node, Tensor) else kind.of(node), path, node  # a tensor has a method `split`
    else:
        accessors = optree.tree_accessors(node, is_leaf=is_marker)
        for accessor, child in zip(accessors, optree.tree_leaves(node, is_leaf=is_marker), strict=True):
            yield from _marked(child, join(path, dotted(accessor)), kind, False)


def _below(marker: Marker, path: str, kind: "_Kind", top: bool) -> "_Kind":
    """Returns the kind of the leaves below a marker. Raises ValueError where it cannot stand."""
    match marker:
        case Stacked():
            if not top:
                raise ValueError(f"{path or 'params'}: a Stacked inside a Unit or another Stacked; stacks do not nest")
            _must_be_one_layer(path, marker.tree)
            return kind
        case Frozen():
            return kind._replace(trainable=False, dtype=marker.dtype or kind.dtype)
        case Unit():
            return kind._replace(unit=path)
        case Pinned():
            if not kind.stacked:
                raise ValueError(
                    f"{path or 'params'}: a Pinned outside of a Stacked; it puts small leaves of all layers of a stack "
                    "in one unit, so it stands inside; a subtree outside is one unit anyway"
                )
            return kind._replace(pinned=True)
    raise TypeError(no_leaf(path, marker))


class _Kind(NamedTuple):
    """The common properties of a group's leaves. unit: path of their `Unit`, or of their entry; stacked: they are in a
    stack; dtype, reduce, wire: as of a `Group`; over: the axes that they are split over"""

    unit: str
    stacked: bool
    trainable: bool = True
    dtype: torch.dtype | None = None
    pinned: bool = False
    over: tuple[str, ...] = ()
    reduce: torch.dtype | None = None
    wire: Wire = WHOLE

    def of(self, leaf: Any) -> "_Kind":
        """Returns the kind of an abstract leaf below these markers."""
        over = tuple(name for name, _ in getattr(leaf, "split", ()))
        dtype = getattr(leaf, "compute", None) or self.dtype
        wire = getattr(leaf, "wire", WHOLE)
        if not self.trainable:
            return self._replace(dtype=dtype, over=over, wire=Wire(wire.gather))
        return self._replace(dtype=dtype, over=over, reduce=getattr(leaf, "reduce", None), wire=wire)

    def name(self, alone: bool) -> str:
        """Returns the name of the group; `alone`: it is the only one of its entry."""
        words: list[str] = []
        if not alone:
            words.append("" if self.trainable or self.dtype is not None else "frozen")
            words.append(_in_word("compute" if self.trainable else "frozen", self.dtype))
            words.append(_in_word("reduce", self.reduce))
            words.append(f"split({', '.join(self.over)})" if self.over else "")
            words.append("" if self.wire == WHOLE else f"wire({self.wire})")
        return join(self.unit, *words, "pinned" if self.pinned else "")


def _in_word(what: str, dtype: torch.dtype | None) -> str:
    return "" if dtype is None else f"{what}({str(dtype).removeprefix('torch.')})"


def _must_be_one_layer(path: str, tree: Tree) -> None:
    """Raises TypeError for a list of layers, of which each would be taken for a stack."""
    if type(tree) not in (list, tuple) or len(tree) < 2:
        return
    if len({str(optree.tree_map(shape_of, layer)) for layer in tree}) == 1:
        raise TypeError(
            f"Stacked {path!r} has a list of {len(tree)} trees alike. Layers are stacked, leaf by leaf: "
            "ya.Param((layers, ...)), or torch.stack of their tensors. If each is a stack, put them in a dict"
        )


def _length(name: str, members: Iterable[_Leaves]) -> int:
    """Returns the number of layers of a stack. Raises ValueError where its leaves disagree, or there are none."""
    lengths: dict[int, str] = {}
    for _, path, leaf in itertools.chain(*members):
        if not leaf.shape:
            raise ValueError(f"{path}: a leaf of a Stacked needs a leading layer axis, got {shape_of(leaf)}")
        lengths.setdefault(leaf.shape[0], path)
    if len(lengths) > 1:
        found = ", ".join(f"{path} has {length}" for length, path in lengths.items())
        raise ValueError(f"Stacked {name!r}: leaves disagree on the number of layers: {found}")
    if not lengths or 0 in lengths:
        raise ValueError(f"Stacked {name!r} has no {'layers' if lengths else 'leaves'}")
    return next(iter(lengths))
