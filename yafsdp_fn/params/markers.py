"""Markers in a tree of parameters, which say how the subtrees below them are sharded; how a class becomes a node."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_pytree
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE  # plain `optree.tree_map` must see our nodes

# ---- Registers classes as pytree nodes, with optree and with torch.

BARE = "yafsdp_fn, without markers"
"""optree's namespace in which a tree that is flattened is put together again without its markers, as blocks get it."""


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[Any, ...]],
    unflatten: Callable[[Any, tuple[Any, ...]], Any],
    entry: type[optree.PyTreeEntry] = optree.AutoEntry,
) -> None:
    """Registers `cls` with optree and with torch's pytrees, which torch.func uses: both must see the same nodes.

    flatten: returns children and context, and, if paths name them, the names; entry: a child's in a path
    """
    marks = issubclass(cls, Marker)
    rebuild: Any = unflatten
    optree.register_pytree_node(cls, flatten, rebuild, path_entry_type=entry, namespace=GLOBAL_NAMESPACE)
    if marks:
        optree.register_pytree_node(cls, flatten, lambda _, below: next(iter(below)), namespace=BARE)
    torch_pytree.register_pytree_node(
        cls,
        lambda node: (list(flatten(node)[0]), flatten(node)[1]),
        lambda children, context: unflatten(context, tuple(children)),
    )


# ---- Markers.
#
# Each top-level subtree is one *unit*: one flat vector, gathered and reduced as one. Four markers change that:
# `Stacked` (a leading layer axis `L`, one unit a layer), `Unit` (a subtree on its own, also inside a stack), `Pinned`
# (small leaves of all layers of a stack in one unit) and `frozen` (not trained). Markers are pytree nodes with one
# child, so `tree_map` sees through them, and `without_markers` removes them.


@dataclasses.dataclass(frozen=True)
class Marker:
    """A pytree node with one child that says how the subtree below it is sharded."""

    tree: Any


class Stacked(Marker):
    """A stack of layers: every leaf has a leading layer axis `L`, and each layer is one unit, visited by `scan`.

    >>> layers = ya.Stacked({"w": ya.Param((3, 4, 4))})         # three layers, three units
    >>> state = ya.init({"layers": layers}, mesh=mesh)
    >>> x, _ = ya.scan(lambda x, layer: (layer["w"] @ x, None), torch.ones(4), state.params["layers"])
    >>> x.shape
    torch.Size([4])
    """


class Unit(Marker):
    """A subtree that is a unit of its own; inside a `Stacked`, one unit a layer beside the layer's other unit.

    >>> tree = {"embed": ya.Unit({"table": ya.Param((16, 8))})}
    >>> state = ya.init(tree, mesh=mesh)
    >>> ya.apply(lambda w, tokens: w["table"][tokens], state.params["embed"], torch.tensor([3, 1])).shape
    torch.Size([2, 8])
    """


class Pinned(Marker):
    """Small leaves of a `Stacked`, such as norm gains: those of all L layers are one unit, gathered once per step.

        Stacked({"gain": Pinned(Param((L, E))), "w": Param((L, E, F))})
        unit layers.pinned | gain[0] gain[1] .. gain[L-1] |        units layers[i] | w[i] |

    Layer i is visited with both units, and its block sees `gain[i]`, as if nothing were marked. Small tensors leave the
    layers' collectives, and stay whole between forward and backward if the schedule gives units outside stacks a slot
    of their own. All leaves pinned inside one `Unit` of the layer, or frozen alike, are one unit. A stack that is
    pinned as a whole has no layers for a schedule, and policies of `remat` do not see it.

    The cost: each backward of a visit adds up the gradient of the whole unit, [L, ...], zero but at its layer: L times
    a layer's bytes per visit, L^2 per microbatch. Little for norm gains (1 MiB per visit for two of E = 4096 at L = 32
    in fp32, 0.14 ms of a CPU thread), and far too much for matrices.

    >>> def loss(params, x):
    ...     return ya.scan(lambda x, w: (w["w"] @ x * w["gain"], None), x, params["layers"])[0].sum()
    >>> stack = ya.Stacked({"gain": ya.Pinned(ya.Param((2, 8))), "w": ya.Param((2, 8, 8))})
    >>> [unit.name for unit in ya.planner.trace(loss, {"layers": stack}, torch.ones(8)).units]
    ['layers.pinned', 'layers[0]', 'layers[1]']
    """


@dataclasses.dataclass(frozen=True)
class Frozen(Marker):
    """A subtree that is gathered but never trained: no gradient, no optimizer state. Made by `frozen`."""

    dtype: torch.dtype | None = None


def frozen(tree: Any, dtype: torch.dtype | None = None) -> Frozen:
    """Marks `tree` as not trained. `dtype`: in which it is stored and gathered (default: `Precision.compute`); a leaf's
    own `compute` comes first.

    >>> tree = {**params, "embed": ya.frozen(params["embed"])}
    >>> trace = ya.planner.trace(loss_fn, tree, batch)
    >>> {unit.name: unit.trainable for unit in trace.units}
    {'embed': False, 'head': True, 'layers[0]': True, 'layers[1]': True, 'layers[2]': True, 'layers[3]': True}
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"frozen(tree, {dtype!r}): expected a floating dtype, such as torch.bfloat16")
    return Frozen(tree, dtype)


for marker in (Stacked, Unit, Pinned):
    register_node(marker, lambda n: ((n.tree,), type(n)), lambda kind, c: kind(*c))
register_node(Frozen, lambda n: ((n.tree,), n.dtype), lambda dtype, c: Frozen(c[0], dtype))


def is_marker(node: object) -> bool:
    return isinstance(node, Marker)


def has_marker(tree: Any) -> bool:
    """Returns whether a marker is anywhere in `tree`."""
    return any(map(is_marker, optree.tree_leaves(tree, is_leaf=is_marker)))


def without_markers(tree: Any) -> Any:
    """Returns `tree` without its markers, as `scan`'s body and `apply`'s function receive it.

    >>> ya.params.without_markers(ya.Unit({"gain": torch.ones(2)}))
    {'gain': tensor([1., 1.])}
    """
    if not has_marker(tree):
        return tree
    leaves, spec = optree.tree_flatten(tree, namespace=BARE)
    return optree.tree_unflatten(spec, leaves)
