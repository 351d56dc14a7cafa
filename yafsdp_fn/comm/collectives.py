"""The collectives of a sharded step on flat tensors, as a group of ranks does them.

    group.all_gathers(outs, shards)       out[r * n : (r + 1) * n] = rank r's shard
    group.reduce_scatters(outs, fulls)    out = sum over ranks of full[rank * n : (rank + 1) * n]
    group.all_to_all(out, full)           out[r * n : (r + 1) * n] = rank r's full[rank * n : (rank + 1) * n]
    group.exchange(received, sent)        received[r] = rank r's sent[rank], of any length
    group.all_reduce(values, op)          values = the sum over ranks of values, or their maximum
    group.broadcast(values, rank)         values = what that rank has
    group.send(tensor, rank)              tensor of that rank = tensor; there: group.receive(tensor, this rank)

The first two take lists of vectors: the same as one by one, to the same bits, in as few messages as pay. All block the
current stream, on the CPU the thread. Here they are the backend's own; gloo ranks exchange messages (exchange.py).
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from yafsdp_fn.torch_private import AllGatherOptions

# torch 2.13 warns about the older names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_older = not hasattr(ProcessGroup, "all_gather_single_coalesced")
ALL_GATHERS = "allgather_into_tensor_coalesced" if _older else "all_gather_single_coalesced"
REDUCE_SCATTERS = "reduce_scatter_tensor_coalesced" if _older else "reduce_scatter_single_coalesced"
"""Several as one, by methods of the group: torch's own context manager for it is private, and on torch 2.11 does not
hand on that gathers go to the current stream."""


class Group:
    """Ranks that communicate together. They pass the same sizes and dtypes in the same order."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group

    def all_gathers(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Gathers each shard [N / R] of all ranks into its `out` [N]; a shard may lie in its place there."""
        if self._one_launch(outs):
            self._now(ALL_GATHERS, outs, shards, AllGatherOptions())
        else:
            for out, shard in zip(outs, shards, strict=True):
                _all_gather(out, shard, group=self.process_group)

    def reduce_scatters(self, outs: Sequence[Tensor], fulls: Sequence[Tensor]) -> None:
        """Sums each `full` [N] over ranks; this rank's slice is left in `out` [N / R], which is no part of `full`."""
        if self._one_launch(outs):
            self._now(REDUCE_SCATTERS, outs, fulls, dist.ReduceScatterOptions())
        else:
            for out, full in zip(outs, fulls, strict=True):
                _reduce_scatter(out, full, group=self.process_group)

    def all_to_all(self, out: Tensor, full: Tensor) -> None:
        """Sends slice r of `full` [N] to rank r; `out` [N] is what this rank got, in rank order."""
        dist.all_to_all_single(out, full, group=self.process_group)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Sends `sent[r]` to rank r; `received[r]` is what rank r sent here. Lengths differ, some are 0."""
        dist.all_to_all(list(received), list(sent), group=self.process_group)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Sums `values` over ranks in place, or leaves the largest; the same bits on every rank."""
        dist.all_reduce(values, op, group=self.process_group)

    def broadcast(self, values: Tensor, rank: int) -> None:
        """What `rank` has in `values`, on all ranks."""
        dist.broadcast(values, group=self.process_group, group_src=rank)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Sends `tensor` to `rank`: done when it has been received."""
        dist.send(tensor, group=self.process_group, group_dst=rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """`tensor` becomes what `rank` sends."""
        dist.recv(tensor, group=self.process_group, group_src=rank)

    def _one_launch(self, outs: Sequence[Tensor]) -> bool:
        """Whether the backend takes collectives of one kind together: NCCL does."""
        return len(outs) > 1 and self.process_group.name() == "nccl"

    def _now(self, method: str, outs: Sequence[Tensor], ins: Sequence[Tensor], options: Any) -> None:
        """On the current stream."""
        options.asyncOp = False
        work = getattr(self.process_group, method)(list(outs), list(ins), options)
        if work is not None:
            work.wait()
