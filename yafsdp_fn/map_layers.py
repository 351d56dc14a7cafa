"""map_layers: a function of whole layers, outside autograd. Export, statistics, optimizers that need matrices.

def map_layers(f, stack, *rest):
    return stack_of(f(layer, *others) for layer, *others in zip(stack, *rest))
"""

from collections.abc import Callable

import optree
import torch

from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.whole_layers import empty_stack, like_layer, whole_layers, write_layer
from yafsdp_fn.params.markers import strip
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree, stacked


@torch.no_grad()
def map_layers(f: Callable[..., Tree], stack: Tree, *rest: Tree) -> Tree:
    """`f(layer, *others)` for each layer of `stack`, whole, in the dtype of the leaves (the master's, not the compute).

    stack: a sharded stack, or plain tensors with a leading axis L; rest: more of the same length; sharded ones must be
        stacks of the same state, such as gradients or moments
    f: must copy what it keeps of its arguments; they are overwritten by later layers

    Every rank calls `f` for every layer, those of other stages too. Where it returns a tree like the layer, the result
    is a stack like `stack`: each rank keeps its shard. Anything else is stacked on a new axis [L, ...], the same on
    every rank (None stays None).
    """
    if not isinstance(stack, Sharded):
        if any(isinstance(other, Sharded) for other in rest):
            raise TypeError("map_layers: the first stack is plain, another is sharded; unshard that one, or shard this")
        columns = [_rows(tree) for tree in (stack, *rest)]
        if len({len(rows) for rows in columns}) > 1:
            raise ValueError(f"map_layers: stacks of different length: {', '.join(str(len(rows)) for rows in columns)}")
        return stacked([f(*layers) for layers in zip(*columns, strict=True)])
    memory = stack.owner
    if not isinstance(memory, Memory):
        raise TypeError(f"map_layers: {stack.entry.name!r} has no whole layers here: {memory.why_not_whole()}")
    with memory.comms.guarded(f"map_layers of {stack.entry.name}"):
        return _sharded(f, memory, stack, rest)


def _sharded(f: Callable[..., Tree], memory: Memory, stack: Sharded, rest: tuple[Tree, ...]) -> Tree:
    stacks = [tree for tree in (stack, *rest) if isinstance(tree, Sharded)]
    for other in stacks:
        if other.check().entry.length is None:
            raise TypeError(f"map_layers over {other.entry.name or 'params'!r}, which is not Stacked: use ya.apply")
        if other.owner is not memory or other.entry.length != stack.entry.length:
            what = f"{other.entry.name!r} is not of the same state and length as {stack.entry.name!r}"
            raise ValueError(f"map_layers: {what}")
    for tree in rest:
        lengths = set() if isinstance(tree, Sharded) else {leaf.shape[0] for leaf in optree.tree_leaves(tree)}
        if lengths - {stack.entry.length}:
            raise ValueError(f"map_layers: {stack.entry.name!r} has length {stack.entry.length}, another {lengths}")
    plain = [None if isinstance(tree, Sharded) else _rows(tree) for tree in rest]
    kept, outs = None, []
    for layer, whole in enumerate(whole_layers(memory, stacks)):
        given = iter(whole[1:])
        others = [next(given) if rows is None else rows[layer] for rows in plain]
        out = f(whole[0], *others)
        leaves = like_layer(stack, out)
        if leaves is None:
            outs.append(optree.tree_map(lambda x: torch.as_tensor(x).clone(), out))
            continue
        kept = empty_stack(stack, leaves) if kept is None else kept
        for (_, group, _), shard, of_group in zip(stack.group_leaves(), kept, leaves, strict=True):
            write_layer(shard, group, memory.comms.rank, layer, of_group)
    if kept is not None and outs:
        raise ValueError("map_layers: f returned a tree like the layer for some layers and another for others")
    return Sharded(tuple(kept), stack.context) if kept is not None else stacked(outs)


def _rows(tree: Tree) -> list[Tree]:
    leaves, spec = optree.tree_flatten(strip(tree))
    return [optree.tree_unflatten(spec, row) for row in zip(*(leaf.unbind() for leaf in leaves), strict=True)]
