"""Vectors: trees like the parameters, where each rank has its shards. Lengths and angles are `ya.vdot`'s."""

from collections.abc import Sequence
from typing import Any

import optree
import torch

from yafsdp_fn.algebra import normal_like
from yafsdp_fn.engine.steps import zeros
from yafsdp_fn.params.markers import Frozen
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree


def add_(y: Tree, a: float, x: Tree) -> Tree:
    """`y += a x` in the memory of y, which is its own; returns y."""
    return optree.tree_map(lambda y, x: y.add_(x, alpha=a), y, x)


def combination(coefficients: Sequence[float], trees: Sequence[Tree]) -> Tree:
    """The sum of `coefficient * tree`, in memory of its own."""
    total = optree.tree_map(torch.zeros_like, trees[0])
    for coefficient, tree in zip(coefficients, trees, strict=True):
        add_(total, coefficient, tree)
    return total


def directions(seed: int, params: Tree) -> Tree:
    """Standard normal values for what is trained, the same at every number of ranks; zeros for what is frozen."""

    def trained(node: Any) -> Any:
        if isinstance(node, Sharded):
            leaves = [leaf if group.trainable else zeros(leaf) for _, group, leaf in node.group_leaves()]
            return Sharded(tuple(leaves), node.context)
        return zeros(node) if isinstance(node, Frozen) else node

    return optree.tree_map(trained, normal_like(seed, params), is_leaf=lambda node: isinstance(node, Sharded | Frozen))
