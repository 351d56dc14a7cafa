"""Documents as tokens, made once and kept on the disk: later starts, other ranks and other runs find them there.

    CACHE/KEY/   tokens       all documents, one after the other, an end token behind each
                 ends         where each document ends in it, its end token included, int64
                 facts.json   {"digest": of both, "notes": ...}

KEY is of the documents' content and of the tokenizer, so that a folder never changes. It is written aside and renamed.
One process makes it; others that want it, the ranks of a machine and other runs, wait (`_make_in_turn`).

`Packed` cuts a store into rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch

from train.command_line import say_apart
from train.config import ConfigError
from train.data.documents import BLOCK, Documents
from train.data.rows import Indexed, Row, digest_of
from train.data.tokenizer import Tokenizer, Tokens
from yafsdp_fn.util.words import counted

Notes = Counter[str]

DAMAGED, UNKNOWN, EMPTY = "damaged", "unknown", "empty"
SAID = {
    DAMAGED: "of them with U+FFFD, which bytes become that are no UTF-8",  # here, or where the text was made
    UNKNOWN: "tokens that stand for what the tokenizer does not know",
    EMPTY: "without text left out",
}
"""Words of notes, behind their number."""


def told(notes: Notes, words: Mapping[str, str]) -> str:
    """Writes the counts that are not zero, each before its words."""
    return "".join(f", {notes[name]:,} {said}" for name, said in words.items() if notes[name])


AT_ONCE = 512
"""Documents that go through the tokenizer together."""


def amount(tokens: int) -> str:
    """Says how much text it is: by the token, or from 100,000 on in millions."""
    return f"{tokens / 1e6:,.2f}M tokens" if tokens >= 100_000 else counted(tokens, "token")


@dataclasses.dataclass(frozen=True)
class Store:
    tokens: Tokens
    """[N], of all documents; on the disk, read where it is looked at."""
    ends: Tokens
    """[documents], int64"""
    digest: str
    """Digest of tokens and ends."""
    notes: Notes
    """Counts taken when they were made."""

    def document(self, index: int) -> Tokens:
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]]

    def describe(self) -> str:
        return f"{amount(len(self.tokens))} in {counted(len(self.ends), 'document')}{told(self.notes, SAID)}"

    def halves(self, count: int) -> tuple[Store, Store]:
        """The first `count` documents, and the others."""
        at = int(self.ends[count - 1]) if count else 0
        first = Store(self.tokens[:at], self.ends[:count], digest_of(self.digest, 0, count), self.notes)
        return first, Store(self.tokens[at:], self.ends[count:] - at, digest_of(self.digest, count), self.notes)


def tokenised(documents: Documents, tokenizer: Tokenizer, cache: Path) -> Store:
    """The tokens of `documents`, each with the end token behind it."""

    def arrays(notes: Notes) -> Iterator[Tokens]:
        for text, tokens in encoded(documents.texts(), tokenizer):
            if text:
                notes[DAMAGED] += "\ufffd" in text
                notes[UNKNOWN] += int((tokens[:-1] == tokenizer.unknown).sum())
                yield tokens
            else:
                notes[EMPTY] += 1

    return kept(documents.label, (documents.key(), tokenizer.fingerprint()), arrays, _dtype(tokenizer), cache)


def kept(
    label: str, key: tuple[str, ...], arrays: Callable[[Notes], Iterator[Tokens]], dtype: Any, cache: Path
) -> Store:
    """Stores what `arrays(notes)` gives, one after the other: from `cache` or made now. Raises ConfigError where the
    disk does not take them, and where another process that makes them fails or is silent.

    label: what they are of, for errors; key: changes with all that they depend on
    notes: what is counted on the way, kept, too
    """
    name = hashlib.blake2b(repr((*key, np.dtype(dtype).str)).encode(), digest_size=12).hexdigest()
    folder = cache / name
    with _explained(label, folder):
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            _make_in_turn(arrays, dtype, folder, label)
        tokens = read(folder / "tokens", dtype)
        ends = read(folder / "ends", np.int64)
        facts = json.loads((folder / "facts.json").read_text())
        return Store(tokens, ends, facts["digest"], Counter(facts["notes"]))


@contextlib.contextmanager
def _explained(label: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{label}: its tokens cannot be kept in {folder}: {error}; make room, or delete that folder"
        ) from error


def read(path: Path, dtype: Any) -> Tokens:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def encoded(texts: Iterator[Any], tokenizer: Tokenizer) -> Iterator[tuple[Any, Tokens]]:
    """`(item, its tokens with the end token)`; items are texts, or pairs that begin with one."""
    while some := list(islice(texts, AT_ONCE)):
        found = tokenizer.encode([item if isinstance(item, str) else item[0] for item in some])
        yield from zip(some, (np.append(tokens, _dtype(tokenizer)(tokenizer.end)) for tokens in found), strict=True)


def _dtype(tokenizer: Tokenizer) -> Any:
    return np.uint8 if tokenizer.vocab <= 2**8 else np.uint16 if tokenizer.vocab <= 2**16 else np.int32


POLL = 0.2
"""Seconds between looks at a lock that another process holds."""
BEAT = 1.0
"""Seconds between signs of life of the process that makes a store."""
SILENT = 60.0
"""Seconds without one after which those who wait give up: that process is frozen, or the disk is."""
SPEAKS = 10.0
"""Seconds between lines that say how far it is."""


class Progress:
    documents = 0
    tokens = 0


def _make_in_turn(arrays: Callable[[Notes], Iterator[Tokens]], dtype: Any, folder: Path, label: str) -> None:
    """Makes `folder`, or waits until another process has made it.

    FOLDER.lock is held by the one that makes it. The lock is the kernel's (flock) and ends with its process: a file
    that a killed one left holds nobody up, and the next one begins anew. While it is held, its time changes each
    `BEAT`. An error that ends the work is written into it, and those who waited raise it, in place of doing all of it
    again.
    """
    lock_path = folder.with_suffix(".lock")
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with open(descriptor, "r+", encoding="utf-8", errors="surrogateescape") as lock:
        waited = _wait_for(lock, label)
        if folder.exists():
            return
        if waited and (error := lock.read().partition("\n")[2]):
            raise ConfigError(error)
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {platform.node()}\n")
        lock.flush()
        progress = Progress()
        try:
            with _beating(lock, label, progress), _explained(label, folder):
                _make(arrays, dtype, folder, progress)
        except ConfigError as error:
            with contextlib.suppress(OSError):  # the disk may be full: then each finds that out by itself
                lock.write(str(error))
                lock.flush()
            raise


def _wait_for(lock: TextIO, label: str) -> bool:
    """Takes the lock. Tells whether another process had it first."""
    waited, silent, seen = False, 0.0, 0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            beat = os.fstat(lock.fileno()).st_mtime_ns
            # counted in looks, not by the clock, which goes on while a machine and all on it are suspended
            waited = True
            silent = silent + POLL if beat == seen else 0.0
            seen = beat
            if silent > SILENT:
                raise ConfigError(
                    f"{label}: {lock.read().partition(chr(10))[0] or lock.name}, which makes its tokens, has given no "
                    f"sign of life for {SILENT:g} s: end it, and start again"
                ) from None
            time.sleep(POLL)
        else:
            return waited


@contextlib.contextmanager
def _beating(lock: TextIO, label: str, progress: Progress) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        said = time.monotonic()
        while not ended.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(lock.fileno())
            if time.monotonic() - said > SPEAKS:
                said = time.monotonic()
                documents = counted(progress.documents, "document")
                say_apart(f"making tokens of {label}: {documents}, {amount(progress.tokens)} so far")

    thread = threading.Thread(target=beat, name="tokens", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _make(arrays: Callable[[Notes], Iterator[Tokens]], dtype: Any, folder: Path, progress: Progress) -> None:
    """Writes `folder`, holding no more than a document at a time."""
    host = re.sub(r"\W", "-", platform.node())  # two machines may share the disk, without its locks
    for left in folder.parent.glob(
        f"{folder.name}.{host}.*.partial"
    ):  # of a process that was killed, else it had the lock
        shutil.rmtree(left, ignore_errors=True)
    partial = folder.with_suffix(f".{host}.{os.getpid()}.partial")
    partial.mkdir()
    digest = hashlib.blake2b(digest_size=8)
    notes = Notes()
    try:
        with open(partial / "tokens", "wb") as stream, open(partial / "ends", "wb") as ends:
            for tokens in arrays(notes):
                content = tokens.astype(dtype).tobytes()
                digest.update(content)
                stream.write(content)
                progress.tokens += len(tokens)
                progress.documents += 1
                ends.write(struct.pack("=q", progress.tokens))
        with open(partial / "ends", "rb") as ends:
            while block := ends.read(BLOCK):
                digest.update(block)
        (partial / "facts.json").write_text(json.dumps({"digest": digest.hexdigest(), "notes": notes}))
        for path in partial.iterdir():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
        if not folder.exists():
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


Packing = Literal["stream", "documents"]


@dataclasses.dataclass(frozen=True)
class Packed(Indexed):
    """The rows of a store.

    E ends a document:

        documents   a b c E | d e E | f g h E                       S = 4
        stream      tokens a b c E, targets b c E d;   d e E f, e E f g;   ...         cut anywhere, E is read, too
        documents   tokens a b c d, targets b c E e, documents 0 0 0 1;   e f g h, E g h E, 0 1 1 1

    Packed as documents, attention and positions begin anew with each, no target belongs to another document, and E is a
    target alone, never read: no place is lost. A document that goes beyond a row goes on in the next, as one that
    begins there. Both leave out what is less than a row at the end of an epoch.
    """

    name: str
    store: Store
    seq_len: int
    packing: Packing
    known_as: str = ""
    """The fingerprint, where runs of before know these rows by another one."""

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
        return self.known_as or digest_of(self.store.digest, self.seq_len, self.packing)

    def row(self, index: int) -> Row:
        start = index * self.seq_len
        end = (index + 1) * self.seq_len
        if self.packing == "stream":
            return stream_row(self.store.tokens[start : end + 1])
        first, last = np.searchsorted(self._inputs, (start, end - 1), side="right")
        # of each document before a place one token, its E, is in the store but not read
        tokens = self.store.tokens[start + first : end + last + 1]
        ends = self.store.ends[first:last] - (start + first)
        return packed_row(tokens, ends)


def stream_row(tokens: Tokens) -> Row:
    """The row of a window of a stream. tokens: [S + 1]"""
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
