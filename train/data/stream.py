"""Rows of documents that are read as they come: a dataset too large to be kept, or without an end.

    for epoch in 0, 1, ...:
        for number, block in enumerate(blocks of --data.shuffle documents):     # files in another order each epoch
            for document in permutation(seed, epoch, number) of block:
                yield its tokens                                               # which store.py cuts into rows

A position is where a row begins: the epoch, the dataset's own state at the start of the block, how many of its
documents have been passed, how many tokens of the one after. No shuffle buffer is kept in it: a resumed run reads the
block again.
All ranks read and tokenise all documents, since where a row begins depends on the length of all before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from train.config import ConfigError, require
from train.data.documents import Table
from train.data.rows import Count, Cursor, Indexed, Position, Row, digest_of, permutation, typed_as
from train.data.store import Packing, encoded, packed_row, stream_row
from train.data.tokenizer import Tokenizer, Tokens
from yafsdp_fn.util.words import counted


class Place(NamedTuple):
    """The place before a document.

    block: the dataset's state at its start, None at an epoch's; passed: documents of it
    """

    epoch: Count
    number: Count
    block: dict[str, Any] | None
    passed: Count


class Passed(NamedTuple):
    """A position: the document that comes next, and how many of its tokens are passed."""

    place: Place
    tokens: Count


START = Place(0, 0, None, 0)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Rows without a number: they come in their order."""

    name: str
    table: Table
    tokenizer: Tokenizer
    seq_len: int
    packing: Packing
    shuffle: int

    def cursor(self, position: Position, seed: int) -> Cursor:
        begins = type(position) is int and position == 0
        at: Passed = Passed(START, 0) if begins else typed_as(Passed, position, "the position")
        return _Passing(self, at.place, at.tokens, seed)

    def fingerprint(self) -> str:
        facts = (self.table.key(), self.tokenizer.fingerprint(), self.seq_len, self.packing, self.shuffle)
        return digest_of(*facts)

    def require(self, rows: int, why: str) -> None:
        """Nobody knows how many there are; fewer come again."""

    def describe(self) -> str:
        return f"a stream of {self.table.label}"

    def documents(self, place: Place, seed: int) -> Iterator[tuple[Place, Tokens]]:
        """`(place of the document, its tokens with E)` from `place` on, without an end."""
        while True:
            found = False
            for at, tokens in encoded(((text, at) for at, text in self._epoch(place, seed)), self.tokenizer):
                found = True
                yield at[1], tokens
            if not found and place == START._replace(epoch=place.epoch):
                raise ConfigError(f"{self.name}: {self.table.label}: there is no text in it")
            place = START._replace(epoch=place.epoch + 1)

    def _epoch(self, place: Place, seed: int) -> Iterator[tuple[Place, str]]:
        epoch, number, state, passed = place
        walk = (found for found in self.table.walk(state, order=(seed, epoch)) if found[0])
        while block := list(islice(walk, self.shuffle)):
            order = permutation(len(block), seed, epoch * 2**32 + number).tolist()
            for index in range(passed, len(order)):
                yield Place(epoch, number, state, index), block[order[index]][0]
            number = number + 1
            state = block[-1][1]()
            passed = 0


class _Passing:
    """Cuts a stream's documents into rows.

    pending: documents that a row may take from; of the first, rows before had `used` tokens.
    """

    def __init__(self, stream: Stream, place: Place, used: int, seed: int) -> None:
        self._documents = stream.documents(place, seed)
        self._seq_len = stream.seq_len
        self._packed = stream.packing == "documents"
        self._place, self._used = place, used
        self._pending: list[tuple[Place, Tokens]] = []

    @property
    def position(self) -> Position:
        return {"place": list(self._place), "tokens": self._used}

    def next(self, wanted: bool = True) -> Row | None:
        last_unread = 1 if self._packed else 0  # of each document: its E, which is a target alone
        needed = self._used + self._seq_len + (not self._packed)
        there = sum(len(tokens) - last_unread for _, tokens in self._pending)
        while there < needed:
            self._pending.append(next(self._documents))
            there += len(self._pending[-1][1]) - last_unread
            have = len(self._pending[0][1])
            require(self._used <= have, f"the position is behind {self._used} tokens of a document of {have}")
        row = self._row() if wanted else None
        self._used += self._seq_len
        while self._pending and self._used >= len(self._pending[0][1]) - last_unread:
            self._used -= len(self._pending.pop(0)[1]) - last_unread
        if not self._pending:
            self._pending.append(next(self._documents))
        self._place = self._pending[0][0]
        return row

    def _row(self) -> Row:
        tokens = np.concatenate([tokens for _, tokens in self._pending])[self._used :]
        if not self._packed:
            return stream_row(tokens[: self._seq_len + 1])
        ends = np.cumsum([len(tokens) for _, tokens in self._pending]) - self._used
        last = int(np.searchsorted(ends - np.arange(1, len(ends) + 1), self._seq_len - 1, side="right"))
        return packed_row(tokens[: self._seq_len + last + 1], ends[:last])


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered(Indexed):
    """Rows that are kept in memory: the first of the held-out text of a stream."""

    name: str
    rows: tuple[Row, ...]
    of: str
    """Their source, for people."""

    @property
    def count(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        return self.rows[index]

    def describe(self) -> str:
        return f"{counted(len(self.rows), 'row')} of {self.of}" if self.rows else "nothing"

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for row in self.rows:
            for key in sorted(row):
                digest.update(row[key].numpy().tobytes())
        return digest.hexdigest()


def first_rows(stream: Stream, count: int) -> Gathered:
    """The first rows of a stream, at most `count`, none a second time."""
    cursor = stream.cursor(0, 0)
    rows = list[Row]()
    while len(rows) < count:
        row = cursor.next()
        if cursor.position["place"][0] > 0:  # of the next epoch, the row's end at least
            break
        assert row is not None, "it was wanted"
        rows.append(row)
    return Gathered(stream.name, tuple(rows), stream.describe())
