"""Whole layers, one after the other, without autograd."""

from collections.abc import Callable, Sequence

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.markers import BARE
from yafsdp_fn.params.sharded import Sharded, handles, handles_and_leaves
from yafsdp_fn.params.sources import fill_group, fill_row, whole_units
from yafsdp_fn.params.tree import Tree, dotted, must_be_function, shape_of, stacked
from yafsdp_fn.runtime.memory import StateMemory

# ---- results of a layer


def like_layer(stack: Sharded, tree: Tree) -> list[list[Tensor]] | None:
    """Returns the leaves of `tree` per group, if it has the structure and shapes of a layer of `stack`; else None."""
    groups = stack.groups
    numbers = stack.entry.unflatten({group.name: group.leaves for group in groups})
    if optree.tree_structure(tree) != optree.tree_structure(numbers):
        return None
    by_number = dict(zip(optree.tree_leaves(numbers), optree.tree_leaves(tree), strict=True))
    per_group: list[list[Tensor]] = []
    for group in groups:
        leaves = [by_number[number] for number in group.leaves]
        for leaf, shape in zip(leaves, group.layer_shapes, strict=True):
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != shape:
                return None
        per_group.append(leaves)
    return per_group


# ---- map_whole_layers: maps a function over whole layers, outside autograd. For exports, statistics, optimizers of
# matrices.
#
# def map_whole_layers(f, stack, *rest):
#     return stack_of(f(layer, *others) for layer, *others in zip(stack, *rest))


def must_be_constants(what: str, found: Sequence[Sharded]) -> None:
    """Raises RuntimeError where gradients of these handles are asked for, which `what` would lose."""
    if torch.is_grad_enabled() and any(leaf.requires_grad for handle in found for leaf in handle.leaves):
        raise RuntimeError(
            f"{what} in a loss: no gradient comes back through it. Compute with whole weights in ya.scan or ya.apply; "
            "where they are to be constants, call it under torch.no_grad()"
        )


def map_whole_layers(f: Callable[..., Tree], stack: Tree, *rest: Tree) -> Tree:
    """Calls `f(layer, *others)` for each layer of `stack`, whole, in the dtype of the leaves (the masters', not the
    compute's).

    stack: a sharded stack, or plain tensors with a leading axis L; rest: more of the same length; sharded ones must be
        stacks of the same state, such as gradients or moments
    Every rank calls `f` for every layer, those of other stages too. If it returns a tree like the layer, the result is
    a stack like `stack`: each rank keeps its shard. Anything else is stacked on a new axis [L, ...], the same on every
    rank (None stays None).

    >>> ya.map_whole_layers(lambda layer: layer["up"].norm(), state.params["layers"]).shape    # a number for each layer
    torch.Size([4])
    >>> halved = ya.map_whole_layers(lambda layer: {name: w / 2 for name, w in layer.items()}, plain["layers"])
    >>> torch.equal(halved["up"], plain["layers"]["up"] / 2)
    True
    """
    must_be_function(f, "map_whole_layers(f, stack)")
    trees = (stack, *rest)
    for tree in trees:
        _must_be_stack(tree)
    # are they stacks of one state, as long as each other?
    for tree in trees:
        if not isinstance(tree, Sharded):
            continue
        if not isinstance(stack, Sharded):
            raise TypeError(
                "map_whole_layers: the first stack is plain, another is sharded; unshard that one, or shard this"
            )
        if tree.check().entry.length is None:
            raise TypeError(
                f"map_whole_layers over {tree.entry.name or 'params'!r}, which is not Stacked: use ya.apply"
            )
        memory = tree.owner
        if not isinstance(memory, StateMemory):
            name = tree.entry.name
            raise TypeError(f"map_whole_layers: {name!r} has no whole layers here: {memory.why_not_whole()}")
        if memory is not stack.owner or tree.entry.length != stack.entry.length:
            what = f"{tree.entry.name!r} is not of the same state and length as {stack.entry.name!r}"
            raise ValueError(f"map_whole_layers: {what}")
    lengths, layers = zip(*map(_layers, trees), strict=True)
    if len(set(lengths)) > 1:
        raise ValueError(f"map_whole_layers: stacks of different length: {', '.join(map(str, lengths))}")
    must_be_constants("map_whole_layers", handles(trees))
    with torch.no_grad():
        if isinstance(stack, Sharded):
            return _sharded(f, stack, layers)
        return stacked([f(*[give(layer) for give in layers]) for layer in range(lengths[0])])


def _layers(tree: Tree) -> tuple[int, Callable[[int], Tree]]:
    """Returns the number of layers of a stack, and what gives each of them whole."""
    if not isinstance(tree, Sharded):
        rows = plain_layers(tree)
        return len(rows), rows.__getitem__
    return tree.entry.length or 0, whole_units(tree)


def _must_be_stack(tree: Tree) -> None:
    """Raises TypeError unless `tree` is one sharded stack, or has tensors with an axis of layers alone."""
    if isinstance(tree, Sharded):
        return
    for accessor, leaf in handles_and_leaves(tree):
        if isinstance(leaf, Sharded):
            stacks = [handle.entry.name for handle in handles(tree) if handle.entry.length is not None]
            raise TypeError(f"map_whole_layers: expected one stack, got a tree with {leaf!r}; stacks in it: {stacks}")
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            got = shape_of(leaf)
            raise TypeError(
                f"map_whole_layers: {dotted(accessor)}: expected a tensor with an axis of layers, got {got}"
            )


def _sharded(f: Callable[..., Tree], stack: Sharded, layers: Sequence[Callable[[int], Tree]]) -> Tree:
    """Returns a stack like `stack` where `f` returns trees like a layer; else its results, stacked."""
    memory = stack.owner
    name = stack.entry.name
    assert isinstance(memory, StateMemory)
    groups = stack.groups
    shards: list[Tensor] = []  # of the new stack, if it is one
    pinned: dict[int, list[list[Tensor]]] = {}  # leaves of every layer that share a unit, by group
    others: list[Tree] = []
    for layer in range(stack.entry.length or 0):
        with memory.comms.guarded(f"map_whole_layers of {name}[{layer}]"):
            out = f(*[give(layer) for give in layers])
        leaves = like_layer(stack, out)
        if leaves is None:
            others.append(optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else torch.as_tensor(x), out))
            continue
        if not shards:  # in the dtype of the function's result
            for shard, of_group in zip(stack.leaves, leaves, strict=True):
                shards.append(torch.zeros_like(shard, dtype=of_group[0].dtype))
        for number, group in enumerate(groups):
            if group.pinned:
                pinned.setdefault(number, []).append(leaves[number])
            elif layer in group.here:
                row = shards[number][group.here.index(layer)]
                fill_row(row, group, memory.comms, leaves[number].__getitem__)
    if not shards:
        return stacked(others)
    if others:
        raise ValueError("map_whole_layers: f returned a tree like the layer for some layers and another for others")
    for number, by_layer in pinned.items():
        group = groups[number]
        sources = [lambda layer, at=at, given=by_layer: given[layer or 0][at] for at in range(len(group.leaves))]
        fill_group(shards[number], group, memory.comms, sources)
    return Sharded(tuple(shards), stack.context)


def plain_layers(tree: Tree) -> list[Tree]:
    """Returns the layers of a stack of tensors, as views."""
    leaves, spec = optree.tree_flatten(tree, namespace=BARE)
    return [optree.tree_unflatten(spec, row) for row in zip(*(leaf.unbind() for leaf in leaves), strict=True)]
