"""Documents' tokens as rows of S, in one of two ways. E ends a document:

    documents   a b c E | d e E | f g h E                       S = 4
    stream      tokens a b c E, targets b c E d;   d e E f, e E f g;   ...           cut anywhere, E is read, too
    documents   tokens a b c d, targets b c E e, documents 0 0 0 1;   e f g h, E g h E, 0 1 1 1

Packed as documents, attention and positions begin anew with each, no target belongs to another document, and E is a
target alone, never read: no place is lost. A document that goes beyond a row goes on in the next, as one that begins
there. Both leave out what is less than a row at the end of an epoch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from train.data.rows import Indexed, Row
from train.data.store import Store
from train.data.tokenizer import Tokens

Packing = Literal["stream", "documents"]


@dataclasses.dataclass(frozen=True)
class Packed(Indexed):
    """The rows of a store."""

    name: str
    store: Store
    seq_len: int
    packing: Packing

    @cached_property
    def _inputs(self) -> Tokens:
        """[documents]: tokens that are read, up to and including those of each; of a document all but E."""
        return self.store.ends - np.arange(1, len(self.store.ends) + 1)

    @property
    def count(self) -> int:
        if not len(self.store.ends):
            return 0
        last = int(self._inputs[-1]) if self.packing == "documents" else len(self.store.tokens) - 1
        return last // self.seq_len

    def describe(self) -> str:
        return self.store.describe()

    def fingerprint(self) -> str:
        return digest_of(self.store.digest, self.seq_len, self.packing)

    def row(self, index: int) -> Row:
        start, end = index * self.seq_len, (index + 1) * self.seq_len
        if self.packing == "stream":
            return stream_row(self.store.tokens[start : end + 1])
        first, last = np.searchsorted(self._inputs, (start, end - 1), side="right")
        # of each document before a place one token, its E, is in the store but not read
        tokens = self.store.tokens[start + first : end + last + 1]
        ends = self.store.ends[first:last] - (start + first)
        return packed_row(tokens, ends)


def stream_row(tokens: Tokens) -> Row:
    """tokens: [S + 1]"""
    window = torch.from_numpy(tokens.astype(np.int64))
    return {"tokens": window[:-1], "targets": window[1:]}


def packed_row(tokens: Tokens, ends: Tokens) -> Row:
    """A row out of the tokens that it takes, those E included that lie between or behind.

    tokens: [S + documents]: all of the row's, and the one target behind them
    ends: where in `tokens` documents end, behind their E; not of the last
    """
    keep = np.ones(len(tokens) - 1, bool)
    keep[ends - 1] = False
    documents = np.searchsorted(ends, np.flatnonzero(keep), side="right")
    window = torch.from_numpy(tokens.astype(np.int64))
    kept = torch.from_numpy(keep)
    return {"tokens": window[:-1][kept], "targets": window[1:][kept], "documents": torch.from_numpy(documents)}


def digest_of(*facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
