"""Leaves of a unit, each whole at its owner for a moment."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.params.owners import Leaf

Messages = tuple[list[Tensor], list[Tensor]]
"""What a rank receives from each rank, and what it sends to each; empty where there is nothing."""


class Borrowed:
    """The leaves of one unit, from shards to their owners and back:

        loan = Borrowed(leaves, owners, row, ranks)
        ranks.exchange(*loan.lend())
        new = {leaf: work(whole) for leaf, whole in loan.whole().items()}       # those that this rank owns
        ranks.exchange(*loan.give_back(new))
        row = loan.write(row.clone())

    leaves, owners: of all that travel; row: this rank's shard [n], which stays as it is
    """

    def __init__(self, leaves: Sequence[Leaf], owners: Sequence[int], row: Tensor, ranks: Ranks) -> None:
        self._leaves, self._row, self._rank, self._n = leaves, row, ranks.rank, row.numel()
        self._everyone = range(ranks.ranks)
        self._copied = ranks.deterministic
        self._owned = [i for i, owner in enumerate(owners) if owner == ranks.rank]
        theirs = [[i for i, owner in enumerate(owners) if owner == rank] for rank in self._everyone]
        # by rank: parts of its leaves that are here, and parts of this rank's leaves that are there
        self._here = [self._parts(theirs[rank], ranks.rank) if rank != ranks.rank else [] for rank in self._everyone]
        self._there = [self._parts(self._owned, rank) if rank != ranks.rank else [] for rank in self._everyone]
        self._received: list[Tensor] = []
        self._new: Mapping[int, Tensor] = {}

    def _parts(self, leaves: Iterable[int], rank: int) -> list[tuple[int, range]]:
        """`(leaf, elements of the unit)` of what `rank` holds of `leaves`."""
        parts = [(i, self._leaves[i].part(rank, self._n)) for i in leaves]
        return [(i, part) for i, part in parts if part]

    def lend(self) -> Messages:
        """To owners."""
        sent = [self._packed([self._of_row(part) for _, part in parts]) for parts in self._here]
        self._received = [self._row.new_empty(sum(len(part) for _, part in parts)) for parts in self._there]
        return self._received, sent

    def whole(self) -> dict[int, Tensor]:
        """What this rank owns, each in its shape; views of the row where all of it is here, if they may be."""
        found: dict[int, list[Tensor]] = {i: [] for i in self._owned}
        for rank in self._everyone:  # parts of a leaf lie in the order of ranks
            if rank == self._rank:
                for i, part in self._parts(self._owned, rank):
                    found[i].append(self._of_row(part))
                continue
            parts = self._there[rank]
            pieces = torch.split(self._received[rank], [len(part) for _, part in parts]) if parts else ()
            for (i, _), piece in zip(parts, pieces, strict=True):
                found[i].append(piece)
        # kernels may round by how memory is aligned, and a view begins anywhere
        pack = torch.cat if self._copied else self._packed
        return {i: pack(pieces).view(self._leaves[i].shape) for i, pieces in found.items()}

    def give_back(self, new: Mapping[int, Tensor]) -> Messages:
        """To shards. new: of each leaf that this rank owns"""
        self._new = {i: whole.to(self._row.dtype).reshape(-1) for i, whole in new.items()}
        sent = [self._packed([self._of_leaf(i, part) for i, part in parts]) for parts in self._there]
        self._received = [self._row.new_empty(sum(len(part) for _, part in parts)) for parts in self._here]
        return self._received, sent

    def write(self, out: Tensor, scales: Sequence[float] | None = None) -> Tensor:
        """Replaces all leaves in `out`, a shard [n] of any dtype, and returns it. scales: by leaf, in that dtype"""
        for i, part in self._parts(self._owned, self._rank):
            self._put(out, i, part, self._of_leaf(i, part), scales)
        for parts, received in zip(self._here, self._received, strict=True):
            pieces = torch.split(received, [len(part) for _, part in parts]) if parts else ()
            for (i, part), piece in zip(parts, pieces, strict=True):
                self._put(out, i, part, piece, scales)
        return out

    def _put(self, out: Tensor, i: int, part: range, piece: Tensor, scales: Sequence[float] | None) -> None:
        written = self._of_row(part, out).copy_(piece)
        if scales is not None and scales[i] != 1:
            written.mul_(scales[i])

    def _of_row(self, part: range, row: Tensor | None = None) -> Tensor:
        return (self._row if row is None else row).narrow(0, part.start - self._rank * self._n, len(part))

    def _of_leaf(self, i: int, part: range) -> Tensor:
        return self._new[i].narrow(0, part.start - self._leaves[i].offset, len(part))

    def _packed(self, pieces: list[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else self._row.new_empty(0)
