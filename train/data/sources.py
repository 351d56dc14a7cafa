"""Opens what the settings of a run name: `training, heldout = open_text(config, tokenizer, ...)`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from train.config import Chats, ConfigError, Data, Sources, Tables
from train.data.conversations import Conversations, Source, chat_of
from train.data.documents import (
    Docstrings,
    Documents,
    Table,
    TextFiles,
    fingerprint,
    halves_of,
    split,
    standard_library,
)
from train.data.foreign import Pipeline, stored
from train.data.rows import Mixed, Rows, shares
from train.data.store import Packed, tokenised
from train.data.stream import Gathered, Stream, first_rows
from train.data.tokenizer import BYTES, Tokenizer

TRAINING, HELDOUT = "training text", "held-out text"


@dataclasses.dataclass(frozen=True)
class Opening:
    """Makes the rows of every source."""

    config: Data
    tokenizer: Tokenizer
    cache: Path
    """The folder that tokens are kept in."""
    heldout_rows: int
    """Held-out rows that will be read; 0: held-out text is left alone."""

    def rows(self, name: str, found: Documents) -> Rows:
        config = self.config
        none_held = isinstance(found, Table) and found.side == "held-out" and not found.fraction
        if name == HELDOUT and (none_held or not self.heldout_rows):
            return Gathered(HELDOUT, (), "")
        if not (config.streaming and isinstance(found, Table)):
            return self.packed(name, found)
        block = config.shuffle if name == TRAINING else 1  # held-out text is read no further than it must be
        stream = Stream(name, found, self.tokenizer, config.seq_len, config.packing, block)
        return stream if name == TRAINING else first_rows(stream, self.heldout_rows)

    def packed(self, name: str, found: Documents) -> Packed:
        """Rows of tokens on the disk. Those of the bytes of files were read from the files once, and known by them."""
        config = self.config
        store = tokenised(found, self.tokenizer, self.cache)
        known_as = ""
        if isinstance(found, TextFiles) and config.tokenizer == BYTES and config.packing == "stream":
            paths = [path for path in found.paths if path.stat().st_size]
            if len(store.tokens) == sum(path.stat().st_size + 1 for path in paths):  # else some are no UTF-8
                known_as = fingerprint(name, paths, config.seq_len)
        return Packed(name, store, config.seq_len, config.packing, known_as)

    def stored(self, source: str) -> tuple[Rows, Rows]:
        """`(training, held-out)` rows of tokens that another library has stored."""
        config = self.config
        halves = stored(source, self.tokenizer, config.heldout_fraction, self.cache)
        training, heldout = (
            Packed(name, half, config.seq_len, config.packing)
            for name, half in zip((TRAINING, HELDOUT), halves, strict=True)
        )
        return training, heldout if self.heldout_rows else Gathered(HELDOUT, (), "")

    def made(self, source: str) -> tuple[Rows, Rows]:
        """`(training, held-out)` rows of a pipeline of another library."""
        config = self.config
        vocab = self.tokenizer.vocab
        training, heldout = (
            Pipeline(name, source, split, config.seq_len, config.packing, vocab)
            for name, split in ((TRAINING, "training"), (HELDOUT, "heldout"))
        )
        return training, heldout.first(self.heldout_rows)


def open_text(config: Data, tokenizer: Tokenizer, cache: Path, heldout_rows: int) -> tuple[Rows, Rows]:
    """`(training, held-out)` rows; the same on every rank that sees the same sources. Arguments as in `Opening`."""
    opening = Opening(config, tokenizer, cache, heldout_rows)
    parts = [
        (opening.rows(TRAINING, training), opening.rows(HELDOUT, heldout)) for training, heldout in documents(config)
    ]
    parts += [opening.stored(source) for source in config.stores]
    parts += [opening.made(source) for source in config.pipelines]
    if len(parts) == 1:
        return parts[0]
    weights = config.weights or (1.0,) * len(parts)
    shares(weights)
    return Mixed(TRAINING, tuple(one for one, _ in parts), weights), Mixed(
        HELDOUT, tuple(one for _, one in parts), weights
    )


def documents(config: Sources) -> list[tuple[Documents, Documents]]:
    """`(training, held-out)` documents of each source."""
    found: list[tuple[Documents, Documents]] = []
    if config.reads_files:
        training, heldout = split(config)
        found.append((TextFiles(tuple(training)), TextFiles(tuple(heldout))))
    return found + [halves(config, source, streaming=config.streaming) for source in config.datasets]


def halves(config: Tables, source: str, **more: Any) -> tuple[Table, Table]:
    """`(training, held-out)` documents of one dataset: by split, by files, or by the hash of each text.

    more: of `Table`
    """
    table = dataclasses.replace(Table.of(source, config.column), **more)
    table = table if table.paths else dataclasses.replace(table, split=config.split)
    for name, value in {"split": config.split != "train", "heldout_split": bool(config.heldout_split)}.items():
        if value and table.paths:
            flag = "--data.heldout-files names held-out ones" if name == "heldout_split" else "leave it out"
            raise ConfigError(f"data.{name} is of datasets with a name; {source!r} is local files: {flag}")
    if config.heldout_split:
        return table, dataclasses.replace(table, split=config.heldout_split)
    if config.heldout_files and not getattr(config, "files", ()):  # of text, where there are text files
        heldout = dataclasses.replace(Table.local(config.heldout_files, config.column, "data.heldout_files"), **more)
        left = tuple(path for path in table.paths if path not in heldout.paths)
        if table.paths and not left:
            raise ConfigError(f"data.heldout_files name all files of {source!r}: none is left to train on")
        return dataclasses.replace(table, paths=left), heldout
    fraction = config.heldout_fraction
    training, heldout = (dataclasses.replace(table, fraction=fraction, side=side) for side in ("training", "held-out"))
    return training, heldout


def open_conversations(config: Chats, tokenizer: Tokenizer, cache: Path) -> tuple[Rows, Rows]:
    """`(training, held-out)` rows of conversations; of the standard library's docstrings, where there are no others."""
    chat = chat_of(tokenizer)
    # streaming: of those with a name, too, only tokens are kept
    found = [halves(config, source, holds="messages", streaming=True) for source in config.datasets]
    pairs: list[tuple[Source, Source]] = [*found] or [_docstrings(config)]
    sides = ((TRAINING, [one for one, _ in pairs]), (HELDOUT, [one for _, one in pairs]))
    training, heldout = (Conversations.of(name, side, tokenizer, chat, config.seq_len, cache) for name, side in sides)
    return training, heldout


def _docstrings(config: Chats) -> tuple[Docstrings, Docstrings]:
    """Held out are the files that `clm` holds out of its own text by default."""
    training, heldout = halves_of(standard_library(), config.heldout_fraction)
    return Docstrings(tuple(training)), Docstrings(tuple(heldout))
