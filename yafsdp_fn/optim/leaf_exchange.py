"""Moves leaves of a unit between shards and their owners, where each is whole for a moment (util/owners.py)."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.params.layout import Group
from yafsdp_fn.util.owners import Leaf

Messages = tuple[list[Tensor], list[Tensor]]
"""The tensors that a rank receives from each rank, and sends to each; empty if there is nothing."""

Parts = list[tuple[int, range]]
"""`(leaf, elements of the unit)`: parts of leaves."""


class LeafExchange:
    """The leaves of one unit, from shards to their owners and back:

        loan = LeafExchange(leaves, owners, row, ranks, group)
        ranks.exchange(*loan.lend())
        new = {leaf: work(whole) for leaf, whole in loan.whole().items()}       # those that this rank owns
        ranks.exchange(*loan.give_back(new))
        row = loan.write(row.clone())

    leaves, owners: of all that travel; row: this rank's shard [n], which stays as it is; group: of the unit
    """

    def __init__(self, leaves: Sequence[Leaf], owners: Sequence[int], row: Tensor, ranks: Ranks, group: Group) -> None:
        self._leaves, self._row, self._rank, self._group = leaves, row, ranks.rank, group
        self._copied = ranks.deterministic
        # rank -> which part of each leaf its vector has, if they are split, and which shard of the vector is there
        self._at: dict[int, tuple[int, int]] = {}
        for part, members in enumerate(ranks.subgroups(across=group.over)):
            self._at.update({rank: (part, shard) for shard, rank in enumerate(members)})

        def parts(owner: int, rank: int) -> Parts:
            shard, n = self._at[rank][1], row.numel()
            of_owner = [(i, leaves[i].in_shard(shard, n)) for i, whose in enumerate(owners) if whose == owner]
            return [(i, part) for i, part in of_owner if part]

        # by rank: parts of its leaves that are here, and parts of this rank's leaves that are there
        self._here = [parts(owner, ranks.rank) for owner in range(ranks.ranks)]
        self._there = [parts(ranks.rank, rank) for rank in range(ranks.ranks)]
        self._owned = [i for i, owner in enumerate(owners) if owner == ranks.rank]
        self._arrives: tuple[list[Parts], list[Tensor]] = [], []
        self._stays: list[Tensor] = []

    def lend(self) -> Messages:
        """Returns the messages to owners."""
        return self._messages([[self._of(self._row, part) for _, part in parts] for parts in self._here], self._there)

    def whole(self) -> dict[int, Tensor]:
        """Returns the leaves that this rank owns, each in its shape; views of the row if all of it is here, and views
        are allowed."""
        found: dict[int, list[list[Tensor]]] = {i: [[] for _ in range(self._leaves[i].parts)] for i in self._owned}
        for rank, i, _, piece in self._arrived():  # the pieces of a vector lie in the order of its ranks
            found[i][self._at[rank][0]].append(piece)
        # kernels may round differently by alignment, and a view begins anywhere
        pack = torch.cat if self._copied else self._packed
        return {i: self._joined(self._leaves[i], list(map(pack, parts))) for i, parts in found.items()}

    def _joined(self, leaf: Leaf, parts: list[Tensor]) -> Tensor:
        """Returns a whole leaf from its flat parts."""
        shape = self._group.layout.shapes[leaf.position]
        shape = shape[1:] if self._group.pinned else shape
        return in_blocks(self._group.joined(leaf.position, [part.view(shape) for part in parts]), leaf.blocks)

    def give_back(self, new: Mapping[int, Tensor]) -> Messages:
        """Returns the messages back to shards. new: value of each leaf that this rank owns"""
        flat = {}
        for i, value in new.items():
            leaf = self._leaves[i]
            whole = from_blocks(value, leaf.blocks).to(self._row.dtype)
            flat[i] = [part.reshape(-1) for part in self._group.cut(leaf.position, whole)]
        pieces: list[list[Tensor]] = [[] for _ in self._there]
        for rank, parts in enumerate(self._there):
            for i, part in parts:
                vector = flat[i][self._at[rank][0]]
                pieces[rank].append(vector.narrow(0, part.start - self._leaves[i].offset, len(part)))
        return self._messages(pieces, self._here)

    def write(self, out: Tensor, scales: Sequence[float] | None = None) -> Tensor:
        """Replaces all leaves in `out`, a shard [n] of any dtype, and returns it. scales: by leaf, in that dtype"""
        for _, i, part, piece in self._arrived():
            written = self._of(out, part).copy_(piece)
            if scales is not None and scales[i] != 1:
                written.mul_(scales[i])
        return out

    def _messages(self, pieces: list[list[Tensor]], arrives: list[Parts]) -> Messages:
        """Returns the messages with `pieces` to each rank, and those with the parts that it sends; a rank's own pieces
        stay where they are."""
        self._stays, pieces[self._rank] = pieces[self._rank], []
        sizes = [sum(len(part) for _, part in parts) for parts in arrives]
        sizes[self._rank] = 0
        self._arrives = arrives, [self._row.new_empty(size) for size in sizes]
        return self._arrives[1], [self._packed(of_rank) for of_rank in pieces]

    def _arrived(self) -> Iterator[tuple[int, int, range, Tensor]]:
        """Yields `(rank, leaf, elements of the unit, their values)` from all ranks, in their order."""
        for rank, (parts, received) in enumerate(zip(*self._arrives, strict=True)):
            begin = 0
            for number, (i, part) in enumerate(parts):
                own = rank == self._rank
                yield rank, i, part, self._stays[number] if own else received.narrow(0, begin, len(part))
                begin += len(part)

    def _of(self, row: Tensor, part: range) -> Tensor:
        return row.narrow(0, part.start - self._at[self._rank][1] * row.numel(), len(part))

    def _packed(self, pieces: list[Tensor]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else self._row.new_empty(0)


def in_blocks(leaf: Tensor, blocks: tuple[int, int] | None) -> Tensor:
    """Returns a leaf as its blocks, [count, ...]."""
    if blocks is None:
        return leaf
    dim, count = blocks
    return leaf.reshape(*leaf.shape[:dim], count, -1, *leaf.shape[dim + 1 :]).movedim(dim, 0)


def from_blocks(leaf: Tensor, blocks: tuple[int, int] | None) -> Tensor:
    """Returns the leaf that `in_blocks` took apart."""
    return leaf if blocks is None else leaf.movedim(0, blocks[0]).flatten(blocks[0], blocks[0] + 1)
