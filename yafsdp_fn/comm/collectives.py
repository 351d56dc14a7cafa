"""The collectives of a sharded step on flat tensors. Everything that ranks send in a step goes through here.

    all_gather(out, shard, group)         out[r * n : (r + 1) * n] = rank r's shard
    reduce_scatter(out, full, group)      out = sum over ranks of full[rank * n : (rank + 1) * n]
    all_to_all(out, full, group)          out[r * n : (r + 1) * n] = rank r's full[rank * n : (rank + 1) * n]
    all_reduce_sum(values, group)         values = sum over ranks of values

gloo copies through several buffers in its own collectives. Between two ranks large shards are exchanged by a send and a
receive instead, which leaves one copy of the rank's own half.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

EXCHANGE_BYTES = 1 << 20
"""Shards of at least this size are exchanged directly between two gloo ranks."""

# torch 2.13 warns about the older names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: Tensor, shard: Tensor, group: ProcessGroup) -> None:
    """Gathers `shard` [N / R] of all ranks into `out` [N]; blocks the current stream, on the CPU the thread."""
    if _exchanges(shard, group):
        rank, mine = group.rank(), shard.reshape(-1)
        halves = out.view(2, -1)
        _exchange(mine, halves[1 - rank], group)
        halves[rank].copy_(mine)
    else:
        _all_gather(out, shard, group=group)


def reduce_scatter(out: Tensor, full: Tensor, group: ProcessGroup) -> None:
    """Sums `full` [N] over ranks and leaves this rank's slice in `out` [N / R]."""
    if _exchanges(out, group):
        rank, halves = group.rank(), full.view(2, -1)
        _exchange(halves[1 - rank], out.view(-1), group)
        out.view(-1).add_(halves[rank])
    else:
        _reduce_scatter(out, full, group=group)


def all_to_all(out: Tensor, full: Tensor, group: ProcessGroup) -> None:
    """Sends slice r of `full` [N] to rank r; `out` [N] is what this rank got, in rank order."""
    if _exchanges(full[: len(full) // group.size()], group):
        rank, sent, received = group.rank(), full.view(2, -1), out.view(2, -1)
        _exchange(sent[1 - rank], received[1 - rank], group)
        received[rank].copy_(sent[rank])
    else:
        dist.all_to_all_single(out, full, group=group)


def _exchanges(shard: Tensor, group: ProcessGroup) -> bool:
    large = shard.numel() * shard.element_size() >= EXCHANGE_BYTES
    return large and group.size() == 2 and group.name() == "gloo"


def _exchange(sent: Tensor, received: Tensor, group: ProcessGroup) -> None:
    peer = 1 - group.rank()
    # the receive is posted first, so that neither rank's send waits for a buffer
    works = [group.recv([received], peer, 0), group.send([sent], peer, 0)]
    for work in works:
        work.wait()


def all_reduce_sum(values: Tensor, group: ProcessGroup) -> None:
    """Sums `values` over ranks, in place, to the same bits on every rank."""
    dist.all_reduce(values, group=group)


def all_reduce_max(values: Tensor, group: ProcessGroup) -> None:
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
