"""Transformations of whole leaves: each leaf of each layer on its own, once, by one rank (owners.py).

    tx = assume_leafwise(GradientTransformation(init, update))

`init(leaf)` and `update(updates, state, leaf)` get one leaf of one layer, [m, n] of a stacked [L, m, n]. On a plain
tree that is a loop over leaves and layers. On a sharded tree states are in flat shards beside the parameters: the
leaves of a state are laid out as those of a unit, so they are cut evenly, and saved and loaded at any number of ranks
(owner_compute.py).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import EmptyState, GradientTransformation, State, WholeTrees, as_transformation, chain
from yafsdp_fn.optim.owner_compute import Leafwise, plan, state_of, update_handle
from yafsdp_fn.params.leaf_mask import LeafRule, plain_param
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Stacked, Tree, dotted, stacked


class LeafwiseState(NamedTuple):
    """The state of a leafwise transformation.

    of: a tree like the parameters with each leaf's state in its place, those of a stack's layers stacked. On a sharded
    tree: handles on flat shards of the states' leaves
    """

    of: Tree


def assume_leafwise(
    tx: Any,
    dtype: torch.dtype | Callable[[torch.device], torch.dtype | None] | None = None,
    *,
    params: bool = False,
    where: LeafRule | None = None,
) -> GradientTransformation:
    """Applies `tx` to each leaf of each layer on its own: whole, once, at one rank. The promise that this is what `tx`
    does on a whole tree is not checked; needing several leaves at once, as a global norm does, breaks it.

    tx: its `init` and `update` get single leaves. Leaves of its state are floating-point tensors of one dtype, and
        begin with values that depend on the leaf's shape alone
    dtype: of updates when they travel and when `tx` gets them (None: their own), or a function from the device to it
    params: `update` reads the parameter, which then travels too; else it gets None
    where: a rule `(path, per-layer Param)`; other leaves pass through unchanged
    """
    inner = as_transformation(tx)
    inner = inner.rule.inner if isinstance(inner.rule, WholeTrees) else inner
    rule = Leafwise(inner, dtype if callable(dtype) else lambda device: dtype, params)
    return leafwise(rule if where is None else dataclasses.replace(rule, where=where))


def leafwise(rule: Leafwise) -> GradientTransformation:
    """Returns the transformation of a rule."""

    def init(params: Tree) -> State:
        return LeafwiseState(optree.tree_map_with_accessor(partial(_init, rule), params, is_leaf=is_sharded))

    def update(updates: Tree, state: LeafwiseState, params: Tree | None = None) -> tuple[Tree, State]:
        accessors, nodes, spec = optree.tree_flatten_with_accessor(updates, is_leaf=is_sharded)
        states = spec.flatten_up_to(state.of)
        weights = spec.flatten_up_to(params) if rule.params and params is not None else [None] * len(nodes)
        handles = [node for node in nodes if isinstance(node, Sharded)]
        plans = plan(rule, handles)
        columns: Any = zip(accessors, nodes, states, weights, strict=True)
        out = [
            update_handle(plans, rule, node, kept, weight)
            if isinstance(node, Sharded)
            else _plain(rule, at, node, kept, weight)
            for at, node, kept, weight in columns
        ]
        new, after = ([pair[i] for pair in out] for i in range(2))
        return optree.tree_unflatten(spec, new), LeafwiseState(optree.tree_unflatten(spec, after))

    return GradientTransformation(init, update, rule=rule)


def together(*txs: GradientTransformation) -> GradientTransformation:
    """Combines a chain of `assume_leafwise` transformations into one, so that leaves travel once."""
    rules = [tx.rule for tx in txs if isinstance(tx.rule, Leafwise)]
    assert len(rules) == len(txs)
    inner = chain(*(rule.inner for rule in rules))
    return leafwise(dataclasses.replace(rules[0], inner=inner, params=any(rule.params for rule in rules)))


# ---- a plain tree: the definition


def _init(rule: Leafwise, at: optree.PyTreeAccessor, node: Any) -> Any:
    if isinstance(node, Sharded):
        return state_of(rule, node)
    if not rule.where(dotted(at), plain_param(at, node)):
        return EmptyState()
    return stacked([rule.inner.init(leaf) for leaf in node]) if _in_stack(at) else rule.inner.init(node)


def _plain(rule: Leafwise, at: optree.PyTreeAccessor, node: Tensor, state: Any, params: Any) -> tuple[Tensor, Any]:
    if not rule.where(dotted(at), plain_param(at, node)):
        return node, state
    given = node.to(rule.dtype(node.device) or node.dtype)
    scale = rule.scale(tuple(plain_param(at, node).shape))
    if not _in_stack(at):
        new, after = rule.update(given, state, params)
        return new.to(node.dtype) * scale, after
    out = [
        rule.update(leaf, optree.tree_map(itemgetter(i), state), None if params is None else params[i])
        for i, leaf in enumerate(given)
    ]
    return torch.stack([new for new, _ in out]).to(node.dtype) * scale, stacked([after for _, after in out])


def _in_stack(at: optree.PyTreeAccessor) -> bool:
    return any(issubclass(entry.type, Stacked) for entry in at)
