"""Collectives of one group of ranks on flat tensors, by torch.distributed's or by sends and receives of our own."""

import functools
from collections.abc import Callable, Sequence
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
# ranks exchange messages instead (`GlooGroup`, below).

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


# ---- Collectives between gloo ranks, made of sends and receives: each rank sends every other one only the part it
# needs.
#
#     gather            send shard to all; whole[p] = receive from p; whole[rank] = shard
#     reduce-scatter    for piece of shard: send whole[p, piece] to p; part[p] = receive from p
#                                           shard[piece] = part[0] + part[1] + ...              # in the order of ranks
#     all-to-all        send whole[p] to p; out[p] = receive from p; out[rank] = whole[rank]
#
# gloo's own collectives copy through buffers that torch allocates in every call, and its reduce-scatter sends more
# than needed. Here the only extra memory is scratch of a piece, allocated at first use and kept with the group.
#
# Small vectors of a list that are reduced are packed into one message; all others are sent from where they are.
#
# Sends are posted before receives. A send whose receive is already posted is written to the socket by the calling
# thread, under the connection's lock, for which gloo's woken thread spins: 3 ms were seen for 128 KiB. A send posted
# first is left to gloo's thread.
#
# Messages carry their size as a tag. gloo ends the process if a message has another size than its receiver expects;
# for another tag it waits. Ranks that are out of step thus reach a timeout, which reports where they are.

PIECE_BYTES = 2 << 20
"""Bytes of a shard reduced at a time, and the largest pack. 1, 2 and 4 MiB took the same time, and so did a piece at a
time and two in flight."""

PACKED_BYTES = 1 << 20
"""Reductions of shards below this size are packed with their neighbours: a copy costs less than a message and a sum.
Packing at 256 KiB took up to twice the time for eight shards of 256 to 512 KiB; at 2 MiB, more for shards of 1 MiB.
Gathers take as long without (eight shards of 1 to 512 KiB)."""

Combine = Callable[[Tensor, Tensor], Tensor]
COMBINES: dict[dist.ReduceOp.RedOpType, Combine] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}

Part = tuple[Tensor, Tensor]
"""A part of a shard [n], and what all ranks get of it from this one [R, n]."""


class GlooGroup(RankGroup):
    """Several gloo ranks. One thread at a time may use it: there is one scratch. Sums are in the order of ranks."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group
        self._rank = process_group.rank()
        self._ranks = process_group.size()
        self._peers = [(self._rank + i) % self._ranks for i in range(1, self._ranks)]
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def all_gathers(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        works: list[dist.Work] = []
        for whole, shard in zip(outs, shards, strict=True):
            rows = whole.view(self._ranks, -1).unbind()
            mine = shard.reshape(-1)
            works += self._post([mine] * self._ranks, rows)
            _copy(rows[self._rank], mine)
        _wait(works)

    def reduce_scatters(self, outs: Sequence[Tensor], fulls: Sequence[Tensor]) -> None:
        small: list[Part] = []  # reduced together
        used = 0
        for out, full in zip(outs, fulls, strict=True):
            shard = out.view(-1)
            rows = full.view(self._ranks, -1)
            if shard.nbytes >= PACKED_BYTES:
                step = PIECE_BYTES // shard.itemsize
                for part in zip(torch.split(shard, step), torch.split(rows, step, 1), strict=True):
                    self._reduce([part])
                continue
            if small and used + shard.nbytes > PIECE_BYTES:
                self._reduce(small)
                small = []
                used = 0
            small.append((shard, rows))
            used += shard.nbytes
        if small:
            self._reduce(small)

    def all_to_all(self, out: Tensor, full: Tensor) -> None:
        self.exchange(out.view(self._ranks, -1).unbind(), full.view(self._ranks, -1).unbind())

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        works = self._post(sent, received)
        received[self._rank].copy_(sent[self._rank])
        _wait(works)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if values.nbytes > PACKED_BYTES or op not in COMBINES:
            super().all_reduce(values, op)
            return
        rows = values.new_empty(self._ranks, values.numel()).unbind()
        mine = rows[self._rank].copy_(values.reshape(-1))
        _wait(self._post([mine] * self._ranks, rows))
        values.copy_(functools.reduce(COMBINES[op], rows).view_as(values))

    def send(self, tensor: Tensor, rank: int) -> None:
        self.process_group.send([tensor], rank, _tag(tensor)).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        self.process_group.recv([tensor], rank, _tag(tensor)).wait()

    def _reduce(self, piece: Sequence[Part]) -> None:
        """Reduces what is in one message to each peer: packed, if there are several parts."""
        targets, wholes = zip(*piece, strict=True)
        sizes = [target.numel() for target in targets]
        packed = len(sizes) > 1
        others = len(self._peers)
        rows = others + (self._ranks + 1 if packed else 0)
        scratch = self._scratch_rows(rows, sum(sizes), wholes[0].dtype)
        sent: Sequence[Tensor] = wholes[0].unbind()
        total = targets[0]
        if packed:
            *sent, total = scratch[others:]
            for row, parts in zip(sent, zip(*wholes, strict=True), strict=True):
                torch.cat(parts, out=row)
        received = scratch[:others]
        received.insert(self._rank, sent[self._rank])
        _wait(self._post(sent, received))
        one, two, *rest = received
        torch.add(one, two, out=total)
        for part in rest:
            total.add_(part)
        for target, part in zip(targets, torch.split(total, sizes), strict=True):
            _copy(target, part)

    def _post(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
        """Posts a message to each other rank, and a receive from each; both sides leave out what is empty."""
        works = []
        for post, parts in ((self.process_group.send, sent), (self.process_group.recv, received)):
            for peer in self._peers:
                if parts[peer].numel():
                    works.append(post([parts[peer]], peer, _tag(parts[peer])))
        return works

    def _scratch_rows(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns `count` vectors of `numel` elements, in the scratch."""
        used = numel * dtype.itemsize
        row = -(-used // 64) * 64  # aligned for any dtype
        if self._scratch.numel() < count * row:
            with torch.inference_mode(False):  # streams run under it, and others could not write to what is made there
                self._scratch = torch.empty(count * row, dtype=torch.uint8)
        return [self._scratch[i * row : i * row + used].view(dtype) for i in range(count)]


def _alike(vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns vectors of several dtypes as bytes, so that a gather moves them together."""
    same = len({vector.dtype for vector in vectors}) == 1
    return vectors if same else [vector.view(torch.uint8) for vector in vectors]


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _tag(part: Tensor) -> int:
    return part.nbytes % (1 << 31)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
