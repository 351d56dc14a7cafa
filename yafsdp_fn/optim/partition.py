"""Transformations of some leaves only, chosen by a rule or by labels, as in Optax."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch

from yafsdp_fn.optim.base import (
    Chain,
    GradientTransformation,
    OnHost,
    State,
    as_transformation,
    chain,
    checked_update,
    identity,
    must_not_be_negative,
    needed,
    stateless,
)
from yafsdp_fn.optim.leafwise import Leafwise, leafwise
from yafsdp_fn.optim.on_host import on_host
from yafsdp_fn.params.leaf_mask import LeafRule, leaf_mask, must_be_rule, restricted
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Param, Tree

# ---- Transformations of some leaves only, chosen by a rule `(path, per-layer Param) -> bool`.


@dataclasses.dataclass(frozen=True)
class Decay:
    """Rule: add `weight_decay * param`, where `mask` (everywhere if None)."""

    weight_decay: float
    mask: LeafRule | None = None


def masked(inner: Any, mask: LeafRule) -> GradientTransformation:
    """Applies `inner` where `mask` is true; elsewhere updates pass through unchanged, as in Optax. It is a `partition`,
    so a norm inside it is the norm of the masked leaves.

    mask: `(path, per-layer Param) -> bool`

    >>> tx = ya.optim.masked(ya.optim.scale(0.0), lambda path, p: path == "frozen")
    >>> tree = {"frozen": g, "trained": g}
    >>> tx.update(tree, tx.init(tree))[0]
    {'frozen': tensor([0., -0.]), 'trained': tensor([ 3., -4.])}
    """
    must_be_rule(mask, "mask")
    tx = as_transformation(inner)
    if isinstance(tx.rule, Decay) and tx.rule.mask is None:
        return add_decayed_weights(tx.rule.weight_decay, mask)
    return partition({"in": tx, "out": identity()}, lambda path, param: "in" if mask(path, param) else "out")


def add_decayed_weights(weight_decay: float, mask: LeafRule | None = None) -> GradientTransformation:
    """Adds `weight_decay * param` to the updates of the leaves that `mask` chooses, by default all. Raises
    ValueError for a negative number, TypeError for a schedule.

    >>> update(ya.optim.add_decayed_weights(0.1))
    tensor([ 3.1000, -4.2000])
    """
    if callable(weight_decay):
        raise TypeError(
            "add_decayed_weights: weight_decay is a function, expected a number; one that follows a schedule is a "
            "transformation of your own, in a few lines (docs/optimizers.md)"
        )
    must_not_be_negative("weight_decay", weight_decay)
    if mask is not None:
        must_be_rule(mask, "mask")

    def update(updates: Tree, params: Tree | None) -> Tree:
        params = needed("add_decayed_weights", params)
        new = optree.tree_map(lambda u, p: u + weight_decay * p, updates, params)
        return new if mask is None else optree.tree_map(torch.where, leaf_mask(mask, params), new, updates)

    return stateless(update, rule=Decay(weight_decay, mask))


# ---- Combines several transformations, each for the leaves of its label, as in Optax.

Labels = Callable[[str, Param], str]
"""The label of a logical leaf, from its dotted path and per-layer Param (a `LayerParam` inside a stack)."""


class PartitionState(NamedTuple):
    """The state of `partition`. inner_states: label -> state of its transformation, on the part of the tree with that
    label"""

    inner_states: dict[str, State]


@dataclasses.dataclass(frozen=True)
class Partition:
    """Rule: by label, a transformation and the rule that chooses its leaves."""

    parts: Mapping[str, tuple[GradientTransformation, LeafRule]]


def partition(transforms: Mapping[str, Any], labels: Labels) -> GradientTransformation:
    """Applies `transforms[label]` to the leaves of that label.

    labels: `(path, per-layer Param) -> label`

    Each transformation sees only its part of the tree: a norm inside one is the norm of that part. Its state has that
    part only, unit by unit: if leaves of several labels share a unit, the states of all of them span the unit, with
    zeros at the others' leaves. `ya.Pinned` and `ya.Unit` separate such leaves.

    Raises ValueError for a leaf whose label has no transformation.

    >>> tx = ya.optim.partition(
    ...     {"fast": ya.optim.sgd(1.0), "slow": ya.optim.sgd(0.1)}, lambda path, p: "fast" if path == "head" else "slow"
    ... )
    >>> tree = {"body": g, "head": g}
    >>> tx.update(tree, tx.init(tree), tree)[0]
    {'body': tensor([-0.3000,  0.4000]), 'head': tensor([-3.,  4.])}
    """
    must_be_rule(labels, "labels")
    parts = {
        label: (_restricted_to(as_transformation(tx), rule), rule)
        for label, tx in transforms.items()
        for rule in [_Chosen(labels, label, tuple(transforms))]
    }

    def init(params: Tree) -> State:
        states = {}
        for label, (part, rule) in parts.items():
            states[label] = part.init(restricted(params, rule))
        return PartitionState(states)

    def update(updates: Tree, state: PartitionState, params: Tree | None = None) -> tuple[Tree, State]:
        out = updates
        states = {}
        for label, (part, rule) in parts.items():
            own = restricted(updates, rule, zeros=True)
            of_params = None if params is None else restricted(params, rule, zeros=True)
            new, states[label] = checked_update(part, own, state.inner_states[label], of_params)
            out = merged(out, new, rule)
        return out, PartitionState(states)

    elementwise = all(part.elementwise for part, _ in parts.values())
    return GradientTransformation(init, update, elementwise, Partition(parts))


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The rule of a label."""

    label_of: Labels
    label: str
    known: tuple[str, ...]

    def __call__(self, path: str, param: Param) -> bool:
        label = self.label_of(path, param)
        if label not in self.known:
            raise ValueError(f"partition: {path} has the label {label!r}; there are transformations for {self.known}")
        return label == self.label


def _restricted_to(tx: GradientTransformation, rule: LeafRule) -> GradientTransformation:
    """Returns `tx` with its leafwise parts limited to leaves that `rule` chooses, which may share a unit with
    others."""
    if isinstance(tx.rule, Chain):
        return chain(*(_restricted_to(part, rule) for part in tx.rule.parts))
    if isinstance(tx.rule, OnHost):
        return on_host(_restricted_to(tx.rule.inner, rule))
    if isinstance(tx.rule, Leafwise):
        before = tx.rule.where
        return leafwise(dataclasses.replace(tx.rule, where=lambda path, p: rule(path, p) and before(path, p)))
    return tx


def merged(tree: Tree, part: Tree, rule: LeafRule) -> Tree:
    """Returns `tree` with the leaves that `rule` chooses from `part`, which is `restricted` to them."""

    def put(node: Any, own: Any) -> Any:
        if not isinstance(node, Sharded):
            return node if own is None else own
        leaves = {number: leaf for number, _, leaf in node.group_leaves()}
        for (number, _, leaf), chosen in zip(own.group_leaves(), leaf_mask(rule, own).leaves, strict=True):
            leaves[number] = torch.where(chosen, leaf, leaves[number])
        return Sharded(tuple(leaves.values()), node.context)

    return optree.tree_map(put, tree, part, is_leaf=is_sharded)
