"""Collectives of one group of ranks on flat tensors, by torch.distributed's."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from yafsdp_fn.util.torch_private import AllGatherOptions

# ---- The collectives of a sharded step on flat tensors, within one group of ranks.
#
#     group.all_gathers(outs, shards)       out[r * n : (r + 1) * n] = rank r's shard
#     group.reduce_scatters(outs, fulls)    out = sum over ranks of full[rank * n : (rank + 1) * n]
#     group.all_to_all(out, full)           out[r * n : (r + 1) * n] = rank r's full[rank * n : (rank + 1) * n]
#     group.exchange(received, sent)        received[r] = rank r's sent[rank], of any length
#     group.all_reduce(values, op)          values = sum or maximum over ranks
#     group.broadcast(values, rank)         values = that rank's values
#     group.send(tensor, rank)              that rank's tensor = tensor; it calls group.receive(tensor, this rank)
#
# The first two take lists of vectors. Results have the bits of one call per vector; messages are merged where that
# pays. All calls block the current stream, on the CPU the thread. `RankGroup` uses the backend's collectives; gloo
# ranks exchange messages instead (gloo.py).

# torch 2.13 warns about the older names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_older = not hasattr(ProcessGroup, "all_gather_single_coalesced")
ALL_GATHERS = "allgather_into_tensor_coalesced" if _older else "all_gather_single_coalesced"
REDUCE_SCATTERS = "reduce_scatter_tensor_coalesced" if _older else "reduce_scatter_single_coalesced"
"""Methods of a process group that launch several collectives as one. torch's context manager for this is private, and
in torch 2.11 it does not keep gathers on the current stream."""


class RankGroup:
    """A group of ranks that communicate. All pass the same sizes and dtypes in the same order."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group

    def all_gathers(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Gathers each shard [N / R] of all ranks into its `out` [N]. A shard may be this rank's slice of `out`."""
        if self._one_launch(outs):
            self._now(ALL_GATHERS, _alike(outs), _alike(shards), AllGatherOptions())
        else:
            for out, shard in zip(outs, shards, strict=True):
                _all_gather(out, shard, group=self.process_group)

    def reduce_scatters(self, outs: Sequence[Tensor], fulls: Sequence[Tensor]) -> None:
        """Sums each `full` [N], all of one dtype, over ranks and writes this rank's slice to `out` [N / R], which must
        not overlap `full`."""
        if self._one_launch(outs):
            self._now(REDUCE_SCATTERS, outs, fulls, dist.ReduceScatterOptions())
        else:
            for out, full in zip(outs, fulls, strict=True):
                _reduce_scatter(out, full, group=self.process_group)

    def all_to_all(self, out: Tensor, full: Tensor) -> None:
        """Sends slice r of `full` [N] to rank r and receives `out` [N], in rank order."""
        dist.all_to_all_single(out, full, group=self.process_group)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Sends `sent[r]` to rank r and receives `received[r]` from it. Lengths may differ; some may be 0."""
        dist.all_to_all(list(received), list(sent), group=self.process_group)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Sums `values` over ranks in place, or takes the maximum; the same bits on every rank."""
        dist.all_reduce(values, op, group=self.process_group)

    def broadcast(self, values: Tensor, rank: int) -> None:
        """Copies `values` of `rank` to all ranks."""
        dist.broadcast(values, group=self.process_group, group_src=rank)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Sends `tensor` to `rank`; returns when it has been received."""
        dist.send(tensor, group=self.process_group, group_dst=rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receives `tensor` from `rank`."""
        dist.recv(tensor, group=self.process_group, group_src=rank)

    def _one_launch(self, outs: Sequence[Tensor]) -> bool:
        """Returns whether the backend launches several collectives of one kind as one: NCCL does."""
        return len(outs) > 1 and self.process_group.name() == "nccl"

    def _now(self, method: str, outs: Sequence[Tensor], ins: Sequence[Tensor], options: Any) -> None:
        """Runs a coalesced collective on the current stream."""
        options.asyncOp = False
        work = getattr(self.process_group, method)(list(outs), list(ins), options)
        if work is not None:
            work.wait()


def _alike(vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns vectors of several dtypes as bytes, so that a gather moves them together."""
    same = len({vector.dtype for vector in vectors}) == 1
    return vectors if same else [vector.view(torch.uint8) for vector in vectors]
