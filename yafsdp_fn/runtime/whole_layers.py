"""Whole layers, one after the other, without autograd; the next one is gathered while this one is used."""

from collections.abc import Callable, Iterator, Sequence

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.flat import gather_into
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded, handles, handles_and_leaves
from yafsdp_fn.params.sources import shard_at_home
from yafsdp_fn.params.tree import Tree, dotted, must_be_function, shape_of, stacked, without_markers
from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.runtime.memory import StateMemory

# ---- Iterates over whole layers without autograd: the gather of the next overlaps with the use of this one.


def whole_layers(memory: StateMemory, stacks: Sequence[Sharded]) -> Iterator[list[Tree]]:
    """Yields, for each layer, the whole weights of every stack in the dtype of its leaves. They are valid until the
    next one.

    stacks: of the state of `memory`, of equal length. Two buffers alternate, as in a scan.
    """
    length = stacks[0].entry.length
    assert length is not None
    comms = memory.comms
    call = object()  # names the buffers of this call on the scoreboard
    parts = [(stack, group, leaf) for stack in stacks for _, group, leaf in stack.group_leaves()]
    # what is pinned is gathered once, with layer 0, and is in both
    even = [leaf.new_empty(group.shard_numel(comms) * comms.ranks) for _, group, leaf in parts]
    odd = [flat if group.pinned else torch.empty_like(flat) for flat, (_, group, _) in zip(even, parts, strict=True)]
    buffers = [even, odd]
    label = f"gather of {'+'.join(stack.entry.name for stack in stacks)}"

    def start(layer: int) -> None:
        # a frozen leaf's gradient is an expanded scalar, whose copy has no owner once it is submitted
        groups: list[Group] = []
        fulls: list[Tensor] = []
        shards: list[Tensor] = []
        for (stack, group, leaf), flat in zip(parts, buffers[layer % 2], strict=True):
            if layer == 0 or not group.pinned:
                groups.append(group)
                fulls.append(flat)
                shards.append(shard_at_home(stack, group, leaf, layer).contiguous())
        if comms.ranks == comms.stages == 1:
            for full, shard in zip(fulls, shards, strict=True):
                full.copy_(shard)
            return

        def work() -> None:
            if comms.stages > 1:
                for group, shard in zip(groups, shards, strict=True):
                    comms.stages_group.broadcast(shard, group.home(layer))
            gather_into(comms, fulls, shards)

        # in its place among the uses of buffers
        ready = comms.event()  # leaves that are not the state's own were made on the compute stream
        ready.complete()
        stream = comms.streams["gather"]
        for shard in shards:
            stream.mark_used(shard)
        event = comms.event()
        reads: list[Buffer] = [("shard", group.unit(layer)) for group in groups]
        waits = [ready, *memory.board.use(event, "gather", reads, [("layer", call, layer % 2)])]
        stream.submit(work, waits, event, f"{label}[{layer}] (map_whole_layers)")

    comms.check()
    start(0)
    try:
        for layer in range(length):
            if layer + 1 < length:
                start(layer + 1)
            with memory.using([("layer", call, layer % 2)]):
                flats = zip(parts, buffers[layer % 2], strict=True)
                views = iter([group.of_layer(group.leaves_of(flat, comms), layer) for (_, group, _), flat in flats])
                yield [
                    stack.entry.unflatten({g.name: next(views) for _, g, _ in stack.group_leaves()}) for stack in stacks
                ]
    finally:
        with memory.using([], [("layer", call, 0), ("layer", call, 1)]):  # a gather ahead may still write to a buffer
            memory.board.forget(("layer", call, 0), ("layer", call, 1))


# ---- results of a layer


def like_layer(stack: Sharded, tree: Tree) -> list[list[Tensor]] | None:
    """Returns the leaves of `tree` per group, if it has the structure and shapes of a layer of `stack`; else None."""
    groups = [group for _, group, _ in stack.group_leaves()]
    positions = stack.entry.unflatten({group.name: group.leaves for group in groups})
    if optree.tree_structure(tree) != optree.tree_structure(positions):
        return None
    found = dict(zip(optree.tree_leaves(positions), optree.tree_leaves(tree), strict=True))
    per_group = [[found[position] for position in group.leaves] for group in groups]
    for group, leaves in zip(groups, per_group, strict=True):
        for leaf, shape in zip(leaves, group.layer_shapes, strict=True):
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != shape:
                return None
    return per_group


def write_layer(shard: Tensor, group: Group, ranks: Ranks, layer: int, leaves: Sequence[Tensor]) -> None:
    """Writes this rank's part of one layer's whole `leaves` into `shard`, [L, n] or [n]; its gaps stay. Skips layers of
    other stages."""
    if (0 if group.pinned else layer) not in group.here:
        return
    row, first = (shard, layer) if group.pinned else (shard[group.here.index(layer)], 0)
    leaves = [group.local_slice(number, leaf, ranks) for number, leaf in enumerate(leaves)]
    # in a pinned unit a leaf is that of all layers
    for piece in group.pieces(row.numel(), ranks):
        flat = leaves[piece.leaf].reshape(-1)
        skip = first * flat.numel() - piece.origin  # where the layer begins, seen from the beginning of the piece
        a, b = max(skip, 0), min(skip + flat.numel(), piece.stop - piece.start)
        if a < b:
            row[piece.start + a : piece.start + b].copy_(flat[a - skip : b - skip])


# ---- map_whole_layers: maps a function over whole layers, outside autograd. For exports, statistics, optimizers of
# matrices.
#
# def map_whole_layers(f, stack, *rest):
#     return stack_of(f(layer, *others) for layer, *others in zip(stack, *rest))


@torch.no_grad()
def map_whole_layers(f: Callable[..., Tree], stack: Tree, *rest: Tree) -> Tree:
    """Calls `f(layer, *others)` for each layer of `stack`, whole, in the dtype of the leaves (the masters', not the
    compute's).

    stack: a sharded stack, or plain tensors with a leading axis L; rest: more of the same length; sharded ones must be
        stacks of the same state, such as gradients or moments
    f: must copy what it keeps of its arguments; later layers overwrite them

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
    for tree in (stack, *rest):
        _must_be_stack(tree)
    if not isinstance(stack, Sharded):
        if any(isinstance(other, Sharded) for other in rest):
            raise TypeError(
                "map_whole_layers: the first stack is plain, another is sharded; unshard that one, or shard this"
            )
        columns = [plain_layers(tree) for tree in (stack, *rest)]
        if len({len(rows) for rows in columns}) > 1:
            raise ValueError(
                f"map_whole_layers: stacks of different length: {', '.join(str(len(rows)) for rows in columns)}"
            )
        return stacked([f(*layers) for layers in zip(*columns, strict=True)])
    memory = stack.owner
    if not isinstance(memory, StateMemory):
        raise TypeError(f"map_whole_layers: {stack.entry.name!r} has no whole layers here: {memory.why_not_whole()}")
    with memory.comms.guarded(f"map_whole_layers of {stack.entry.name}"):
        return _sharded(f, memory, stack, rest)


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


def _sharded(f: Callable[..., Tree], memory: StateMemory, stack: Sharded, rest: tuple[Tree, ...]) -> Tree:
    # are they stacks of one state, as long as each other?
    stacks = [tree for tree in (stack, *rest) if isinstance(tree, Sharded)]
    name, length = stack.entry.name, stack.entry.length
    for tree in (stack, *rest):
        if not isinstance(tree, Sharded):
            lengths = {leaf.shape[0] for leaf in optree.tree_leaves(tree)}
            if lengths - {length}:
                raise ValueError(f"map_whole_layers: {name!r} has length {length}, another {lengths}")
        elif tree.check().entry.length is None:
            raise TypeError(
                f"map_whole_layers over {tree.entry.name or 'params'!r}, which is not Stacked: use ya.apply"
            )
        elif tree.owner is not memory or tree.entry.length != length:
            what = f"{tree.entry.name!r} is not of the same state and length as {name!r}"
            raise ValueError(f"map_whole_layers: {what}")
    # results like a layer go into shards, others are collected
    plain = [None if isinstance(tree, Sharded) else plain_layers(tree) for tree in rest]
    kept: list[Tensor] | None = None
    outs: list[Tree] = []
    for layer, whole in enumerate(whole_layers(memory, stacks)):
        given = iter(whole[1:])
        others = [next(given) if rows is None else rows[layer] for rows in plain]
        out = f(whole[0], *others)
        leaves = like_layer(stack, out)
        if leaves is None:
            outs.append(optree.tree_map(lambda x: torch.as_tensor(x).clone(), out))
            continue
        if kept is None:  # a shard of zeros per group, in the dtype of the function's result
            found = zip(stack.leaves, leaves, strict=True)
            kept = [torch.zeros_like(shard, dtype=of_group[0].dtype) for shard, of_group in found]
        for (_, group, _), shard, of_group in zip(stack.group_leaves(), kept, leaves, strict=True):
            write_layer(shard, group, memory.comms, layer, of_group)
    if kept is not None and outs:
        raise ValueError("map_whole_layers: f returned a tree like the layer for some layers and another for others")
    return Sharded(tuple(kept), stack.context) if kept is not None else stacked(outs)


def plain_layers(tree: Tree) -> list[Tree]:
    """Returns the layers of a stack of tensors, as views."""
    leaves, spec = optree.tree_flatten(without_markers(tree))
    return [optree.tree_unflatten(spec, row) for row in zip(*(leaf.unbind() for leaf in leaves), strict=True)]
