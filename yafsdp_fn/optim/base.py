"""A gradient transformation is a pair of pure functions, as in Optax:

    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    params = apply_updates(params, updates)

Trees are any pytrees of tensors. Those of a sharded state have local flat shards as leaves; the same code serves
both, as long as every element is treated on its own.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.tree import Tree
from yafsdp_fn.params.whole import shards_of, whole_tree

State = Any
"""An optimizer state: a pytree of tensors."""


class GradientTransformation(NamedTuple):
    """`init(params) -> state` and `update(updates, state, params=None) -> (updates, state)`, both pure.

    elementwise: `update` may run on flat shards, because it treats every element on its own (or reduces over all
        ranks, as `clip_by_global_norm` does). What does not declare it, and has no rule, is given whole trees.
    rule: the same transformation as data, for `step_`, which knows fused kernels for some sequences of rules. It
        changes speed, never results: `update` is the definition.
    """

    init: Callable[[Tree], State]
    update: Callable[..., tuple[Tree, State]]
    elementwise: bool = False
    rule: object = None


OnWrite = Callable[[], None]
"""Called before the first write to parameters or state."""

Scalar = Tensor | None
"""A 0-dim tensor that the host never reads, or None for the usual value."""

Stage = tuple[GradientTransformation, State]
"""A transformation of a chain, with its state."""


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


class Chain(NamedTuple):
    """The rule of `chain`. Its state is the tuple of the parts' states."""

    parts: tuple[GradientTransformation, ...]


def as_transformation(tx: Any) -> GradientTransformation:
    """`tx` itself, or a foreign `(init, update)` pair. What declares nothing is given whole trees: `on_whole_trees`."""
    if isinstance(tx, GradientTransformation):
        return tx if tx.elementwise or tx.rule is not None else on_whole_trees(tx)
    if isinstance(tx, tuple) and len(tx) == 2 and all(map(callable, tx)):
        return on_whole_trees(GradientTransformation(*tx))
    raise TypeError(f"expected a GradientTransformation or a pair of functions (init, update), got {tx!r}")


@dataclasses.dataclass(frozen=True)
class WholeTrees:
    """Rule: `inner` on whole trees."""

    inner: GradientTransformation


def on_whole_trees(tx: GradientTransformation) -> GradientTransformation:
    """`tx`, which on a sharded tree is given all leaves whole, on every rank: right for any `tx`, and the work and the
    memory of one rank, gradients, parameters and state unsharded. `assume_elementwise` and `assume_leafwise` declare
    what spares that."""

    def init(params: Tree) -> State:
        return tx.init(whole_tree(params))

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        given = None if params is None else whole_tree(params)
        new, state = tx.update(whole_tree(updates), state, given)
        return shards_of(new, updates), state

    return GradientTransformation(init, update, rule=WholeTrees(tx))


def assume_elementwise(tx: Any) -> GradientTransformation:
    """`tx` with the promise that it treats every element on its own, so that it may run on flat shards.

    The promise is not checked. An operation over rows, columns or whole leaves (Muon, Adafactor, trust ratios,
    centred gradients) breaks it: a flat shard cuts through leaves, and the result would be wrong without an error. So
    does an update that depends on where its elements lie (noise from `ya.normal_like`), if units take their steps one
    by one.
    """
    tx = as_transformation(tx)
    if isinstance(tx.rule, WholeTrees):
        tx = tx.rule.inner
    return tx if tx.elementwise else GradientTransformation(tx.init, tx.update, elementwise=True)


def stateless(update: Callable[[Tree, Tree | None], Tree], rule: object = None) -> GradientTransformation:
    """An elementwise transformation without state, from `update(updates, params) -> updates`."""
    return GradientTransformation(
        init=lambda params: EmptyState(),
        update=lambda updates, state, params=None: (update(updates, params), state),
        elementwise=True,
        rule=rule,
    )


def identity() -> GradientTransformation:
    """Passes updates through."""
    return stateless(lambda updates, params: updates, rule=Chain(()))


def chain(*txs: Any) -> GradientTransformation:
    """Applies `txs` one after the other; the state is the tuple of theirs. Foreign pairs may take part."""
    parts = tuple(map(as_transformation, txs))

    def init(params: Tree) -> State:
        return tuple(part.init(params) for part in parts)

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        states = []
        for part, old in zip(parts, state, strict=True):
            updates, new = part.update(updates, old, params)
            states.append(new)
        return updates, tuple(states)

    return GradientTransformation(init, update, all(part.elementwise for part in parts), Chain(parts))


def stages(tx: Any, state: State = None) -> Iterator[Stage]:
    """The transformations of nested chains, in order, each with its part of `state` (None without one)."""
    tx = as_transformation(tx)
    if not isinstance(tx.rule, Chain):
        yield tx, state
        return
    parts = tx.rule.parts
    states = [None] * len(parts) if state is None else state
    if len(states) != len(parts):
        raise ValueError(
            f"optim: the state has {len(states)} parts, this chain {len(parts)}: the state was made "
            "with another optimizer; pass the one that ya.init was given"
        )
    for part, of_part in zip(parts, states, strict=True):
        yield from stages(part, of_part)


def name(tx: GradientTransformation) -> str:
    """What an error calls a transformation: where its `update` was defined."""
    function = tx.rule.inner.update if isinstance(tx.rule, WholeTrees) else tx.update
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"


def scaled(updates: Tree, factor: Any) -> Tree:
    """`updates * factor`, each in its own dtype."""
    return optree.tree_map(lambda u: (u * factor).to(u.dtype), updates)


def new_count(params: Tree) -> Tensor:
    """A step counter on the parameters' device: it stands still in a skipped step, which only the device knows."""
    leaves = optree.tree_leaves(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """`params + updates`, each in its parameter's dtype."""
    return optree.tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)
