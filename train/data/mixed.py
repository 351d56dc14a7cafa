"""Several sources as one, by weight: which one row p comes from is a function of p and the seed.

Positions are dealt with in hands of `HAND`. In each, a source gets its share to the nearest row, in an order that is
shuffled anew: shares are exact in every hand, and how many rows of each came before p takes no counting.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from train.config import ConfigError
from train.data.rows import Cursor, Indexed, Position, Row, Rows, permutation

HAND = 4096


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of a hand for each source: those that add up to `HAND` and are nearest to its weight's share."""
    exact = [HAND * weight / sum(weights) for weight in weights]
    counts = [int(each) for each in exact]
    rest = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in rest[: HAND - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        raise ConfigError(
            f"data.weights {weights[counts.index(0)]} is less than one row in {HAND}: leave that source out"
        )
    return tuple(counts)


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Rows of several sources. Each has epochs of its own."""

    name: str
    sources: tuple[Rows, ...]
    weights: tuple[float, ...]

    def cursor(self, position: Position, seed: int) -> Cursor:
        return _Dealt(self, position, seed)

    def fingerprint(self) -> str:
        facts = [source.fingerprint() for source in self.sources]
        return hashlib.blake2b(repr((facts, self.weights)).encode(), digest_size=8).hexdigest()

    def require(self, rows: int, why: str) -> None:
        for source, share in zip(self.sources, shares(self.weights), strict=True):
            source.require(-(-rows * share // HAND), why)

    def describe(self) -> str:
        total = sum(self.weights)
        parts = zip(self.sources, self.weights, strict=True)
        return "; ".join(f"{weight / total:.1%} of {source.describe()}" for source, weight in parts)


class _Dealt:
    def __init__(self, mixed: Mixed, position: Position, seed: int) -> None:
        known = position if isinstance(position, dict) else {"rows": position, "sources": [None] * len(mixed.sources)}
        self._rows, self._shares, self._seed = known["rows"], shares(mixed.weights), seed
        hand, within = divmod(self._rows, HAND)
        before = torch.bincount(_order(self._shares, seed, hand)[:within], minlength=len(self._shares)).tolist()
        self._cursors = [
            # a source without a place of its own has passed as many rows as it was dealt
            source.cursor(hand * share + count if at is None else at, seed)
            for source, share, count, at in zip(mixed.sources, self._shares, before, known["sources"], strict=True)
        ]

    @property
    def position(self) -> Position:
        places = [cursor.position for cursor in self._cursors]
        if all(isinstance(place, int) for place in places):
            return self._rows
        return {"rows": self._rows, "sources": [None if isinstance(place, int) else place for place in places]}

    def next(self, wanted: bool = True) -> Row | None:
        hand, within = divmod(self._rows, HAND)
        self._rows += 1
        return self._cursors[int(_order(self._shares, self._seed, hand)[within])].next(wanted)


@lru_cache(maxsize=8)
def _order(shares: tuple[int, ...], seed: int, hand: int) -> Tensor:
    """[HAND]: the source of each row."""
    dealt = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares))
    return dealt[permutation(HAND, seed, -1 - hand)]


def at_most(rows: Rows) -> int:
    """Rows that can be read from the beginning on before one comes a second time."""
    if isinstance(rows, Mixed):
        parts = zip(rows.sources, shares(rows.weights), strict=True)
        return min(at_most(source) * HAND // share for source, share in parts) if rows.sources else 0
    assert isinstance(rows, Indexed), "held-out rows have numbers"
    return rows.count
