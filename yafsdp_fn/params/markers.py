"""Markers in a tree of parameters: how the subtrees below them are sharded.

Each top-level subtree is one *unit*: one flat vector, gathered and reduced as one. Four markers change that:
`Stacked` (a leading layer axis `L`, one unit a layer), `Unit` (a subtree on its own, also inside a stack), `Pinned`
(small leaves of all layers of a stack in one unit) and `frozen` (not trained). Markers are pytree nodes with one child,
so `tree_map` sees through them, and `strip` removes them.
"""

import dataclasses
from typing import Any

import optree
import torch

from yafsdp_fn.params.nodes import register_node


@dataclasses.dataclass(frozen=True)
class Marker:
    """A pytree node with one child that says how the subtree below it is sharded."""

    tree: Any


class Stacked(Marker):
    """A stack of layers: every leaf has a leading layer axis `L`, and each layer is one unit, visited by `scan`."""


class Unit(Marker):
    """A subtree that is a unit of its own; inside a `Stacked`, one unit a layer beside the layer's other unit."""


class Pinned(Marker):
    """Small leaves of a `Stacked`, such as norm gains: those of all L layers are one unit, gathered once per step.

        Stacked({"gain": Pinned(Param((L, E))), "w": Param((L, E, F))})
        unit layers.pinned | gain[0] gain[1] .. gain[L-1] |        units layers[i] | w[i] |

    Layer i is visited with both units, and its block sees `gain[i]`, as if nothing were marked. Small tensors are out
    of the layers' collectives, and stay whole between forward and backward where a schedule gives a unit outside of
    stacks a slot of its own. All that is pinned inside one `Unit` of the layer, or frozen alike, is one unit. A stack
    that is pinned as a whole has no layers for a schedule, and policies of `remat` do not see it.

    The cost: each backward of a visit adds up the gradient of the whole unit, [L, ...] and zero but at its layer: L
    times a layer's bytes per visit, L^2 per microbatch. Little for norm gains (1 MiB per visit for two of E = 4096 at
    L = 32 in fp32, 0.14 ms of a CPU thread), and far too much for matrices.
    """


@dataclasses.dataclass(frozen=True)
class Frozen(Marker):
    """A subtree that is gathered but never trained: no gradient, no optimizer state. Made by `frozen`."""

    dtype: torch.dtype | None = None


def frozen(tree: Any, dtype: torch.dtype | None = None) -> Frozen:
    """Marks `tree` as not trained. `dtype`: what it is stored and gathered in (default: `Precision.compute`)."""
    return Frozen(tree, dtype)


register_node(Stacked, lambda n: ((n.tree,), None), lambda _, c: Stacked(*c))
register_node(Unit, lambda n: ((n.tree,), None), lambda _, c: Unit(*c))
register_node(Pinned, lambda n: ((n.tree,), None), lambda _, c: Pinned(*c))
register_node(Frozen, lambda n: ((n.tree,), n.dtype), lambda dtype, c: Frozen(c[0], dtype))


def is_marker(node: object) -> bool:
    return isinstance(node, Marker)


def has_marker(tree: Any) -> bool:
    """Whether a marker stands anywhere in `tree`."""
    return any(is_marker(node) for node in optree.tree_leaves(tree, is_leaf=is_marker))


def strip(tree: Any) -> Any:
    """`tree` without its markers: what `scan`'s body and `apply`'s function receive."""
    if not has_marker(tree):
        return tree
    return optree.tree_map(lambda node: strip(node.tree) if is_marker(node) else node, tree, is_leaf=is_marker)
