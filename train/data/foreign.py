"""Reads what other libraries have prepared: their stores of tokens, and their pipelines, which make rows on the way.

training, heldout = stored("part", ...)                        # Megatron-LM's
rows = Pipeline(..., "data.py:rows", ...)                       # grain's, torchdata's
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from train.config import ConfigError, own_function, require
from train.data.documents import fingerprint
from train.data.rows import Count, Cursor, Position, Row, digest_of, typed_as
from train.data.store import AT_ONCE, Notes, Packing, Store, kept, read
from train.data.stream import Gathered
from train.data.tokenizer import Tokenizer, Tokens


def stored(source: str, tokenizer: Tokenizer, fraction: float, cache: Path) -> tuple[Store, Store]:
    """`(training, held-out)` documents of a store, PREFIX of PREFIX.bin and PREFIX.idx. Held out is the last `fraction`
    of them. Raises ConfigError for files of another form, for tokens beyond the tokenizer's, and for documents
    that do not end as its do: all are looked at, which `cache` keeps."""
    path = Path(source).expanduser()
    found = _megatrons(path)
    rising = bool((np.diff(found.ends, prepend=0) > 0).all())
    require(rising, f"data.stores: {path}: expected documents of a token or more, whose ends rise from above 0")
    key = "looked at", found.digest, f"{tokenizer.vocab}", f"{tokenizer.end}"
    kept(f"data.stores: {path}", key, partial(_looked_at, path, found, tokenizer), np.uint8, cache)
    return found.halves(round(len(found.ends) * (1 - fraction)))


def _looked_at(path: Path, store: Store, tokenizer: Tokenizer, notes: Notes) -> Iterator[Tokens]:
    """Looks at the documents of a store, in the way of what `kept` makes: of no tokens, since they stay where they are.
    Raises ConfigError with the first that the tokenizer cannot have made."""
    for first in range(0, len(store.ends), AT_ONCE):
        ends = store.ends[first : first + AT_ONCE]
        start = int(store.ends[first - 1]) if first else 0
        tokens = store.tokens[start : ends[-1]]
        wrong = (tokens < 0) | (tokens >= tokenizer.vocab)
        wrong[ends - start - 1] |= tokens[ends - start - 1] != tokenizer.end
        if wrong.any():
            at = int(wrong.argmax())
            document = first + int(np.searchsorted(ends, start + at, "right"))
            raise ConfigError(
                f"data.stores: {path}: token {tokens[at]} in document {document}: expected tokens below "
                f"{tokenizer.vocab}, and documents that end with {tokenizer.end}, as those of data.tokenizer do: name "
                "the tokenizer that made them, with --append-eod"
            )
    yield from ()


# ---- Stores of Megatron-LM (its indexed dataset, version 1):
#
#     PREFIX.bin    all sequences, one after the other; a document is one or several
#     PREFIX.idx    "MMIDIDX", version, dtype, numbers of sequences S and of documents + 1
#                   int32 [S] lengths, int64 [S] offsets in bytes, int64 [documents + 1] first sequences

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def _megatrons(base: Path) -> Store:
    """The documents in PREFIX.bin and PREFIX.idx, read where they lie."""
    index, content = (base.with_name(f"{base.name}{suffix}") for suffix in (".idx", ".bin"))
    try:
        with open(index, "rb") as stream:
            head = stream.read(34)
            if head[:9] != MAGIC or len(head) < 34:
                raise ValueError(f"expected an index that begins with {MAGIC!r}, got {head[:9]!r}")
            version, code, sequences, bounds = struct.unpack("<QBQQ", head[9:])
            if version != 1 or code not in DTYPES or max(sequences, bounds) > index.stat().st_size:
                raise ValueError(f"it has version {version}, dtype {code}, {sequences} sequences, {bounds} bounds")
            lengths = np.frombuffer(stream.read(4 * sequences), np.int32)
            offsets, first = (np.frombuffer(stream.read(8 * n), np.int64) for n in (sequences, bounds))
        dtype = np.dtype(DTYPES[code])
        ends = np.cumsum(lengths, dtype=np.int64)
        whole = len(lengths) == len(offsets) == sequences and len(first) == bounds
        if not whole or not np.array_equal(offsets, (ends - lengths) * dtype.itemsize) or (lengths < 0).any():
            raise ValueError("expected sequences one after the other, each with its length and offset")
        if not bounds or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 1).any():
            raise ValueError("expected the first sequence of each document, rising from 0 to the number of sequences")
        tokens = read(content, dtype)
        if len(tokens) != (ends[-1] if sequences else 0) or content.stat().st_size % dtype.itemsize:
            raise ValueError(f"{content} has {content.stat().st_size:,} bytes, of another number of tokens")
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.stores: {index}: {error}") from error
    return Store(tokens, ends[first[1:] - 1], fingerprint(str(base), [index, content]), Notes())


# ---- Pipelines of grain and torchdata


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Rows that a pipeline of another library makes, in its order.

        def NAME(*, split, epoch, seed, seq_len):       # split: "training" or "heldout"
            return a grain MapDataset, IterDataset or DataLoader, or a torchdata StatefulDataLoader or nodes.Loader

    It gives `{"tokens": [S], "targets": [S]}`, with "documents" [S] where packing is `documents`; or several rows at
    once, [n, S]. Where it ends, the function makes that of the next epoch.

    Every rank runs the whole pipeline and keeps its part of each step, as for streams. A position is the pipeline's
    own state, and means the same on any number of ranks. A pipeline that differs between ranks, since it deals out rows
    itself, is refused: the first row is part of the fingerprint, and so is its length, where it has one.
    """

    name: str
    source: str
    """FILE.py:NAME"""
    split: str
    seq_len: int
    packing: Packing
    vocab: int

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return own_function(self.source, "data.pipelines", "one that makes a pipeline of grain or torchdata")

    @property
    def label(self) -> str:
        return f"data.pipelines {self.source}, {self.split}"

    def _made(self, epoch: int, seed: int) -> Any:
        with self.naming("it cannot be made"):
            made = self._function(split=self.split, epoch=epoch, seed=seed, seq_len=self.seq_len)
            require(made is not None, "it is None; for no evaluation, --eval-every 0")
            return made

    def feed(self, epoch: int, seed: int, state: Any) -> Feed:
        """The pipeline of an epoch, from `state` on, as JSON; None: its beginning."""
        made = self._made(epoch, seed)
        with self.naming("it cannot be gone on with from the checkpoint" if state else "it cannot begin"):
            return feed_of(made, from_json(state))

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Errors of somebody's code, by the pipeline's name."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.label}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{self.label}: {what}: {type(error).__name__}: {error}") from error

    def cursor(self, position: Position, seed: int) -> Cursor:
        return _Passing(self, *_place(position), seed)

    def fingerprint(self) -> str:
        path, _, name = self.source.rpartition(":")
        length = length_hint(self._made(0, 0), -1)
        first = self.first(1).fingerprint()
        facts = name, self.split, self.seq_len, self.packing, length, first
        return digest_of(fingerprint(self.source, [Path(path)]), *facts)

    def first(self, most: int) -> Gathered:
        """The first rows, none a second time."""
        cursor = self.cursor(0, 0)
        rows = list[Row]()
        while len(rows) < most and cursor.position["place"][0] == 0:
            row = cursor.next()
            assert row is not None, "it was wanted"
            rows.append(row)
        return Gathered(self.name, tuple(rows), self.source)

    def require(self, rows: int, why: str) -> None:
        """Nobody knows how many there are; fewer come again."""

    def describe(self) -> str:
        return f"rows of {self.source}"

    def rows(self, element: Any) -> list[Row]:
        """The rows of what the pipeline gave."""
        names = ("tokens", "targets", *(("documents",) if self.packing == "documents" else ()))
        if not isinstance(element, Mapping) or set(element) != set(names):
            there = sorted(map(str, element)) if isinstance(element, Mapping) else type(element).__name__
            raise ConfigError(
                f"it gives {there}: expected a dict of {', '.join(names)}, as data.packing is {self.packing}"
            )
        given = {name: torch.as_tensor(np.asarray(element[name])) for name in names}
        # copies: what comes next is asked for before these are used, and may be written into the same arrays
        found = {name: each.to(torch.int64, copy=True) for name, each in given.items()}
        tokens = found["tokens"]
        targets = found["targets"]
        shapes = {name: tuple(each.shape) for name, each in found.items()}
        sizes = set(shapes.values())
        require(
            len(sizes) == 1 and tokens.ndim in (1, 2) and tokens.shape[-1] == self.seq_len and tokens.numel() > 0,
            f"it gives {shapes}: expected [{self.seq_len}] each, or [n, {self.seq_len}], as data.seq_len has it",
        )
        require(
            not any(each.is_floating_point() or each.is_complex() for each in given.values()),
            f"it gives {', '.join(str(each.dtype) for each in given.values())}: expected integers",
        )
        wrong = (tokens < 0) | (tokens >= self.vocab)
        wrong |= (targets >= self.vocab) | ((targets < 0) & (targets != -100))
        require(
            not bool(wrong.any()),
            f"it gives tokens {tokens.min()} to {tokens.max()}, targets {targets.min()} to {targets.max()}: those of "
            f"data.tokenizer are below {self.vocab}, and -100 is no target",
        )
        if self.packing == "documents":
            steps = torch.diff(found["documents"], prepend=torch.zeros_like(tokens[..., :1]))
            require(bool(((steps == 0) | (steps == 1)).all()), "its documents are not 0, 1, ... in their order")
        rows = zip(*(each.reshape(-1, self.seq_len) for each in found.values()), strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]


class Feed(NamedTuple):
    """A pipeline under way."""

    next: Callable[[], Any]
    """Returns what comes next: a row, or several. Raises StopIteration at the end."""
    state: Callable[[], Any]
    """Returns the state before what comes next."""


def feed_of(made: Any, state: Any) -> Feed:
    """A pipeline of a library that can say where it is, from `state` on, by the library's own protocol."""
    if hasattr(made, "load_state_dict"):  # torchdata's; a dataset of Hugging Face's, too
        if state is not None:
            made.load_state_dict(state)
        return Feed(iter(made).__next__, made.state_dict)
    rows = iter(made)
    if not hasattr(rows, "set_state"):  # grain's
        raise ConfigError(
            f"it is a {type(made).__name__}, which cannot say where it is: expected grain's MapDataset, IterDataset or "
            "DataLoader, or torchdata's StatefulDataLoader or nodes.Loader"
        )
    if state is not None:
        rows.set_state(state)
    return Feed(rows.__next__, rows.get_state)


class _Passing:
    """A place in a pipeline: {"place": [epoch, state before what is being passed, rows of it that are passed]}.

    What comes next is asked for before it is wanted: only so is it known whether an epoch has ended, and of a pipeline
    that has ended libraries do different things.
    """

    def __init__(self, rows: Pipeline, epoch: int, state: Any, passed: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._state, self._passed = epoch, state, passed
        self._feed: Feed | None = None
        self._under_way: list[Row] = []

    @property
    def position(self) -> Position:
        return {"place": [self._epoch, self._state, self._passed]}

    def next(self, wanted: bool = True) -> Row | None:
        if self._feed is None:
            self._advance(self._rows.feed(self._epoch, self._seed, self._state), self._passed)
        row = self._under_way[self._passed]
        self._passed += 1
        if self._passed == len(self._under_way):
            assert self._feed is not None
            with self._rows.naming("it cannot say where it is"):
                self._state = to_json(self._feed.state())
            self._advance(self._feed, 0)
        return row if wanted else None

    def _advance(self, feed: Feed, passed: int) -> None:
        """Takes what comes next of a pipeline; where it has ended, of that of the next epoch."""
        while (taken := self._taken(feed)) is None:
            require(self._state is not None, f"{self._rows.label}: it gives no rows")
            self._epoch = self._epoch + 1
            self._state = None
            passed = 0
            feed = self._rows.feed(self._epoch, self._seed, None)
        require(passed < len(taken), f"{self._rows.label}: the position is behind the rows that it gives")
        self._feed, self._under_way, self._passed = feed, taken, passed

    def _taken(self, feed: Feed) -> list[Row] | None:
        with self._rows.naming("it fails"):
            try:
                return self._rows.rows(feed.next())
            except StopIteration:
                return None


def _place(position: Position) -> tuple[int, Any, int]:
    if type(position) is int and position == 0:
        return 0, None, 0
    place = position.get("place") if isinstance(position, dict) and len(position) == 1 else None
    if not isinstance(place, list) or len(place) != 3:
        raise ConfigError(f"expected a place of a pipeline, got {position!r:.60}")
    epoch, state, passed = place
    return typed_as(Count, epoch, "its epoch"), state, typed_as(Count, passed, "the number of rows passed")


ADDRESS = re.compile(r"\S+( object)? at 0x[0-9a-f]+")


def to_json(state: Any, where: str = "its state") -> Any:
    """A pipeline's state as JSON; tensors and bytes by their kind. Nothing is pickled: checkpoints come from other
    people."""
    if state is None or isinstance(state, bool | int | float | str):
        # grain's DataLoader keeps the repr of what it reads, and goes on with the same one alone
        if isinstance(state, str) and (address := ADDRESS.search(state)):
            raise ConfigError(f"{where} has an address in memory, {address[0]}: give that object a __repr__")
        return state
    if isinstance(state, dict) and all(isinstance(key, str) and key[:1] != "#" for key in state):
        return {key: to_json(each, f"{where}.{key}") for key, each in state.items()}
    if isinstance(state, list):
        return [to_json(each, f"{where}[{i}]") for i, each in enumerate(state)]
    if isinstance(state, bytes):
        to_json(state.decode(errors="replace"), where)
        return {"#bytes": base64.b64encode(state).decode()}
    if isinstance(state, torch.Tensor) and not state.is_complex():
        kind = str(state.dtype).removeprefix("torch.")
        return {"#tensor": [kind, list(state.shape), state.flatten().tolist()]}
    odd = " with keys that are no text or begin with #" * isinstance(state, dict)
    raise ConfigError(f"{where} is a {type(state).__name__}{odd}: checkpoints keep JSON, bytes and tensors")


def from_json(kept: Any) -> Any:
    """Returns what `to_json` was given. Raises errors of many kinds where it was not."""
    if isinstance(kept, list):
        return [from_json(each) for each in kept]
    if not isinstance(kept, dict):
        return kept
    match kept:
        case {"#bytes": text}:
            return base64.b64decode(text)
        case {"#tensor": [kind, shape, values]}:
            return torch.tensor(values, dtype=getattr(torch, kind)).reshape(shape)
    return {key: from_json(each) for key, each in kept.items()}
