"""A mask of leaves as runs over flat shards, so that a kernel can treat each kind of element without reading a mask.

leaf:  | q_proj ........ | norm |gap| down_proj ... | padding |     mask: all but norms
runs:  (True, 4096)       (False, 72)  (True, 5000)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import optree
from torch import Tensor

from yafsdp_fn.layout import LeafRule
from yafsdp_fn.sharded import Sharded, is_sharded, leaf_mask
from yafsdp_fn.tree import Tree

Runs = list[tuple[bool, int]]
"""Stretches of a flattened leaf on which a mask is constant: its value there, and the length in elements."""


def mask_runs(mask: LeafRule, params: Tree) -> list[Runs]:
    """For every leaf of `params`, the runs of `mask` over it, row after row.

    Worked out on the host, from layouts; only plain trees read `leaf_mask` back. A gap counts as part of the logical
    leaf before it: its zeros decay to zeros, and all runs start where a logical leaf does, aligned.
    """
    nodes = optree.tree_leaves(params, is_leaf=is_sharded)
    plain = not all(map(is_sharded, nodes))
    masks = optree.tree_leaves(leaf_mask(mask, params), is_leaf=is_sharded) if plain else nodes
    out: list[Runs] = []
    for node, chosen in zip(nodes, masks, strict=True):
        if isinstance(node, Sharded):
            out += _shard_runs(mask, node)
        else:
            out.append([(chosen.item(), node.numel())])
    return out


def split_runs(leaves: Sequence[Tensor], runs: Sequence[Runs]) -> tuple[list[Tensor], list[Tensor]]:
    """Views of the stretches of contiguous leaves on which the mask is true, and of those on which it is false."""
    chosen: list[Tensor] = []
    others: list[Tensor] = []
    for leaf, of_leaf in zip(leaves, runs, strict=True):
        pieces = leaf.view(-1).split([length for _, length in of_leaf])  # type: ignore[no-untyped-call]
        for piece, (value, _) in zip(pieces, of_leaf, strict=True):
            (chosen if value else others).append(piece)
    return chosen, others


def _shard_runs(mask: LeafRule, handle: Sharded) -> list[Runs]:
    out = []
    for _, group, leaf in handle.group_leaves():
        n = leaf.shape[-1]
        start = handle.store.comms.rank * n
        pieces = list(group.layout.pieces(start, start + n))
        ends = [piece.start for piece in pieces[1:]] + [n]
        passes = [bool(mask(*named)) for named in zip(group.layout.names, handle.entry.params(group), strict=True)]
        values = [passes[piece.leaf] for piece in pieces] or [False]  # a shard may be nothing but padding
        row = [(value, b - a) for value, (a, b) in zip(values, itertools.pairwise([0, *ends]), strict=True)]
        out.append(_merge(row * (leaf.numel() // n if n else 0)))
    return out


def _merge(runs: Sequence[tuple[bool, int]]) -> Runs:
    """Joins neighbours of one value, also across the ends of rows."""
    return [(value, sum(n for _, n in same)) for value, same in itertools.groupby(runs, key=lambda run: run[0])]
