"""Documents as tokens, made once and kept on the disk: later starts, other ranks and other runs find them there.

    CACHE/KEY/   tokens       all documents, one after the other, an end token behind each
                 ends         where each document ends in it, its end token included, int64
                 facts.json   {"digest": of both, "notes": ...}

KEY is of the documents' content and of the tokenizer, so that a folder never changes. One process makes it, others that
want it wait: the kernel's lock ends with the process that holds it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from train.config import ConfigError
from train.data.documents import Documents
from train.data.tokenizer import Tokenizer, Tokens

Notes = Counter[str]

AT_ONCE = 512
"""Documents that go through the tokenizer together."""


@dataclasses.dataclass(frozen=True)
class Store:
    tokens: Tokens
    """[N], of all documents; on the disk, read where it is looked at."""
    ends: Tokens
    """[documents], int64"""
    digest: str
    """Of tokens and ends."""
    notes: Notes
    """What was counted when they were made."""

    def describe(self) -> str:
        return f"{len(self.tokens) / 1e6:.2f}M tokens in {len(self.ends):,} documents"


def tokenised(documents: Documents, tokenizer: Tokenizer, cache: Path) -> Store:
    """The tokens of `documents`, each with the end token behind it."""

    def arrays(notes: Notes) -> Iterator[Tokens]:
        return (tokens for _, tokens in encoded(documents.texts(), tokenizer))

    return kept(documents.label, (documents.key(), tokenizer.fingerprint()), arrays, _dtype(tokenizer), cache)


def kept(
    label: str, key: tuple[str, ...], arrays: Callable[[Notes], Iterator[Tokens]], dtype: Any, cache: Path
) -> Store:
    """What `arrays(notes)` gives, one after the other, from `cache` or made now. Raises ConfigError where the disk does
    not take them.

    label: what they are of, for errors; key: changes with all that they depend on
    notes: what is counted on the way, kept, too
    """
    name = hashlib.blake2b(repr((*key, np.dtype(dtype).str)).encode(errors="surrogatepass"), digest_size=12).hexdigest()
    folder = cache / name
    try:
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with open(folder.with_suffix(".lock"), "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not folder.exists():
                    _make(arrays, dtype, folder)
        tokens, ends = _read(folder / "tokens", dtype), _read(folder / "ends", np.int64)
        facts = json.loads((folder / "facts.json").read_text())
        return Store(tokens, ends, facts["digest"], Counter(facts["notes"]))
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{label}: its tokens cannot be kept in {folder}: {error}; make room, or delete that folder"
        ) from error


def _read(path: Path, dtype: Any) -> Tokens:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def encoded(texts: Iterator[Any], tokenizer: Tokenizer) -> Iterator[tuple[Any, Tokens]]:
    """`(item, its tokens with the end token)`; items are texts, or pairs that begin with one."""
    while some := list(islice(texts, AT_ONCE)):
        found = tokenizer.encode([item if isinstance(item, str) else item[0] for item in some])
        yield from zip(some, (np.append(tokens, _dtype(tokenizer)(tokenizer.end)) for tokens in found), strict=True)


def _dtype(tokenizer: Tokenizer) -> Any:
    return np.uint8 if tokenizer.vocab <= 2**8 else np.uint16 if tokenizer.vocab <= 2**16 else np.int32


def _make(arrays: Callable[[Notes], Iterator[Tokens]], dtype: Any, folder: Path) -> None:
    partial = folder.with_suffix(f".{os.getpid()}.partial")  # two machines may share the disk, without its locks
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    digest, ends, end, notes = hashlib.blake2b(digest_size=8), [], 0, Notes()
    try:
        with open(partial / "tokens", "wb") as stream:
            for tokens in arrays(notes):
                content = tokens.astype(dtype).tobytes()
                digest.update(content)
                stream.write(content)
                end += len(tokens)
                ends.append(end)
        where = np.asarray(ends, np.int64).tobytes()
        digest.update(where)
        (partial / "ends").write_bytes(where)
        (partial / "facts.json").write_text(json.dumps({"digest": digest.hexdigest(), "notes": notes}))
        for path in partial.iterdir():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
        if not folder.exists():
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
