"""The collectives of a sharded step on flat tensors. Everything that ranks send in a step goes through here.

    all_gather(out, shard, group)         out[r * n : (r + 1) * n] = rank r's shard
    reduce_scatter(out, full, group)      out = sum over ranks of full[rank * n : (rank + 1) * n]
    all_to_all(out, full, group)          out[r * n : (r + 1) * n] = rank r's full[rank * n : (rank + 1) * n]
    all_reduce_sum(values, group)         values = sum over ranks of values

    all_gathers(outs, shards, group)      the same for lists of vectors, to the same bits, in as few messages as pay
    reduce_scatters(outs, fulls, group)

The first three are sends and receives between gloo ranks (see `exchange`), and the backend's own elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from yafsdp_fn.comm.exchange import exchange

EXCHANGE = os.environ.get("YAFSDP_EXCHANGE", "1") != "0"
"""False: gloo's own collectives, one per vector, for ablations and in trouble. The same on all ranks."""

# torch 2.13 warns about the older names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: Tensor, shard: Tensor, group: ProcessGroup) -> None:
    """Gathers `shard` [N / R] of all ranks into `out` [N]; blocks the current stream, on the CPU the thread."""
    all_gathers([out], [shard], group)


def all_gathers(outs: Sequence[Tensor], shards: Sequence[Tensor], group: ProcessGroup) -> None:
    """`all_gather` of each; all ranks pass the same sizes and dtypes in the same order."""
    if _exchanges(group):
        exchange(group).gather(outs, shards)
        return
    with _together(len(outs), group):
        for out, shard in zip(outs, shards, strict=True):
            _all_gather(out, shard, group=group)


def reduce_scatter(out: Tensor, full: Tensor, group: ProcessGroup) -> None:
    """Sums `full` [N] over ranks and leaves this rank's slice in `out` [N / R], which is no part of `full`.

    Between gloo ranks sums are made in the order of ranks; elsewhere the order is the backend's.
    """
    reduce_scatters([out], [full], group)


def reduce_scatters(outs: Sequence[Tensor], fulls: Sequence[Tensor], group: ProcessGroup) -> None:
    """`reduce_scatter` of each; all ranks pass the same sizes and dtypes in the same order."""
    if _exchanges(group):
        exchange(group).reduce(outs, fulls)
        return
    with _together(len(outs), group):
        for out, full in zip(outs, fulls, strict=True):
            _reduce_scatter(out, full, group=group)


def all_to_all(out: Tensor, full: Tensor, group: ProcessGroup) -> None:
    """Sends slice r of `full` [N] to rank r; `out` [N] is what this rank got, in rank order."""
    if _exchanges(group):
        exchange(group).swap(out, full)
    else:
        dist.all_to_all_single(out, full, group=group)


def all_reduce_sum(values: Tensor, group: ProcessGroup) -> None:
    """Sums `values` over ranks, in place, to the same bits on every rank."""
    dist.all_reduce(values, group=group)


def all_reduce_max(values: Tensor, group: ProcessGroup) -> None:
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)


def _exchanges(group: ProcessGroup) -> bool:
    return EXCHANGE and group.name() == "gloo" and group.size() > 1


def _together(count: int, group: ProcessGroup) -> AbstractContextManager[object]:
    """Inside, NCCL takes collectives of one kind as one launch."""
    manager = getattr(dist, "_coalescing_manager", None)
    return manager(group) if manager is not None and count > 1 and group.name() == "nccl" else nullcontext()
