"""Vectors: trees like the parameters, of which each rank has its shards. `ya.vdot` defines lengths and angles."""

from collections.abc import Sequence
from typing import Any

import optree
import torch

from yafsdp_fn.params.algebra import normal_like
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Frozen, Tree
from yafsdp_fn.runtime.arguments import zeros


def add_(y: Tree, a: float, x: Tree) -> Tree:
    """Computes `y += a x` in the memory of y, which must be its own; returns y."""
    return optree.tree_map(lambda y, x: y.add_(x, alpha=a), y, x)


def combination(coefficients: Sequence[float], trees: Sequence[Tree]) -> Tree:
    """Returns the sum of `coefficient * tree`, in memory of its own."""
    total = optree.tree_map(torch.zeros_like, trees[0])
    for coefficient, tree in zip(coefficients, trees, strict=True):
        add_(total, coefficient, tree)
    return total


def directions(seed: int, params: Tree) -> Tree:
    """Returns standard normal values for trained leaves, the same at every number of ranks; zeros for frozen ones."""

    def trained(node: Any) -> Any:
        if isinstance(node, Sharded):
            leaves = [leaf if group.trainable else zeros(leaf) for _, group, leaf in node.group_leaves()]
            return Sharded(tuple(leaves), node.context)
        return zeros(node) if isinstance(node, Frozen) else node

    return optree.tree_map(trained, normal_like(seed, params), is_leaf=lambda node: isinstance(node, Sharded | Frozen))
