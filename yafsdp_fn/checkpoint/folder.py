"""Checkpoints as folders, complete or absent.

    checkpoints/
      step-00000200/      manifest.json    what it holds, and the size of every file
                          .metadata, __0_0.distcp, __1_0.distcp, ...    torch.distributed.checkpoint's
      step-00000400/
      latest              the name of the newest complete one

A checkpoint is written under a name that ends in `.partial` and renamed when every file has reached the disk; `latest`
changes last. A run killed at any moment leaves `latest` at a complete checkpoint. All ranks must see one file system.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, or of another state; the message says which, and what to do."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def partial(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return directory / f"{folder_name(step)}.partial"


def prepare(directory: Path, step: int) -> None:
    """Makes `directory` and clears what an interrupted save left in it."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("step-*.partial"):
        shutil.rmtree(stale)
    partial(directory, step).mkdir()


def commit(directory: Path, step: int, manifest: dict[str, Any], keep: int | None) -> Path:
    """Completes the partial folder of `step`, moves `latest` to it, and deletes all but the newest `keep`."""
    source, target, marker = partial(directory, step), directory / folder_name(step), directory / f"{LATEST}.partial"
    sizes = {path.name: path.stat().st_size for path in sorted(source.iterdir())}
    write_text(source / MANIFEST, json.dumps({"format": FORMAT, **manifest, "files": sizes}, indent=1))
    sync(source)
    if target.exists():  # the same step again, after a resume from an earlier one
        shutil.rmtree(target)
    source.rename(target)
    sync(directory)
    write_text(marker, target.name)
    marker.replace(directory / LATEST)
    sync(directory)
    for old in complete(directory)[: -keep if keep else 0]:
        if old != target:
            shutil.rmtree(old)
    return target


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory`, oldest step first."""
    found = (path for path in directory.glob("step-*") if path.suffix != ".partial" and path.is_dir())
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest complete checkpoint in `directory`, or None where there is none."""
    root = Path(directory)
    marker = root / LATEST
    if not marker.exists():
        return None
    folder = root / marker.read_text().strip()
    if not folder.is_dir():
        here = ", ".join(path.name for path in complete(root))
        raise CheckpointError(
            f"{marker} names {folder.name}, which is not there; complete checkpoints here: {here or 'none'}. "
            "Give one by its step, or write its name into that file"
        )
    return folder


def find(directory: str | os.PathLike[str], step: int | None) -> Path:
    """The folder of the checkpoint of `step`, or of the newest one."""
    root = Path(directory)
    folder = latest(root) if step is None else root / folder_name(step)
    if folder is None or not folder.is_dir():
        here = ", ".join(path.name for path in complete(root)) or "no checkpoint"
        wanted = "a complete checkpoint" if step is None else folder_name(step)
        raise CheckpointError(f"{root}: expected {wanted}, found {here}")
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint, after a check that every file has the size it was written with."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        sizes, version = manifest["files"], manifest["format"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} is not a complete checkpoint") from None
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is damaged ({what}); use an earlier checkpoint") from None
    if version != FORMAT:
        raise CheckpointError(f"{path}: format {version}, this version of yafsdp_fn reads format {FORMAT}")
    for name, size in sizes.items():
        file = folder / name
        if not file.exists():
            raise CheckpointError(f"{file} is missing; it was written with {size:,} bytes. Use an earlier checkpoint")
        if (found := file.stat().st_size) != size:
            raise CheckpointError(
                f"{file} is truncated or changed: {found:,} bytes, written with {size:,}. Copy it again, or use an "
                "earlier checkpoint"
            )
    return manifest


def write_text(path: Path, text: str) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync(directory: Path) -> None:
    """Waits until the names in `directory` are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
