"""Moves leaves of a unit between shards and their owners, where each is whole for a moment (util/owners.py)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.params.layout import Group
from yafsdp_fn.util.owners import Leaf

Messages = tuple[list[Tensor], list[Tensor]]
"""The tensors that a rank receives from each rank, and sends to each; empty if there is nothing."""

Parts = list[tuple[int, range]]
"""`(leaf, elements of the unit)`: parts of leaves."""


class UnitPlan(NamedTuple):
    """The leaves of a unit of `group` that go to owners; owners: of these"""

    group: Group
    leaves: list[Leaf]
    owners: list[int]


class LeafExchange:
    """The leaves of one unit, from shards to their owners and back:

        loan = LeafExchange(plan, row, ranks)
        ranks.exchange(*loan.lend())
        new = {leaf: work(whole) for leaf, whole in loan.whole().items()}       # those that this rank owns
        ranks.exchange(*loan.give_back(new))
        row = loan.write(row.clone())

    plan: of the unit; row: this rank's shard [n] of it, which stays as it is
    """

    def __init__(self, plan: UnitPlan, row: Tensor, ranks: Ranks) -> None:
        self._group, self._leaves, owners = plan
        self._row = row
        self._rank = ranks.rank
        self._copied = ranks.deterministic
        # rank -> which part of each leaf its vector has, if they are split, and which shard of the vector is there
        self._at: dict[int, tuple[int, int]] = {}
        for part, members in enumerate(ranks.subgroups(across=self._group.over)):
            for shard, rank in enumerate(members):
                self._at[rank] = part, shard
        # by rank: parts of its leaves that are here, and parts of this rank's leaves that are there
        owned: list[list[int]] = [[] for _ in range(ranks.ranks)]
        for number, owner in enumerate(owners):
            owned[owner].append(number)
        self._owned = owned[ranks.rank]
        self._here = [self._parts(numbers, ranks.rank) for numbers in owned]
        self._there = [self._parts(self._owned, rank) for rank in range(ranks.ranks)]
        # of the messages under way: rank and leaf, elements of the unit, and the memory to which their values come
        self._arrives: list[tuple[int, int, range, Tensor]] = []

    def _parts(self, numbers: Sequence[int], rank: int) -> Parts:
        """Returns the parts of these leaves that are in the shard of `rank`."""
        shard = self._at[rank][1]
        found = [(number, self._leaves[number].in_shard(shard, self._row.numel())) for number in numbers]
        return [(number, part) for number, part in found if part]

    # ---- to owners

    def lend(self) -> Messages:
        """Returns the messages to owners."""
        pieces = [[self._of(self._row, part) for _, part in parts] for parts in self._here]
        return self._messages(pieces, self._there)

    def whole(self) -> dict[int, Tensor]:
        """Returns the leaves that this rank owns, each in its shape; views of the row if all of it is here, and views
        are allowed."""
        # kernels may round differently by alignment, and a view begins anywhere
        pack = torch.cat if self._copied else self._packed
        pieces: dict[int, list[list[Tensor]]] = {}
        for number in self._owned:
            pieces[number] = [[] for _ in range(self._leaves[number].parts)]
        for rank, number, _, piece in self._arrives:  # the pieces of a vector lie in the order of its ranks
            pieces[number][self._at[rank][0]].append(piece)
        return {number: self._joined(number, [pack(part) for part in parts]) for number, parts in pieces.items()}

    def _joined(self, number: int, parts: list[Tensor]) -> Tensor:
        """Returns a whole leaf from its flat parts."""
        leaf = self._leaves[number]
        shape = self._group.layout.shapes[leaf.position]
        if self._group.pinned:
            shape = shape[1:]
        whole = self._group.joined(leaf.position, [part.view(shape) for part in parts])
        return in_blocks(whole, leaf.blocks)

    # ---- back to shards

    def give_back(self, new: Mapping[int, Tensor]) -> Messages:
        """Returns the messages back to shards. new: value of each leaf that this rank owns"""
        flat: dict[int, list[Tensor]] = {}
        for number, value in new.items():
            leaf = self._leaves[number]
            whole = from_blocks(value, leaf.blocks).to(self._row.dtype)
            flat[number] = [part.reshape(-1) for part in self._group.cut(leaf.position, whole)]
        pieces: list[list[Tensor]] = [[] for _ in self._there]
        for rank, parts in enumerate(self._there):
            for number, part in parts:
                vector = flat[number][self._at[rank][0]]
                begin = part.start - self._leaves[number].offset
                pieces[rank].append(vector.narrow(0, begin, len(part)))
        return self._messages(pieces, self._here)

    def write(self, out: Tensor, scales: Sequence[float] | None = None) -> Tensor:
        """Replaces all leaves in `out`, a shard [n] of any dtype, and returns it. scales: by leaf, in that dtype"""
        for _, number, part, piece in self._arrives:
            written = self._of(out, part).copy_(piece)
            if scales is not None and scales[number] != 1:
                written.mul_(scales[number])
        return out

    # ---- either way

    def _messages(self, pieces: list[list[Tensor]], arrives: list[Parts]) -> Messages:
        """Returns the messages with `pieces` to each rank, and those with the parts that it sends; a rank's own pieces
        stay where they are."""
        received = []
        self._arrives = []
        for rank, parts in enumerate(arrives):
            lengths = [len(part) for _, part in parts]
            values: Sequence[Tensor] = pieces[rank]
            received.append(self._row.new_empty(0 if rank == self._rank else sum(lengths)))
            if rank != self._rank:
                values = torch.split(received[rank], lengths)
            for (number, part), piece in zip(parts, values, strict=True):
                self._arrives.append((rank, number, part, piece))
        pieces[self._rank] = []
        return received, [self._packed(of_rank) for of_rank in pieces]

    def _of(self, row: Tensor, part: range) -> Tensor:
        begin = part.start - self._at[self._rank][1] * row.numel()
        return row.narrow(0, begin, len(part))

    def _packed(self, pieces: list[Tensor]) -> Tensor:
        if not pieces:
            return self._row.new_empty(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def in_blocks(leaf: Tensor, blocks: tuple[int, int] | None) -> Tensor:
    """Returns a leaf as its blocks, [count, ...]."""
    if blocks is None:
        return leaf
    dim, count = blocks
    return leaf.reshape(*leaf.shape[:dim], count, -1, *leaf.shape[dim + 1 :]).movedim(dim, 0)


def from_blocks(leaf: Tensor, blocks: tuple[int, int] | None) -> Tensor:
    """Returns the leaf that `in_blocks` took apart."""
    return leaf if blocks is None else leaf.movedim(0, blocks[0]).flatten(blocks[0], blocks[0] + 1)
