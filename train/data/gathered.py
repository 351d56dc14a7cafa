"""Rows that are kept in memory: the first of the held-out text of a stream."""

from __future__ import annotations

import dataclasses
import hashlib

from train.data.rows import Indexed, Row
from train.data.stream import Stream


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered(Indexed):
    name: str
    rows: tuple[Row, ...]
    of: str
    """Where they are from, for people."""

    @property
    def count(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        return self.rows[index]

    def describe(self) -> str:
        return f"{len(self.rows)} rows of {self.of}" if self.rows else "nothing"

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for row in self.rows:
            for key in sorted(row):
                digest.update(row[key].numpy().tobytes())
        return digest.hexdigest()


def first_rows(stream: Stream, count: int) -> Gathered:
    """The first rows of a stream, at most `count`, none a second time."""
    cursor, rows = stream.cursor(0, 0), list[Row]()
    while len(rows) < count:
        row = cursor.next()
        if cursor.position["place"][0] > 0:  # of the next epoch, the row's end at least
            break
        assert row is not None, "it was wanted"
        rows.append(row)
    return Gathered(stream.name, tuple(rows), stream.describe())
