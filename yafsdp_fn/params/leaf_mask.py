"""Turns a rule over logical leaves into masks over the tensors that a tree holds, and into a part of the tree."""

from collections.abc import Callable
from typing import Any

import optree
import torch

from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded
from yafsdp_fn.params.tree import LayerParam, Param, Tree, dotted, in_stack

LeafRule = Callable[[str, Param], bool]
"""A rule over logical leaves: (dotted path, per-layer abstract parameter, a `LayerParam` in a stack) -> bool."""


def must_be_rule(rule: Any, what: str) -> None:
    """Raises TypeError, naming `what`, for what is no function: a tree of masks or labels, as Optax takes, say."""
    if not callable(rule):
        raise TypeError(
            f"{what}: expected a function of a leaf's path and its ya.Param, got {type(rule).__name__}: "
            "lambda path, param: len(param.shape) > 1, say. Of a tree of values: lambda path, param: values[path]"
        )


def must_not_be_sharded(what: str, params: Tree) -> None:
    """Raises TypeError, naming `what`, for a tree of a state."""
    if found := handles(params):
        name = found[0].entry.name or "params"
        raise TypeError(f"{what}: {name} is sharded; give the tree that ya.init or ya.shard takes, or ya.unshard's")


# ---- Rules, leaf by leaf.


def leaf_mask(rule: LeafRule, tree: Tree) -> Tree:
    """Returns `rule(path, param)` for every logical leaf of `tree`, as a tree of bool tensors of the same structure.

    On a sharded tree a leaf of the result is [n]: True at the elements of this rank's flat shard whose logical leaf
    passes, the same for every layer; on a plain tree it is 0-dim. `param` is per layer.

    >>> ya.params.leaf_mask(lambda path, p: len(p.shape) > 1, {"w": torch.ones(2, 2), "gain": torch.ones(2)})
    {'w': tensor(True), 'gain': tensor(False)}
    """
    must_be_rule(rule, "leaf_mask: rule")

    def mask_of(accessor: optree.PyTreeAccessor, node: Any) -> Any:
        if not isinstance(node, Sharded):
            return torch.tensor(rule(dotted(accessor), plain_param(accessor, node)), device=node.device)
        masks = []
        for _, group, leaf in node.group_leaves():
            n = leaf.shape[-1]
            passes = by_leaf(rule, group)
            mask = torch.zeros(n, dtype=torch.bool, device=leaf.device)
            for piece in group.pieces(n, node.owner.comms):
                mask[piece.start : piece.stop] = passes[piece.leaf]
            masks.append(mask)
        return Sharded(tuple(masks), node.context)

    return optree.tree_map_with_accessor(mask_of, tree, is_leaf=is_sharded)


def restricted(tree: Tree, rule: LeafRule, *, zeros: bool = False) -> Tree:
    """Returns the part of `tree` that `rule` chooses: other plain leaves are None, and groups of a sharded tree without
    a chosen leaf are left out. zeros: other leaves of a remaining group are zero"""

    def select(at: optree.PyTreeAccessor, node: Any) -> Any:
        if not isinstance(node, Sharded):
            return node if rule(dotted(at), plain_param(at, node)) else None
        passes = {number: by_leaf(rule, group) for number, group, _ in node.group_leaves()}
        own = node.of(number for number, passed in passes.items() if any(passed))
        if not zeros or all(map(all, filter(any, passes.values()))):
            return own
        masks = leaf_mask(rule, own).leaves
        leaves = tuple(torch.where(mask, leaf, 0) for mask, leaf in zip(masks, own.leaves, strict=True))
        return Sharded(leaves, own.context)

    return optree.tree_map_with_accessor(select, tree, is_leaf=is_sharded)


def by_leaf(rule: Callable[[str, Param], Any], group: Group) -> list[Any]:
    """Returns what `rule` says of each logical leaf of a unit of `group`, in the order of its layout."""
    return list(map(rule, group.layout.names, group.params))


def plain_param(accessor: optree.PyTreeAccessor, leaf: Any) -> Param:
    """Returns the `Param` that a rule gets for a leaf of a plain tree."""
    stacked = in_stack(accessor)
    kind = LayerParam if stacked else Param
    return kind(tuple(leaf.shape[1:] if stacked else leaf.shape), leaf.dtype)
