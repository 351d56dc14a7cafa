"""Local files: which ones patterns name, which are held out, and what tells their content apart."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from train.config import ConfigError, Sources

HASHED = 2**30
"""Bytes of all files that a fingerprint reads, about a second: all of most, blocks spread evenly over larger ones."""
BLOCK = 2**16

NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def split(config: Sources) -> tuple[list[Path], list[Path]]:
    """`(training, held-out)` text files; the same on every rank that sees the same files."""
    found = expand(config.files, "data.files") if config.files else standard_library()
    if config.heldout_files:
        heldout = expand(config.heldout_files, "data.heldout_files")
        return [path for path in found if path not in set(heldout)], heldout
    return halves(found, config.heldout_fraction)


def halves(found: Sequence[Path], fraction: float) -> tuple[list[Path], list[Path]]:
    """`(the rest, a fraction of the files)`, by the hash of their relative paths: a new file moves no other across."""
    root = Path(os.path.commonpath([path.parent for path in found]))
    out = {path for path in found if part(path.relative_to(root).as_posix()) < fraction}
    return [path for path in found if path not in out], [path for path in found if path in out]


def expand(patterns: Sequence[str], flag: str) -> list[Path]:
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


def part(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fingerprint(name: str, files: Sequence[Path], *more: object) -> str:
    """Changes with the files' names, order, sizes or content, and with `more`.

    Of files larger than `HASHED` together, every k-th block of `BLOCK` bytes of each is read, the first one always:
    what changed between them alone is not noticed.

    name: as errors call the files
    """
    try:
        sizes = [path.stat().st_size for path in files]
        names = [(path.name, size) for path, size in zip(files, sizes, strict=True)]
        digest = hashlib.blake2b(repr((names, *more)).encode(), digest_size=8)
        stride = BLOCK * max(1, -(-sum(sizes) // HASHED))
        for path, size in zip(files, sizes, strict=True):
            with open(path, "rb") as stream:
                for start in range(0, size, stride):
                    stream.seek(start)
                    digest.update(stream.read(BLOCK))
    except OSError as error:
        raise ConfigError(f"{name}: {error.filename} cannot be read: {error}") from None
    return digest.hexdigest()
