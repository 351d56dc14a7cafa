"""Whole layers, one after the other, without autograd: the gather of the next overlaps with the use of this one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm import collectives
from yafsdp_fn.schedules.scoreboard import Buffer
from yafsdp_fn.sharded import Sharded
from yafsdp_fn.tree import Tree

_calls = itertools.count()  # names the buffers of one call on a scoreboard


def whole_layers(stacks: Sequence[Sharded]) -> Iterator[list[Tree]]:
    """For each layer, the whole weights of every stack, in the dtype of its leaves. They are valid until the next one.

    stacks: of one state and one length. Two buffers alternate, as in a scan.
    """
    store, length = stacks[0].store, stacks[0].entry.length
    assert length is not None
    comms, call = store.comms, next(_calls)
    parts = [(group, leaf) for stack in stacks for _, group, leaf in stack.group_leaves()]
    buffers = [[leaf.new_empty(group.layout.padded_numel(comms.ranks)) for group, leaf in parts] for _ in range(2)]

    def start(layer: int) -> None:
        # a frozen leaf's gradient is an expanded scalar
        jobs = list(zip(buffers[layer % 2], [leaf[layer].contiguous() for _, leaf in parts], strict=True))
        if comms.ranks == 1:
            for out, shard in jobs:
                out.copy_(shard)
            return
        shards: list[Buffer] = [("shard", group.units[layer]) for group, _ in parts]
        label = f"gather of {'+'.join(stack.entry.name for stack in stacks)}[{layer}] (map_layers)"

        def work() -> None:
            for out, shard in jobs:
                collectives.all_gather(out, shard, comms.gather_group)

        ready = comms.compute_event()  # leaves that are not the state's own were made on the compute stream
        ready.complete()
        event = comms.gather.event()
        waits = [ready, *store.board.add(event, "gather", shards, [("layer", call, layer % 2)])]
        comms.gather.submit(work, waits, event, label)

    comms.check()
    start(0)
    try:
        for layer in range(length):
            if layer + 1 < length:
                start(layer + 1)
            views = iter([group.layout.split(flat) for (group, _), flat in zip(parts, buffers[layer % 2], strict=True)])
            with store.using([("layer", call, layer % 2)]):
                yield [
                    stack.entry.unflatten({g.name: next(views) for _, g, _ in stack.group_leaves()}) for stack in stacks
                ]
    finally:
        with store.using([], [("layer", call, 0), ("layer", call, 1)]):  # a gather ahead may still write to a buffer
            store.board.forget(("layer", call, 0), ("layer", call, 1))


def like_layer(stack: Sharded, tree: Tree) -> list[list[Tensor]] | None:
    """The leaves of `tree` per group, if it has the structure and shapes of a layer of `stack`; else None."""
    groups = [group for _, group, _ in stack.group_leaves()]
    places = stack.entry.unflatten({g.name: [f"{g.name}/{i}" for i in range(len(g.leaves))] for g in groups})
    if optree.tree_structure(tree) != optree.tree_structure(places):
        return None
    found = dict(zip(optree.tree_leaves(places), optree.tree_leaves(tree), strict=True))
    per_group = [[found[f"{g.name}/{i}"] for i in range(len(g.leaves))] for g in groups]
    for group, leaves in zip(groups, per_group, strict=True):
        for leaf, shape in zip(leaves, group.layout.shapes, strict=True):
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != shape:
                return None
    return per_group


def empty_stack(stack: Sharded, first: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """A shard [L, n] per group, in the dtype of what the function returned."""
    return [
        torch.empty_like(leaf, dtype=leaves[0].dtype)
        for (_, _, leaf), leaves in zip(stack.group_leaves(), first, strict=True)
    ]
