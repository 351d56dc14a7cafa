"""`SHA256SUMS`: the digest of every file of a checkpoint, the last file written, so that damage is found on load.

It is the format of the command line tool: `sha256sum --check SHA256SUMS` in a checkpoint's folder says the same.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from yafsdp_fn import disk
from yafsdp_fn.checkpoint.agree import AllRanks
from yafsdp_fn.checkpoint.folder import CheckpointError

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\\0]+)")


class Damaged(CheckpointError):
    """A checkpoint is not what was written: a file of it is missing, too many, cut short or changed."""


def write(folder: Path, ranks: AllRanks) -> None:
    """Reads back what all ranks have written into `folder`, each rank a part of the files, and writes their digests."""

    def summed() -> dict[str, str]:
        return {file.name: _digest(file) for file in _share(folder.iterdir(), ranks)}

    found = ranks.each(summed, f"reading back {folder.name}")
    lines = sorted(f"{digest}  {name}\n" for part in found for name, digest in part.items())
    ranks.first(lambda: disk.write(folder / SUMS, "".join(lines).encode()), f"writing {SUMS}")


def verify(folder: Path, ranks: AllRanks) -> None:
    """Raises Damaged on every rank unless `folder` holds exactly what was written; each rank reads a part of it."""
    expected = ranks.first(lambda: _expected(folder), f"checking {folder.name}")

    def compare() -> None:
        for file in _share(map(folder.joinpath, expected), ranks):
            if file.is_symlink() or not file.is_file():
                raise Damaged(f"{file} is missing. Copy it again, or use an earlier checkpoint")
            if _digest(file) != expected[file.name]:
                raise Damaged(
                    f"{file} ({file.stat().st_size:,} bytes) is not what was written: it was cut short or changed. "
                    "Copy it again, or use an earlier checkpoint"
                )

    ranks.each(compare, f"checking {folder.name}")


def _expected(folder: Path) -> dict[str, str]:
    file = folder / SUMS
    try:
        *lines, end = file.read_bytes().decode("utf-8").split("\n")
    except FileNotFoundError:
        raise Damaged(f"{file} is missing: {folder} is not a complete checkpoint. Use an earlier one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{file} cannot be read ({error}); use an earlier checkpoint") from None
    found = [_LINE.fullmatch(line) for line in lines]
    digests = {match[2]: match[1] for match in found if match is not None}
    if len(digests) != len(lines) or not digests or end:
        raise Damaged(f"{file} is damaged: expected lines of a digest and a name. Use an earlier checkpoint")
    if extra := {path.name for path in folder.iterdir()} - digests.keys() - {SUMS}:
        raise Damaged(f"{folder} holds {min(extra)}, which was not written with it; remove it")
    return digests


def _share(files: Iterable[Path], ranks: AllRanks) -> list[Path]:
    return sorted(files)[ranks.rank :: ranks.count]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
