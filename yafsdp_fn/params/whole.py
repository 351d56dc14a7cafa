"""Sharded trees as whole ones and back. Every rank takes part, and has all of it."""

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.sources import fill_group, source
from yafsdp_fn.params.tree import Tree, shape_of


def whole_tree(tree: Tree) -> Tree:
    """`tree` with whole tensors in place of handles: [L, ...] for a stack. Leaves may have further axes in front."""
    return optree.tree_map(_whole, tree, is_leaf=is_sharded)


def _whole(node: Any) -> Any:
    if not isinstance(node, Sharded):
        return node
    columns: list[Any] = [None] * node.entry.leaf_count
    comms = node.owner.comms
    for _, group, leaf in node.check().group_leaves():
        stacked, n = node.entry.stacked(group), group.layout.shard_numel(comms.ranks)
        if leaf.ndim < 1 + stacked or leaf.shape[-1] != (n if stacked or group.held else 0):
            shape = f"[..., {len(group.held)}, {n}]" if stacked else f"[..., {n}]"
            raise ValueError(f"unshard: {group.name} has a leaf {shape_of(leaf)}, expected a local shard {shape}")
        # flat elements first: that is the axis that is gathered, and cut into leaves; then whatever is in front
        rows = [unit_shard(node, group, leaf, place) for place in range(len(group.units))]
        flats = [row.movedim(-1, 0).contiguous() for row in rows]
        flats = flats if comms.ranks == 1 else [comms.all_gather(flat) for flat in flats]
        for position, parts in zip(group.leaves, zip(*map(group.layout.split, flats), strict=True), strict=True):
            columns[position] = _in_front(parts, leaf.ndim - (2 if stacked else 1), stacked)
    return optree.tree_unflatten(node.entry.spec, columns)


def unit_shard(handle: Sharded, group: Group, leaf: Tensor, place: int, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part [..., n] of unit number `place` of a group, whichever stage holds it. All ranks must ask.

    dtype: what it is converted to, before it travels
    """
    comms, stacked, home = handle.owner.comms, handle.entry.stacked(group), group.home(place)
    if home == group.stage:
        row = leaf.select(-2, group.here.index(place)) if stacked else leaf
        row = row if dtype is None else row.to(dtype)
    else:
        in_front = leaf.shape[: -2 if stacked else -1]
        row = leaf.new_empty(*in_front, group.layout.shard_numel(comms.ranks), dtype=dtype or leaf.dtype)
    return row if group.stages is None else comms.from_stage(row, home)


def _in_front(parts: Sequence[Tensor], batch: int, stacked: bool) -> Tensor:
    """The layers of a leaf, each [..., *batch], as one tensor [*batch, (L,) ...] of its own memory."""
    parts = [part.movedim(tuple(range(part.ndim - batch, part.ndim)), tuple(range(batch))) for part in parts]
    return torch.stack(parts, batch) if stacked else parts[0].clone(memory_format=torch.contiguous_format)


def shards_of(tree: Tree, like: Tree) -> Tree:
    """This rank's shards of whole tensors, in the handles of `like`; nothing is communicated."""
    spec = optree.tree_structure(like, is_leaf=is_sharded)
    pairs = zip(optree.tree_leaves(like, is_leaf=is_sharded), spec.flatten_up_to(tree), strict=True)
    return optree.tree_unflatten(spec, [_cut(node, whole) for node, whole in pairs])


def _cut(node: Any, whole: Any) -> Any:
    if not isinstance(node, Sharded):
        return whole
    leaves = node.entry.spec.flatten_up_to(whole)
    out = []
    for _, group, shard in node.group_leaves():
        sources = [
            source(name, leaves[k], 0, shard.device) for name, k in zip(group.layout.names, group.leaves, strict=True)
        ]
        out.append(torch.empty_like(shard))
        fill_group(out[-1], node.entry, group, node.owner.comms.rank, sources)
    return Sharded(tuple(out), node.context)
