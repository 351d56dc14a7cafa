"""Text as bytes, cut into windows: the rows of files that are never in memory, nor anywhere else a second time.

corpus = b"\0".join(files)                                  # read window by window
window(i) = corpus[i * S : i * S + S + 1]                   # tokens = window[:-1], targets = window[1:]
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from train.config import ConfigError
from train.data import files
from train.data.rows import Indexed, Row

SEPARATOR = b"\0"
"""Between two files: text has no zero byte, so the model can tell where one ends."""


@dataclasses.dataclass(frozen=True)
class Corpus(Indexed):
    """Files read as one string of bytes. Make it by `of`."""

    name: str
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    seq_len: int

    @staticmethod
    def of(name: str, paths: Sequence[Path], seq_len: int) -> Corpus:
        """Without the files that are empty."""
        sized = [(path, path.stat().st_size) for path in paths]
        kept = [(path, size) for path, size in sized if size]
        return Corpus(name, tuple(path for path, _ in kept), tuple(size for _, size in kept), seq_len)

    @property
    def nbytes(self) -> int:
        """Bytes, a separator after each file included."""
        return sum(self.sizes) + len(self.sizes)

    @property
    def count(self) -> int:
        return max(0, (self.nbytes - 1) // self.seq_len)

    def describe(self) -> str:
        return f"{self.nbytes / 1e6:.2f} MB in {len(self.files)} files"

    def require(self, rows: int, why: str) -> None:
        needed = rows * self.seq_len + 1
        if self.count < rows:
            raise ConfigError(
                f"{self.name}: {self.nbytes:,} bytes in {len(self.files)} files are too few: {why} needs {needed:,}, "
                f"that is {rows} sequences of {self.seq_len} and one byte more; "
                "add files, or lower --data.seq-len or --data.batch"
            )

    def fingerprint(self) -> str:
        return files.fingerprint(self.name, self.files, self.seq_len)

    def row(self, index: int) -> Row:
        window = self.window(index)
        return {"tokens": window[:-1], "targets": window[1:]}

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
