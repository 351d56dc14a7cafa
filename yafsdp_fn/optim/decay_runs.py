"""Flat shards as runs of elements that decay alike, so that a kernel can treat each kind without reading a mask.

leaf:  | q_proj ........ | norm |gap| down_proj ... | padding |     mask: all but norms
runs:  (True, 4096)       (False, 72)  (True, 5000)

Every run is a tensor of its own for the kernel, and a run never depends on what lies in other rows of its leaf: one
unit's row alone has the same runs. On the CPU that is what makes the bits of a step independent of how many units take
it at once: the kernels now and then round the elements past the last full vector of a tensor differently. Rows are
joined where a full vector ends with the first of them, which moves no element into such a rest or out of it (threads
get whole vectors too).
"""

import itertools
from collections.abc import Sequence

import optree
from torch import Tensor

from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.leaf_mask import LeafRule, leaf_mask
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Tree

VECTOR = 64
"""Bytes: the widest vector, and what the CPU kernels deal out to threads in multiples of."""

Runs = list[tuple[bool, int]]
"""Stretches of a flattened leaf on which a mask is constant: its value there, and the length in elements."""


def leaf_runs(mask: LeafRule | None, params: Tree) -> list[Runs]:
    """For every leaf of `params`, the runs of `mask` (None: true everywhere) over it, row after row.

    Worked out on the host, from layouts; only the mask of a plain tree is read back.
    """
    nodes = optree.tree_leaves(params, is_leaf=is_sharded)
    plain = mask is not None and not all(map(is_sharded, nodes))
    masks = optree.tree_leaves(leaf_mask(mask, params), is_leaf=is_sharded) if mask and plain else nodes
    out: list[Runs] = []
    for node, chosen in zip(nodes, masks, strict=True):
        if not isinstance(node, Sharded):
            out.append([(mask is None or bool(chosen.item()), node.numel())])
            continue
        for _, group, leaf in node.group_leaves():
            n = leaf.shape[-1]
            rows = leaf.numel() // n if n else 0
            out.append(_join(row_runs(mask, node, group, n) * rows, VECTOR // leaf.element_size()))
    return out


def row_runs(mask: LeafRule | None, handle: Sharded, group: Group, n: int) -> Runs:
    """The runs of `mask` over one unit's shard [n] of `group`.

    A gap counts as part of the logical leaf before it: its zeros decay to zeros, and all runs start where a logical
    leaf does, aligned.
    """
    if mask is None:
        return [(True, n)]
    start = handle.owner.comms.rank * n
    pieces = list(group.layout.pieces(start, start + n))
    ends = [piece.start for piece in pieces[1:]] + [n]
    passes = [bool(mask(*named)) for named in zip(group.layout.names, handle.entry.params(group), strict=True)]
    values = [passes[piece.leaf] for piece in pieces] or [False]  # a shard may be nothing but padding
    return _join([(value, b - a) for value, (a, b) in zip(values, itertools.pairwise([0, *ends]), strict=True)], 1)


def split_runs(leaf: Tensor, runs: Runs) -> list[Tensor]:
    """Views of the runs of a contiguous leaf."""
    if len(runs) == 1:
        return [leaf]
    return list(leaf.view(-1).split([length for _, length in runs]))  # type: ignore[no-untyped-call]


def _join(runs: Sequence[tuple[bool, int]], width: int) -> Runs:
    """Joins neighbours of one value where the first is a multiple of `width` elements."""
    out: Runs = []
    for value, length in runs:
        if out and out[-1][0] == value and out[-1][1] % width == 0:
            out[-1] = (value, out[-1][1] + length)
        else:
            out.append((value, length))
    return out
