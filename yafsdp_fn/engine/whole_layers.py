"""Whole layers, one after the other, without autograd: the gather of the next overlaps with the use of this one."""

from collections.abc import Iterator, Sequence

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm.flat import gather_into
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.schedules.buffers import Buffer


def whole_layers(memory: Memory, stacks: Sequence[Sharded]) -> Iterator[list[Tree]]:
    """For each layer, the whole weights of every stack, in the dtype of its leaves. They are valid until the next one.

    stacks: of the state of `memory`, and of one length. Two buffers alternate, as in a scan.
    """
    length = stacks[0].entry.length
    assert length is not None
    comms, call = memory.comms, object()  # names the buffers of this call on the scoreboard
    parts = [(group, leaf) for stack in stacks for _, group, leaf in stack.group_leaves()]

    def buffer(group: Group, leaf: Tensor) -> Tensor:
        return leaf.new_empty(group.layout.padded_numel(comms.ranks))

    even = [buffer(*part) for part in parts]
    odd = [flat if part[0].pinned else buffer(*part) for flat, part in zip(even, parts, strict=True)]
    buffers = [even, odd]

    def start(layer: int) -> None:
        # pinned units come with layer 0 and stay
        starting = [
            (g, leaf, flat)
            for (g, leaf), flat in zip(parts, buffers[layer % 2], strict=True)
            if layer == 0 or not g.pinned
        ]
        # a frozen leaf's gradient is an expanded scalar: its copy has no owner once the gather is submitted
        jobs = [(flat, _at_home(group, leaf, layer, comms.ranks).contiguous()) for group, leaf, flat in starting]
        if comms.ranks == comms.stages == 1:
            for out, shard in jobs:
                out.copy_(shard)
            return
        homes = [group.home(0 if group.pinned else layer) for group, _, _ in starting]
        shards: list[Buffer] = [("shard", group.unit(layer)) for group, _, _ in starting]
        label = f"gather of {'+'.join(stack.entry.name for stack in stacks)}[{layer}] (map_layers)"

        def work() -> None:
            if comms.stages > 1:
                for (_, shard), home in zip(jobs, homes, strict=True):
                    comms.stages_group.broadcast(shard, home)
            gather_into(comms, *map(list, zip(*jobs, strict=True)))

        ready = comms.event()  # leaves that are not the state's own were made on the compute stream
        ready.complete()
        stream = comms.streams["gather"]
        for _, shard in jobs:
            stream.keep(shard)
        event = comms.event()
        waits = [ready, *memory.board.use(event, "gather", shards, [("layer", call, layer % 2)])]
        stream.submit(work, waits, event, label)

    comms.check()
    start(0)
    try:
        for layer in range(length):
            if layer + 1 < length:
                start(layer + 1)
            flats = zip(parts, buffers[layer % 2], strict=True)
            views = iter([group.of_layer(group.layout.split(flat), layer) for (group, _), flat in flats])
            with memory.using([("layer", call, layer % 2)]):
                yield [
                    stack.entry.unflatten({g.name: next(views) for _, g, _ in stack.group_leaves()}) for stack in stacks
                ]
    finally:
        with memory.using([], [("layer", call, 0), ("layer", call, 1)]):  # a gather ahead may still write to a buffer
            memory.board.forget(("layer", call, 0), ("layer", call, 1))


def _at_home(group: Group, leaf: Tensor, layer: int, ranks: int) -> Tensor:
    """This rank's shard of a layer; where another stage has it, memory for that."""
    place = 0 if group.pinned else layer
    if group.home(place) != group.stage:
        return leaf.new_empty(group.layout.shard_numel(ranks))
    return leaf if group.pinned else leaf[group.here.index(layer)]


def like_layer(stack: Sharded, tree: Tree) -> list[list[Tensor]] | None:
    """The leaves of `tree` per group, if it has the structure and shapes of a layer of `stack`; else None."""
    groups = [group for _, group, _ in stack.group_leaves()]
    places = stack.entry.unflatten({g.name: [f"{g.name}/{i}" for i in range(len(g.leaves))] for g in groups})
    if optree.tree_structure(tree) != optree.tree_structure(places):
        return None
    found = dict(zip(optree.tree_leaves(places), optree.tree_leaves(tree), strict=True))
    per_group = [[found[f"{g.name}/{i}"] for i in range(len(g.leaves))] for g in groups]
    for group, leaves in zip(groups, per_group, strict=True):
        for leaf, shape in zip(leaves, group.layer_shapes, strict=True):
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != shape:
                return None
    return per_group


def empty_stack(stack: Sharded, first: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Zeros: a shard [L, n] per group ([n] if pinned), in the dtype of what the function returned."""
    return [
        torch.zeros(leaf.shape, dtype=leaves[0].dtype, device=leaf.device)
        for (_, _, leaf), leaves in zip(stack.group_leaves(), first, strict=True)
    ]


def write_layer(shard: Tensor, group: Group, rank: int, layer: int, leaves: Sequence[Tensor]) -> None:
    """Writes this rank's part of one layer's whole `leaves` into `shard`, [L, n] or [n], whose gaps stay; nothing where
    the layer is of another stage."""
    if (0 if group.pinned else layer) not in group.here:
        return
    row, first = (shard, layer) if group.pinned else (shard[group.here.index(layer)], 0)
    start = rank * row.numel()
    for piece in group.layout.pieces(start, start + row.numel()):
        flat = leaves[piece.leaf].reshape(-1)
        skip = first * flat.numel() - piece.origin  # where the layer begins, seen from the beginning of the piece
        a, b = max(skip, 0), min(skip + flat.numel(), piece.stop - piece.start)
        if a < b:
            row[piece.start + a : piece.start + b].copy_(flat[a - skip : b - skip])
