"""Checkpoints as folders, complete or absent.

    checkpoints/
      step-00000200/      manifest.json    what it holds
                          .metadata, __0_0.distcp, __1_0.distcp, ...    torch.distributed.checkpoint's
                          SHA256SUMS       of all of these
      step-00000400/
      latest              the name of the newest one

A checkpoint is written under a name that ends in `.partial` and renamed when every file has reached the disk; `latest`
changes last. One of the same step stays, as `.replaced`, until then. So a run killed at any moment leaves the complete
ones that it had. All ranks must see one file system. Other names in the folder are not ours and are left alone.
"""

import os
import re
import shutil
import warnings
import zlib
from pathlib import Path

from yafsdp_fn.disk import replace, sync_folder

LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{8,18})(\.replaced)?")
_PARTIAL = re.compile(r"step-\d{8,18}\.partial")


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, or of another state; the message says which, and what to do."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def partial(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return directory / f"{folder_name(step)}.partial"


def prepare(directory: Path, step: int) -> Path:
    """Makes `directory`, clears what an interrupted save left in it, and makes the folder to write to."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = complete(directory)
    for path in directory.iterdir():
        stale = _PARTIAL.fullmatch(path.name) or (path.suffix == ".replaced" and _COMPLETE.fullmatch(path.name))
        if stale and path not in whole.values():
            shutil.rmtree(path)
    partial(directory, step).mkdir()
    return partial(directory, step)


def publish(directory: Path, step: int, keep_last: int | None = None, keep_every: int | None = None) -> Path:
    """Makes the partial folder of `step` a complete one, moves `latest` to it, and deletes those that are not kept."""
    source, target = partial(directory, step), directory / folder_name(step)
    replaced = target.with_name(f"{target.name}.replaced")
    sync_folder(source)
    if target.exists():  # the same step again, after a resume from an earlier one
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    source.rename(target)
    sync_folder(directory)
    replace(directory / LATEST, f"{target.name} {_check(target.name)}\n".encode())
    sync_folder(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    found = complete(directory)
    for old in sorted(found)[: -keep_last if keep_last else 0]:
        if old != step and not (keep_every and old % keep_every == 0):
            shutil.rmtree(found[old])
    return target


def complete(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in `directory`, by step."""
    out: dict[int, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True) if directory.is_dir() else ():
        match = _COMPLETE.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            out[int(match[1])] = path  # what was replaced comes first, so that its replacement wins
    return out


def newest_first(directory: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints, that which `latest` names first, then those before it, then those after it.

    After a resume from an earlier step, later ones are of a run that was given up.
    """
    root = Path(directory)
    return _newest_first(root, complete(root))


def _newest_first(root: Path, found: dict[int, Path]) -> list[Path]:
    order = sorted(found, reverse=True)
    marker = root / LATEST
    if marker.is_file():
        named = _named(marker)
        if named in found:
            order.sort(key=lambda step: step > named)
        elif order:
            what = "is damaged" if named is None else f"names step {named}, which is not there"
            warnings.warn(f"{marker} {what}; the newest is {found[order[0]].name}", stacklevel=2)
    return [found[step] for step in order]


def _named(marker: Path) -> int | None:
    """The step that `latest` names. Written by hand it may be a name alone."""
    name, _, check = marker.read_bytes()[:64].decode(errors="replace").strip().partition(" ")
    match = _COMPLETE.fullmatch(name)
    return int(match[1]) if match and check in ("", _check(name)) else None


def _check(name: str) -> str:
    return f"{zlib.crc32(name.encode()):08x}"  # a flipped bit may make one step of another


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest complete checkpoint in `directory`, or None where there is none. `load` looks closer: it
    reads every byte, and skips what is damaged."""
    return next(iter(newest_first(directory)), None)


def candidates(directory: str | os.PathLike[str], step: int | None) -> list[Path]:
    """The folder of the checkpoint of `step`, or all, newest first. Raises where there is none."""
    root = Path(directory)
    found = complete(root)
    if step is None and found:
        return _newest_first(root, found)
    if step in found:
        return [found[step]]
    here = ", ".join(path.name for _, path in sorted(found.items())) or "no checkpoint"
    wanted = "a complete checkpoint" if step is None else folder_name(step)
    raise CheckpointError(f"{root}: expected {wanted}, found {here}")
