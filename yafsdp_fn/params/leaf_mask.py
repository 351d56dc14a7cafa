"""Turns a rule over logical leaves into masks over the tensors that a tree holds."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import optree
import torch

from yafsdp_fn.params.layout import Entry, Group
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import LayerParam, Param, Tree, dotted, in_stack, named_leaves

T = TypeVar("T")
LeafRule = Callable[[str, Param], bool]
"""A rule over logical leaves: (dotted path, per-layer abstract parameter, a `LayerParam` in a stack) -> bool."""


# ---- Rules over leaves: functions of path and parameter, or trees of bools.


def nearest(said: Mapping[str, T], path: str) -> T | None:
    """Returns what `said` has for a dotted path, or else for the nearest subtree that it is in; None for neither."""
    parts = path.split(".")
    above = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
    return next((said[prefix] for prefix in above if prefix in said), None)


class MaskTree:
    """The rule of a tree of bools, by dotted path; a bool covers everything below it."""

    def __init__(self, said: Mapping[str, bool]) -> None:
        self._said = said

    def __call__(self, path: str, param: Param | None = None) -> bool:
        if (chosen := nearest(self._said, path)) is not None:
            return chosen
        raise ValueError(f"mask: the tree says nothing of {path}; it has {', '.join(self._said) or 'no leaves'}")

    def must_fit(self, tree: Tree) -> None:
        """Raises ValueError unless it covers all of `tree`, as an optimizer sees it, and nothing else but frozen
        leaves."""
        trained, frozen = _paths(tree)
        for path in trained:
            self(path)
        for path in self._said:
            there = any(_below(known, path) for known in trained + frozen)
            if not there and not any(_below(path, known) for known in frozen):
                raise ValueError(f"mask: the tree has {path}, the parameters have not; they have {', '.join(trained)}")


def as_rule(mask: LeafRule | Tree) -> LeafRule:
    """Returns a rule from a rule, or from a tree of bools like the parameters, where a bool may cover a whole subtree.

    Raises TypeError for other leaves; the rule raises ValueError for a parameter that the tree does not cover.
    """
    if callable(mask):
        return cast(LeafRule, mask)
    said = dict(named_leaves(mask))
    for path, value in said.items():
        if not isinstance(value, bool):
            raise TypeError(f"mask: {path or 'the tree'} is {value!r}; expected True or False, or a rule (path, Param)")
    return MaskTree(said)


def must_fit(rule: LeafRule, tree: Tree) -> None:
    """Raises ValueError if `rule` comes from a tree of bools that is not like the parameters in `tree`."""
    if isinstance(rule, MaskTree):
        rule.must_fit(tree)


def _paths(tree: Tree) -> tuple[list[str], list[str]]:
    """Returns paths of the leaves of `tree`, and of frozen ones; a frozen plain subtree is None, one path."""
    trained: list[str] = []
    frozen: list[str] = []
    accessors, nodes, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_sharded, none_is_leaf=True)
    for accessor, node in zip(accessors, nodes, strict=True):
        if isinstance(node, Sharded):
            # a handle that an optimizer sees lacks frozen groups
            held = {group.name for _, group, _ in node.group_leaves()}
            for group in node.entry.groups:
                (trained if group.name in held else frozen).extend(group.layout.names)
        else:
            (frozen if node is None else trained).append(dotted(accessor))
    return trained, frozen


def _below(path: str, top: str) -> bool:
    """Returns whether `path` is `top` or in it."""
    return top in ("", path) or path.startswith(f"{top}.")


# ---- Rules, leaf by leaf.


def leaf_mask(rule: LeafRule | Tree, tree: Tree) -> Tree:
    """Returns `rule(path, param)` for every logical leaf of `tree`, as a tree of bool tensors of the same structure.

    rule: or a tree of bools like the parameters, see `as_rule`

    On a sharded tree a leaf of the result is [n]: True at the elements of this rank's flat shard whose logical leaf
    passes, the same for every layer; on a plain tree it is 0-dim. `param` is per layer.

    >>> ya.params.leaf_mask(lambda path, p: len(p.shape) > 1, {"w": torch.ones(2, 2), "gain": torch.ones(2)})
    {'w': tensor(True), 'gain': tensor(False)}
    """
    given = rule
    rule = as_rule(rule)
    if rule is not given:
        must_fit(rule, tree)

    def mask_of(accessor: optree.PyTreeAccessor, node: Any) -> Any:
        if not isinstance(node, Sharded):
            return torch.tensor(rule(dotted(accessor), plain_param(accessor, node)), device=node.device)
        masks = []
        for _, group, leaf in node.group_leaves():
            n = leaf.shape[-1]
            passes = by_leaf(rule, node.entry, group)
            mask = torch.zeros(n, dtype=torch.bool, device=leaf.device)
            for piece in group.pieces(n, node.owner.comms):
                mask[piece.start : piece.stop] = passes[piece.leaf]
            masks.append(mask)
        return Sharded(tuple(masks), node.context)

    return optree.tree_map_with_accessor(mask_of, tree, is_leaf=is_sharded)


def by_leaf(rule: Callable[[str, Param], Any], entry: Entry, group: Group) -> list[Any]:
    """Returns what `rule` says of each logical leaf of a unit of `group`, in the order of its layout."""
    return list(map(rule, group.layout.names, entry.params(group)))


def plain_param(accessor: optree.PyTreeAccessor, leaf: Any) -> Param:
    """Returns the `Param` that a rule gets for a leaf of a plain tree."""
    stacked = in_stack(accessor)
    kind = LayerParam if stacked else Param
    return kind(tuple(leaf.shape[1:] if stacked else leaf.shape), leaf.dtype)
