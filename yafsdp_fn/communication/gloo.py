"""Collectives between gloo ranks, of sends and receives: each rank sends every other one only the part it needs.

    gather            send shard to all; whole[p] = receive from p; whole[rank] = shard
    reduce-scatter    for piece of shard: send whole[p, piece] to p; part[p] = receive from p
                                          shard[piece] = part[0] + part[1] + ...              # in the order of ranks
    all-to-all        send whole[p] to p; out[p] = receive from p; out[rank] = whole[rank]

gloo's own collectives copy through buffers that torch allocates in every call, and its reduce-scatter sends more
than needed. Here the only extra memory is scratch of a piece, allocated at first use and kept with the group.

Small vectors of a list that are reduced are packed into one message; all others are sent from where they are.

Sends are posted before receives. A send whose receive is already posted is written to the socket by the calling
thread, under the connection's lock, for which gloo's woken thread spins: 3 ms were seen for 128 KiB. A send posted
first is left to gloo's thread.

Messages carry their size as a tag. gloo ends the process if a message has another size than its receiver expects;
for another tag it waits. Ranks that are out of step thus reach a timeout, which reports where they are.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from yafsdp_fn.communication.collectives import RankGroup

PIECE_BYTES = 2 << 20
"""Bytes of a shard reduced at a time, and the largest pack. 1, 2 and 4 MiB took the same time, and so did a piece at a
time and two in flight."""

PACKED_BYTES = 1 << 20
"""Reductions of shards below this size are packed with their neighbours: a copy costs less than a message and a sum.
Packing at 256 KiB took up to twice the time for eight shards of 256 to 512 KiB; at 2 MiB, more for shards of 1 MiB.
Gathers take as long without (eight shards of 1 to 512 KiB)."""

COMBINES: Any = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}

Part = tuple[Tensor, Tensor]
"""A part of a shard [n], and what all ranks get of it from this one [R, n]."""


class GlooGroup(RankGroup):
    """Several gloo ranks. One thread at a time may use it: there is one scratch. Sums are in the order of ranks."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group
        self._rank = process_group.rank()
        self._ranks = process_group.size()
        self._peers = [(self._rank + i) % self._ranks for i in range(1, self._ranks)]
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

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
                self._scratch = torch.empty(count * row, dtype=torch.uint8, device="cpu")
        return [self._scratch[i * row : i * row + used].view(dtype) for i in range(count)]


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _tag(part: Tensor) -> int:
    return part.nbytes % (1 << 31)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
