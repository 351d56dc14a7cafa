"""Whole conversations packed into rows, and the rows of what the assistant says.

    a row    user ... assistant ... | user ... assistant ... | padding
    targets  -100 ... the next one  | -100 ... the next one  | -100          documents 0 ..., 1 ..., 2

A conversation goes into the first of `OPEN` unfilled rows that has room for it, so an epoch has each once, cut off
where it is longer than a row. Which share a row does not change; the order of rows does, in each epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from train.config import ConfigError
from train.data.chat import Chat, Messages
from train.data.packing import digest_of
from train.data.rows import Indexed, Row
from train.data.store import Notes, Store, kept
from train.data.tokenizer import Tokenizer, Tokens

OPEN = 32


class Source(Protocol):
    @property
    def label(self) -> str: ...

    def key(self) -> str:
        """Changes with the conversations."""
        ...

    def conversations(self) -> Iterator[Messages]: ...


@dataclasses.dataclass(frozen=True)
class Several:
    """One source after the other."""

    sources: tuple[Source, ...]

    @property
    def label(self) -> str:
        return "; ".join(source.label for source in self.sources)

    def key(self) -> str:
        return digest_of(*(source.key() for source in self.sources))

    def conversations(self) -> Iterator[Messages]:
        for source in self.sources:
            yield from source.conversations()


@dataclasses.dataclass(frozen=True)
class Conversations(Indexed):
    """The rows of stored conversations: tokens as they are, those that the assistant says as -1 - token."""

    name: str
    store: Store
    seq_len: int

    @staticmethod
    def of(name: str, source: Source, tokenizer: Tokenizer, chat: Chat, seq_len: int, cache: Path) -> Conversations:
        """Raises ConfigError, naming the conversation, where one cannot be written."""

        def arrays(notes: Notes) -> Iterator[Tokens]:
            for number, messages in enumerate(source.conversations(), 1):
                try:
                    tokens, learnt = chat.encode(messages)
                except ConfigError as error:
                    raise ConfigError(f"{name}: {source.label}: conversation {number}: {error}") from error
                notes["cut off"] += len(tokens) > seq_len + 1
                signed = np.where(learnt, -1 - tokens.astype(np.int32), tokens)[: seq_len + 1]
                if (signed[1:] < 0).any():
                    yield signed
                else:
                    notes["left out, without an answer in a row's length"] += 1

        key = (source.key(), tokenizer.fingerprint(), chat.fingerprint(), str(seq_len))
        return Conversations(name, kept(source.label, key, arrays, np.int32, cache), seq_len)

    @cached_property
    def _rows(self) -> list[list[int]]:
        """Which conversations each row has."""
        rows: list[list[int]] = []
        unfilled: list[tuple[int, int]] = []  # (row, places left), the oldest first
        for index, length in enumerate(np.diff(self.store.ends, prepend=0).tolist()):
            places = length - 1  # the last token is a target alone
            at = next((i for i, (_, left) in enumerate(unfilled) if places <= left), None)
            if at is None:
                rows.append([index])
                unfilled = [*unfilled[-OPEN + 1 :], (len(rows) - 1, self.seq_len - places)]
            else:
                row, left = unfilled[at]
                rows[row].append(index)
                unfilled[at] = (row, left - places)
        return rows

    @property
    def count(self) -> int:
        return len(self._rows)

    def describe(self) -> str:
        filled = (len(self.store.tokens) - len(self.store.ends)) / max(1, self.count * self.seq_len)
        said = "".join(f", {count:,} {note}" for note, count in self.store.notes.items() if count)
        return f"{len(self.store.ends):,} conversations in {self.count:,} rows, {filled:.0%} full{said}"

    def fingerprint(self) -> str:
        return digest_of(self.store.digest, self.seq_len, OPEN)

    def row(self, index: int) -> Row:
        tokens, documents = torch.zeros(2, self.seq_len, dtype=torch.int64)
        targets = torch.full((self.seq_len,), -100)
        at = 0
        for number, conversation in enumerate(self._rows[index]):
            start = self.store.ends[conversation - 1] if conversation else 0
            signed = torch.from_numpy(self.store.tokens[start : self.store.ends[conversation]].astype(np.int64))
            plain = torch.where(signed < 0, -1 - signed, signed)
            end = at + len(plain) - 1
            tokens[at:end], documents[at:end] = plain[:-1], number
            targets[at:end] = torch.where(signed[1:] < 0, plain[1:], -100)
            at = end
        documents[at:] = len(self._rows[index])
        return {"tokens": tokens, "targets": targets, "documents": documents}
