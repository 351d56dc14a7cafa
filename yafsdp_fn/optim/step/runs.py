"""Flat shards as runs of elements that are treated alike, so that a kernel can do each kind without reading a mask.

leaf:  | q_proj ........ | norm |gap| down_proj ... | padding |     mask: all but norms
runs:  (True, 4096)       (False, 72)  (True, 5000)

Every run is a tensor of its own for the kernel, and a run never depends on what lies in other rows of its leaf: one
unit's row alone has the same runs. On the CPU that is what makes the bits of a step independent of how many units take
it at once: the kernels now and then round the elements past the last full vector of a tensor differently. Rows are
joined where a full vector ends with the first of them, which moves no element into such a rest or out of it (threads
get whole vectors too).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor

from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.leaf_mask import plain_param
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Param, Tree, dotted

VECTOR = 64
"""Bytes: the widest vector, and what the CPU kernels deal out to threads in multiples of."""

Runs = list[tuple[Any, int]]
"""Stretches of a flattened leaf on which a rule says one thing: what it says, and the length in elements."""

Rule = Callable[[str, Param], Any]
"""What is to happen to a logical leaf, as in `LeafRule`."""


def leaf_runs(rule: Rule, params: Tree) -> list[Runs]:
    """For every leaf of `params`, the runs of `rule` over it, row after row. Worked out on the host, from layouts."""
    accessors, nodes, _ = optree.tree_flatten_with_accessor(params, is_leaf=is_sharded)
    out: list[Runs] = []
    for accessor, node in zip(accessors, nodes, strict=True):
        if not isinstance(node, Sharded):
            out.append([(rule(dotted(accessor), plain_param(accessor, node)), node.numel())])
            continue
        for _, group, leaf in node.group_leaves():
            n = leaf.shape[-1]
            rows = leaf.numel() // n if n else 0
            out.append(_join(row_runs(rule, node, group, n) * rows, VECTOR // leaf.element_size()))
    return out


def row_runs(rule: Rule, handle: Sharded, group: Group, n: int) -> Runs:
    """The runs of `rule` over one unit's shard [n] of `group`.

    A gap counts as part of the logical leaf before it: its zeros decay to zeros, and all runs start where a logical
    leaf does, aligned.
    """
    start = handle.owner.comms.rank * n
    pieces = list(group.layout.pieces(start, start + n))
    ends = [piece.start for piece in pieces[1:]] + [n]
    said = list(map(rule, group.layout.names, handle.entry.params(group)))
    values = [said[piece.leaf] for piece in pieces] or [False]  # a shard may be nothing but padding
    return _join([(value, b - a) for value, (a, b) in zip(values, itertools.pairwise([0, *ends]), strict=True)], 1)


def split_runs(leaf: Tensor, runs: Runs) -> list[Tensor]:
    """Views of the runs of a contiguous leaf."""
    if len(runs) == 1:
        return [leaf]
    return list(leaf.view(-1).split([length for _, length in runs]))  # type: ignore[no-untyped-call]


def _join(runs: Sequence[tuple[Any, int]], width: int) -> Runs:
    """Joins neighbours of one value where the first is a multiple of `width` elements."""
    out: Runs = []
    for value, length in runs:
        if out and out[-1][0] == value and out[-1][1] % width == 0:
            out[-1] = (value, out[-1][1] + length)
        else:
            out.append((value, length))
    return out
