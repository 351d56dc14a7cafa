"""Checkpoints as folders, complete or absent.

    checkpoints/
      step-00000200/      manifest.json    everything but tensors
                          rank-00000.safetensors, ...    the tensors, in parts
                          SHA256SUMS       of all of these
      step-00000400/
      latest              the name of the newest one

A checkpoint is written under a name that ends in `.partial`, and renamed when every file has reached the disk; `latest`
changes last. An old one of the same step stays, as `.replaced`, until then. So a run killed at any moment keeps its
complete checkpoints. All ranks must see one file system. Other names in the folder are not ours and are left alone.
"""

import hashlib
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.streams import CommunicationError
from yafsdp_fn.util import disk
from yafsdp_fn.util.disk import remove, replace, sync_folder
from yafsdp_fn.util.torch_private import side_store

Directory = str | os.PathLike[str]

LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{8,18})(\.replaced)?")
_PARTIAL = re.compile(r"step-\d{8,18}\.partial")


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, or of another state; the message says which, and what to do."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def partial(directory: Path, step: int) -> Path:
    """Returns the path of the checkpoint of `step` while it is written."""
    return directory / f"{folder_name(step)}.partial"


def prepare(directory: Path, step: int) -> Path:
    """Makes `directory`, clears the rest of interrupted saves, and makes the folder to write to."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = complete(directory)
    for path in directory.iterdir():
        stale = _PARTIAL.fullmatch(path.name) or (path.suffix == ".replaced" and _COMPLETE.fullmatch(path.name))
        if stale and path not in whole.values():
            remove(path)
    partial(directory, step).mkdir()
    return partial(directory, step)


def publish(directory: Path, step: int, keep_last: int | None = None, keep_every: int | None = None) -> Path:
    """Makes the partial folder of `step` complete, points `latest` to it, and deletes those that are not kept."""
    source = partial(directory, step)
    target = directory / folder_name(step)
    replaced = target.with_name(f"{target.name}.replaced")
    sync_folder(source)
    marker = directory / LATEST
    before = _named(marker) if marker.is_file() else None
    if os.path.lexists(target):  # the same step again, after a resume from an earlier one
        remove(replaced)
        target.rename(replaced)
    source.rename(target)
    sync_folder(directory)
    replace(marker, f"{target.name} {_check(target.name)}\n".encode())
    sync_folder(directory)
    with suppress(OSError):
        remove(replaced)
    if keep_last is None:
        return target
    # after a resume from an earlier step those between it and this one are of the abandoned run, and later ones are
    # not this run's to delete
    found = complete(directory)
    earlier = sorted((old for old in found if old < step), reverse=True)
    own = [old for old in earlier if before is None or old <= before]
    for old in set(earlier) - set(own[: keep_last - 1]):
        if not (keep_every and old % keep_every == 0):
            shutil.rmtree(found[old])
    return target


def complete(directory: Path) -> dict[int, Path]:
    """Returns the complete checkpoints in `directory`, by step."""
    out: dict[int, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True) if directory.is_dir() else ():
        match = _COMPLETE.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            out[int(match[1])] = path  # `.replaced` comes first, so that its replacement wins
    return out


def _newest_first(root: Path, found: dict[int, Path]) -> list[Path]:
    """Returns the complete checkpoints: the one that `latest` names, those before it, then those after it.

    After a resume from an earlier step, later ones belong to an abandoned run.
    """
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
    """Returns the step that `latest` names. Written by hand it may be a name alone."""
    name, _, check = marker.read_bytes()[:64].decode(errors="replace").strip().partition(" ")
    match = _COMPLETE.fullmatch(name)
    return int(match[1]) if match and check in ("", _check(name)) else None


def _check(name: str) -> str:
    return f"{zlib.crc32(name.encode()):08x}"  # a flipped bit may turn one step into another


def latest(directory: Directory) -> Path | None:
    """Returns the folder of the newest complete checkpoint in `directory`, or None. `load` looks closer: it reads every
    byte, and skips damaged checkpoints.

    >>> ya.checkpoint.latest(folder) is None
    True
    >>> ya.checkpoint.save(folder, state).name
    'step-00000000'
    >>> ya.checkpoint.latest(folder).name
    'step-00000000'
    """
    root = Path(directory)
    return next(iter(_newest_first(root, complete(root))), None)


def steps(directory: Directory) -> list[int]:
    """Returns the steps of the complete checkpoints in `directory`, in order.

    >>> ya.checkpoint.save(folder, state).name, ya.checkpoint.steps(folder)
    ('step-00000000', [0])
    """
    return sorted(complete(Path(directory)))


def candidates(directory: Directory, step: int | None) -> list[Path]:
    """Returns the folder of the checkpoint of `step`, or all, newest first. Raises CheckpointError if there is none."""
    root = Path(directory)
    found = complete(root)
    if step is None and found:
        return _newest_first(root, found)
    if step in found:
        return [found[step]]
    _must_be_around(root)
    here = ", ".join(path.name for _, path in sorted(found.items())) or "no checkpoint"
    wanted = "a complete checkpoint" if step is None else folder_name(step)
    raise CheckpointError(f"{root}: expected {wanted}, found {here}")


def _must_be_around(directory: Path) -> None:
    """Raises CheckpointError for a checkpoint in place of the folder around it, and for a `~` that nobody expanded."""
    if (directory / SUMS).is_file():
        raise CheckpointError(f"{directory} is a checkpoint itself; name the folder around it, {directory.parent}")
    if directory.parts[:1] == ("~",):
        raise CheckpointError(f"{directory}: ~ would be a folder of that name; os.path.expanduser makes a path of it")


# ---- Runs file operations with the same outcome on every rank: a failure on one raises `CheckpointError` on all,
# naming it.

T = TypeVar("T")
CPU = torch.device("cpu")


class AllRanks:
    """All ranks that share a state, seen from one. group: on the CPU; None for this rank alone

    members: their global ranks; rank: this one's index among them
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.members = (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))
        self.count = len(self.members)
        self.rank = self.members.index(dist.get_rank())

    def first(self, work: Callable[[], T], what: str) -> T:
        """Returns `work()` of the first rank on every rank: one rank looks at the disk, so that all see the same."""
        outcome = [_outcome(work) if self.rank == 0 else None]
        if self.group is not None:
            with _talking(what):
                dist.broadcast_object_list(outcome, src=self.members[0], group=self.group, device=CPU)
        result: T = self._results(outcome, what)[0]
        return result

    def each(self, work: Callable[[], T], what: str) -> list[T]:
        """Returns `work()` of each rank. Every rank completes its work before one of them raises."""
        outcomes: list[Any] = [_outcome(work)] * self.count
        if self.group is not None:
            with _talking(what):
                dist.all_gather_object(outcomes, outcomes[0], group=self.group)
        return self._results(outcomes, what)

    def _results(self, outcomes: list[Any], what: str) -> list[Any]:
        for rank, (_, error) in zip(self.members, outcomes, strict=False):
            if error is not None:
                raise type(error)(f"{what}: rank {rank}: {error}")
        return [result for result, _ in outcomes]


def ranks_of(mesh: DeviceMesh) -> AllRanks:
    """Returns the ranks of a mesh, which talk on the main thread."""
    comms = communicators(mesh)
    return AllRanks(None if comms.alone else comms.control_group.process_group)


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns the result of `work()`, or its error, which becomes a CheckpointError."""
    try:
        return work(), None
    except CheckpointError as error:
        return None, error
    except Exception as error:  # any error: the other ranks wait for the outcome
        return None, CheckpointError(f"{type(error).__name__}: {error}")


@contextmanager
def _talking(what: str) -> Iterator[None]:
    """Turns an error of torch's communication into one that says what was going on."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CommunicationError(
            f"rank {dist.get_rank()}: {what}: another rank stopped meanwhile: {error}. The checkpoints that were "
            "complete before stay as they were"
        ) from error


# ---- `SHA256SUMS`: the digest of every file of a checkpoint, written last, so that damage is found on load.
#
# `sha256sum --check SHA256SUMS` in a checkpoint's folder checks the same.

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\\0]+)")


class Damaged(CheckpointError):
    """A checkpoint differs from what was written: a file is missing, added, cut short or changed."""


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
    """Returns the digests in `SHA256SUMS`, by name. Raises Damaged where they are not those of the files there."""
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


# ---- Locks folders of checkpoints: two saves never write into one at a time, nor states of different ranks in turn.
#
# A save clears what an earlier one left half written, and replaces a checkpoint of the same step: right after a kill,
# but it would ruin what another save is writing, or has written.


@contextmanager
def owned(directory: Path, ranks: AllRanks, what: str) -> Iterator[None]:
    """Makes `directory` and locks it for one save of these ranks. Raises CheckpointError on all of them if another owns
    it."""
    locks: list[int | None] = []

    def take() -> None:
        _must_be_around(directory)
        _claim(directory, ranks)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            locks.append(disk.lock(directory))
        except BlockingIOError:
            raise CheckpointError(
                "another save is writing there; wait for its end, or give each state a folder of its own"
            ) from None

    try:
        ranks.first(take, what)
        yield
    finally:
        for lock in locks:
            if lock is not None:
                disk.unlock(lock)


def _claim(directory: Path, ranks: AllRanks) -> None:
    """Claims the folder for the ranks that save there first. Raises CheckpointError for ranks that have none in common
    with them."""
    if ranks.count == dist.get_world_size():
        return
    store = side_store("yafsdp_fn checkpoints", timedelta(seconds=60))
    mine = " ".join(map(str, ranks.members))
    owner = store.compare_set(str(directory.resolve()), "", mine).decode()
    if not set(owner.split()) & set(mine.split()):
        raise CheckpointError(
            f"a state on rank {owner.replace(' ', ', ')} is saved there, and this one is on rank "
            f"{mine.replace(' ', ', ')}: give each a folder of its own"
        )
