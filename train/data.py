"""Text as bytes, cut into windows; which windows a step reads is a function of one integer, the position.

    corpus = b"\0".join(files)                                  # never in memory: read window by window
    window(i) = corpus[i * S : i * S + S + 1]                   # tokens = window[:-1], targets = window[1:]
    sequence(p) = window(permutation(seed, p // W)[p % W])      # W windows an epoch, shuffled anew in each
    batch of rank r at position p = sequence(p + r * B), ..., sequence(p + r * B + B - 1)
    the next position = p + R * B

The position counts sequences over all ranks, so a run may resume on another number of ranks: nothing is read twice or
left out within an epoch. Files, not windows, are held out, so that held-out text shares no file with training text.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from train.config import ConfigError, Data
from yafsdp_fn.comm.grid import grid

HASHED = 2**30
"""Bytes of a corpus that its fingerprint reads, about a second: all of most, blocks spread evenly over larger ones."""
BLOCK = 2**16

SEPARATOR = b"\0"
"""Between two files: text has no zero byte, so the model can tell where one ends."""

NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def encode(text: str) -> Tensor:
    """Text to tokens [S], one a UTF-8 byte."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


def decode(tokens: Tensor) -> str:
    """Tokens [S] to text; bytes that are no UTF-8 (a cut character, a young model) become replacement characters."""
    return bytes(tokens.tolist()).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files read as one string of bytes."""

    name: str
    """As errors call it."""
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    seq_len: int

    @property
    def nbytes(self) -> int:
        """Bytes, a separator after each file included."""
        return sum(self.sizes) + len(self.sizes)

    @property
    def windows(self) -> int:
        return max(0, (self.nbytes - 1) // self.seq_len)

    def require(self, sequences: int, why: str) -> Corpus:
        """Raises unless there are `sequences` windows."""
        needed = sequences * self.seq_len + 1
        if self.windows < sequences:
            raise ConfigError(
                f"{self.name}: {self.nbytes:,} bytes in {len(self.files)} files are too few: {why} needs {needed:,}, "
                f"that is {sequences} sequences of {self.seq_len} and one byte more; "
                "add files, or lower --data.seq-len or --data.batch"
            )
        return self

    def fingerprint(self) -> str:
        """Changes with the files' names, order, sizes or content, and with seq_len: a position then means other text.

        Of a corpus larger than `HASHED`, every k-th block of `BLOCK` bytes of each file is read, the first one always:
        what changed between them alone is not noticed.
        """
        names = [(path.name, size) for path, size in zip(self.files, self.sizes, strict=True)]
        digest = hashlib.blake2b(repr((names, self.seq_len)).encode(), digest_size=8)
        stride = BLOCK * -(-self.nbytes // HASHED)
        for path, size in zip(self.files, self.sizes, strict=True):
            try:
                with open(path, "rb") as stream:
                    for start in range(0, size, stride):
                        stream.seek(start)
                        digest.update(stream.read(BLOCK))
            except OSError as error:
                raise ConfigError(f"{self.name}: {path} cannot be read: {error}") from None
        return digest.hexdigest()

    def window(self, index: int) -> Tensor:
        """Tokens [S + 1] of window `index`, uint8. Reads only the files that the window touches."""
        ends = _ends(self.sizes)
        start, missing = index * self.seq_len, self.seq_len + 1
        parts: list[bytes] = []
        file = bisect_right(ends, start)
        at = start - (ends[file - 1] if file else 0)
        while missing:
            path, size = self.files[file], self.sizes[file]
            with open(path, "rb") as stream:
                stream.seek(at)
                part = stream.read(min(missing, size - at))
            if len(part) != min(missing, size - at):
                raise OSError(f"{path} became shorter than the {size:,} bytes it had at the start")
            part += SEPARATOR if len(part) < missing else b""
            parts.append(part)
            missing -= len(part)
            file, at = file + 1, 0
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


@lru_cache(maxsize=8)
def _ends(sizes: tuple[int, ...]) -> list[int]:
    """Where each file ends in the corpus, its separator included."""
    return list(accumulate(size + 1 for size in sizes))


def split(config: Data) -> tuple[Corpus, Corpus]:
    """`(training, held-out)` corpora; the same on every rank that sees the same files."""
    if config.files:
        found = expand(config.files, "data.files")
    else:
        found = standard_library()
    if config.heldout_files:
        heldout = expand(config.heldout_files, "data.heldout_files")
        train = [path for path in found if path not in set(heldout)]
    else:
        root = Path(os.path.commonpath([path.parent for path in found]))
        heldout = [path for path in found if _hash(path.relative_to(root)) < config.heldout_fraction]
        train = [path for path in found if _hash(path.relative_to(root)) >= config.heldout_fraction]
    return _corpus("training text", train, config.seq_len), _corpus("held-out text", heldout, config.seq_len)


def expand(patterns: tuple[str, ...], flag: str) -> list[Path]:
    """The files that paths and globs name, sorted; a pattern that names none is an error."""
    found: set[Path] = set()
    for pattern in patterns:
        try:
            matches = [Path(match).resolve() for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
            files = [match for match in matches if match.is_file()]
        except (OSError, ValueError) as error:  # bytes that no file name has; links that go round
            raise ConfigError(f"{flag}: {pattern!r}: {error}") from None
        if not files:
            raise ConfigError(f"{flag}: {pattern!r} names no file (current folder: {os.getcwd()})")
        found.update(files)
    return sorted(found)


def standard_library() -> list[Path]:
    """The source files of the running Python's standard library: some 11 MB of text that every machine has."""
    found = []
    for folder, folders, files in os.walk(Path(sysconfig.get_path("stdlib")).resolve()):
        folders[:] = [name for name in folders if name not in NOT_SOURCE]  # site-packages may be vast: not entered
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(path for path in found if path.is_file())


def _hash(path: Path) -> float:
    """A number in [0, 1) that depends on the path alone: a new file moves no other across the split."""
    return int.from_bytes(hashlib.blake2b(path.as_posix().encode(), digest_size=8).digest(), "big") / 2**64


def _corpus(name: str, files: list[Path], seq_len: int) -> Corpus:
    sized = [(path, path.stat().st_size) for path in files]
    kept = [(path, size) for path, size in sized if size]
    return Corpus(name, tuple(path for path, _ in kept), tuple(size for _, size in kept), seq_len)


@lru_cache(maxsize=4)
def _permutation(windows: int, seed: int, epoch: int) -> Tensor:
    # hashed: torch's CPU generator drops all but the low 32 bits of a seed
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return torch.randperm(windows, generator=torch.Generator().manual_seed(int.from_bytes(key, "big")))


class Place(NamedTuple):
    """Where this process stands."""

    rank: int
    ranks: int
    device: torch.device

    @staticmethod
    def of(mesh: DeviceMesh) -> Place:
        cuda = mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
        return Place(grid(mesh).world_rank, mesh.size(), device)


Batch = dict[str, Tensor]
"""`tokens` and `targets`, [B, S] int64; targets are the tokens that follow."""


def batch_at(corpus: Corpus, position: int, size: int, place: Place, *, seed: int) -> Batch:
    """This rank's part, B = `size` sequences, of the batch at `position`."""
    first = position + place.rank * size
    rows = []
    for epoch, index in (divmod(p, corpus.windows) for p in range(first, first + size)):
        rows.append(corpus.window(int(_permutation(corpus.windows, seed, epoch)[index])))
    window = torch.stack(rows).to(place.device).long()
    return {"tokens": window[:, :-1].contiguous(), "targets": window[:, 1:].contiguous()}


class Reader:
    """The batches from a position on; a thread reads one while the one before it is computed."""

    def __init__(self, corpus: Corpus, position: int, size: int, place: Place, *, seed: int) -> None:
        self.position = position
        """Sequences handed out so far, over all ranks and epochs: what a checkpoint keeps."""
        self._rows = place.ranks * size
        self._read: Callable[[int], Batch] = lambda position: batch_at(corpus, position, size, place, seed=seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._ahead = self._thread.submit(self._read, position)

    def next(self) -> Batch:
        batch = self._ahead.result()
        self.position += self._rows
        self._ahead = self._thread.submit(self._read, self.position)
        return batch

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
