"""Gathers and reductions of units' flat vectors over the ranks of a mesh."""

from collections.abc import Sequence

import torch
from torch import Tensor

from yafsdp_fn.communication.formats import Format
from yafsdp_fn.communication.groups import Groups
from yafsdp_fn.communication.micro_shards import local_sum
from yafsdp_fn.communication.sums import sum_by_ranks

# ---- Moves units' flat vectors between the ranks of a mesh. Each function blocks the stream that calls it.
#
# Vectors of a list travel together: every rank passes the same sizes and dtypes in the same order.
#
# N flat elements (padding included), R ranks of the shard group on M nodes of K ranks (R = M K), P replicas, n = N /
# R. Each function runs on the communicators' stream of its kind: gather, reduce or replicate.
#
# With a dtype to accumulate in that is wider than the wire's, reductions are exchanges and local sums in rank order; on
# a deterministic mesh, exchanges and additions in the order of micro-shards; in a wire format, exchanges of what is
# encoded: all in sums.py. What is gathered in a format is bytes here, which the caller decodes.

Reduction = tuple[Tensor, Tensor, Tensor, bool]
"""`(shard, full, received, add)`; received: buffer for the sum, empty to receive in the shard itself."""


def gather_into(comms: Groups, fulls: Sequence[Tensor], shards: Sequence[Tensor], *, in_node: bool = False) -> None:
    """Gathers each of `fulls` [N] from the shards [n] of the shard group, which are cast on their way if their dtype is
    another. in_node: from the secondary shards [N / K] of this node's ranks, see `node_slice`"""
    if (comms.local_ranks if in_node else comms.ranks) == 1:
        for full, shard in zip(fulls, shards, strict=True):
            full.copy_(shard.view_as(full))
    else:
        group = comms.gather_local_group if in_node else comms.gather_group
        sent: list[Tensor] = []
        for full, shard in zip(fulls, shards, strict=True):
            # where it would lie in the end, so that it takes no memory
            sent.append(shard if shard.dtype == full.dtype else full.view(comms.ranks, -1)[comms.rank].copy_(shard))
        group.all_gathers(fulls, sent)


def node_slice(comms: Groups, full: Tensor) -> Tensor:
    """Returns the view [N / K] of `full` [N] that this rank keeps for its node: slice `comms.local_rank` of K."""
    size = full.numel() // comms.local_ranks
    return full.narrow(0, comms.local_rank * size, size)


def reduce_into(
    comms: Groups,
    shards: Sequence[Tensor],
    fulls: Sequence[Tensor],
    adds: Sequence[bool],
    accumulate: Sequence[torch.dtype | None],
    formats: Sequence[Format | None] = (),
    *,
    receive: Tensor,
) -> None:
    """Sums each of `fulls` [N] over the shard group and writes this rank's slice to its shard [n], or adds it.

    shards: in their own dtype; `fulls`, each in its wire's, are not changed but by a format
    receive: bytes for `receive_numel` elements of each vector's wire dtype. As many vectors of one dtype travel
        together as it holds; those that do not need it, all: NCCL reduces one dtype in a launch
    adds: per vector, add to the shard instead of overwriting it
    accumulate: per vector, a dtype wider than its wire's, `Precision.sum_dtype_of`; None: the backend's own sum
    formats: per vector, the one that it travels in, if any; empty: none has one
    """
    together: list[Reduction] = []
    used = 0
    formats = formats or [None] * len(fulls)
    for shard, full, add, wide, format in zip(shards, fulls, adds, accumulate, formats, strict=True):
        if wide is not None or comms.deterministic or comms.ranks == 1:
            sum_by_ranks(comms, shard, full, receive, add=add, accumulate=wide, format=format)
        else:
            need = 0 if shard.dtype == full.dtype and not add else shard.numel() * full.itemsize
            if used + need > receive.numel() or (together and together[0][1].dtype != full.dtype):
                _reduce_together(comms, together)
                together = []
                used = 0
            together.append((shard, full, receive[used : used + need].view(full.dtype), add))
            used += need
    if together:
        _reduce_together(comms, together)


def _reduce_together(comms: Groups, jobs: Sequence[Reduction]) -> None:
    """Reduces several vectors by the backend, received in the shards, or in the buffers of those that have one."""
    landing = [received if received.numel() else shard for shard, _, received, _ in jobs]
    comms.reduce_group.reduce_scatters(landing, [full for _, full, _, _ in jobs])
    for shard, _, received, add in jobs:
        if received.numel():
            local_sum(shard, received.view(1, -1), comms.reduce_scratch, add=add)
