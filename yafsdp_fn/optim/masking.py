"""Transformations of some leaves only, chosen by a rule `(path, per-layer Param) -> bool`."""

import dataclasses
from typing import Any, NamedTuple

import optree
import torch

from yafsdp_fn.optim.base import GradientTransformation, State, as_transformation, stateless
from yafsdp_fn.params.leaf_mask import LeafRule, as_rule, leaf_mask, must_fit
from yafsdp_fn.params.tree import Tree


class MaskedState(NamedTuple):
    """inner_state: of the wrapped transformation, over all leaves (a flat shard cannot leave some out)."""

    inner_state: State


@dataclasses.dataclass(frozen=True)
class Decay:
    """Rule: add `weight_decay * param`, where `mask` (everywhere if None)."""

    weight_decay: float
    mask: LeafRule | None = None


@dataclasses.dataclass(frozen=True)
class Masked:
    """Rule: `inner`, where `mask`."""

    inner: GradientTransformation
    mask: LeafRule


def masked(inner: Any, mask: LeafRule | Tree) -> GradientTransformation:
    """Applies `inner` where `mask` is true; elsewhere updates pass through unchanged, as in Optax.

    `inner` sees zeros outside the mask, so that a norm inside it is the norm of the masked leaves.
    mask: a rule, or a tree of bools like the parameters
    """
    tx, rule_of = as_transformation(inner), as_rule(mask)

    def init(params: Tree) -> State:
        must_fit(rule_of, params)
        return MaskedState(tx.init(params))

    def update(updates: Tree, state: MaskedState, params: Tree | None = None) -> tuple[Tree, State]:
        chosen = leaf_mask(rule_of, updates if params is None else params)

        def inside(tree: Tree) -> Tree:
            return optree.tree_map(lambda m, t: torch.where(m, t, 0), chosen, tree)

        new, inner_state = tx.update(inside(updates), state.inner_state, None if params is None else inside(params))
        return optree.tree_map(torch.where, chosen, new, updates), MaskedState(inner_state)

    rule: object = Masked(tx, rule_of)
    if isinstance(tx.rule, Decay) and tx.rule.mask is None:
        rule = Decay(tx.rule.weight_decay, rule_of)
    return GradientTransformation(init, update, tx.elementwise, rule)


def add_decayed_weights(weight_decay: float, mask: LeafRule | Tree | None = None) -> GradientTransformation:
    """Adds `weight_decay * param` to the updates of the leaves that `mask` chooses, by default all."""

    def update(updates: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise ValueError("add_decayed_weights: needs the parameters: call `tx.update(updates, state, params)`")
        return optree.tree_map(lambda u, p: u + weight_decay * p, updates, params)

    tx = stateless(update, rule=Decay(weight_decay))
    return tx if mask is None else masked(tx, mask)
