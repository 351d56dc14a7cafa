"""The files of a run's folder, beside its checkpoints. A disk that is full or gone stops none of them.

Lines     metrics.jsonl: whole lines, each step once, whatever the disk does
Events    events.jsonl: starts, warnings, the machine's figures, ends, a line each
Board     tensorboard/: the numbers of metrics.jsonl once more
held      lock: the folder belongs to one process at a time, rank 0 of the run

What a run writes stays in its folder: no link in it is followed, whoever has put it there. Files that are written at
once are written aside and renamed, which takes the place of a link (`yafsdp_fn.util.disk`). Those that are appended to,
the lock, and folders are looked at here, before a run begins.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from train.config import ConfigError
from yafsdp_fn.util.disk import replace

Record = dict[str, Any]
"""JSON, with an integer `step`."""


def truncate(path: Path, step: int) -> None:
    """Drops the lines after `step`, so that a resumed run reads like an unbroken one. The new file replaces the old one
    when it is whole: a full disk or a kill leaves the old one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            if json.loads(line)["step"] > step:
                continue
        except (ValueError, KeyError, TypeError):  # the line that a killed run was writing
            continue
        kept.append(line + b"\n")
    replace(path, b"".join(kept))


class Lines:
    """The file at `path`, whose lines after `first` are dropped.

    warn: called with a sentence when the file cannot be written, and when it can be again; training goes on

    write(record)      goes to the file; what cannot be written waits in memory, and goes with a later line
    rewind(step)       drops what is about later steps, before the next line
    """

    def __init__(self, path: Path, first: int, warn: Callable[[str], None]) -> None:
        self._path, self._first, self._warn = path, first, warn
        self._handle: int | None = None
        self._waiting: list[tuple[int, bytes]] = []
        self._failing = False
        self._try()

    def write(self, record: Record) -> None:
        self._waiting.append((record["step"], json.dumps(record).encode() + b"\n"))
        self._try()

    def rewind(self, step: int) -> None:
        self._waiting = [(at, line) for at, line in self._waiting if at <= step]
        self._first = step
        self._let_go()
        self._try()

    def close(self) -> None:
        self._try()
        if self._waiting:
            self._warn(f"{self._path}: its last {len(self._waiting)} lines could not be written and are lost")
        self._let_go()

    def _try(self) -> None:
        try:
            self._flush()
        except OSError as error:
            if not self._failing:
                self._warn(f"{self._path}: {error}; lines wait in memory until it can be written, and training goes on")
            self._failing = True
            return
        if self._failing:
            self._warn(f"{self._path}: written again, nothing is missing")
        self._failing = False

    def _flush(self) -> None:
        if self._handle is not None and os.fstat(self._handle).st_nlink == 0:  # else lines would go to a deleted file
            self._warn(f"{self._path} was deleted: what it held is lost; it begins anew")
            self._let_go()
        if self._handle is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            truncate(self._path, self._first)
            self._handle = append_to(self._path)
        size = os.fstat(self._handle).st_size
        left = b"".join(line for _, line in self._waiting)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            os.ftruncate(self._handle, size)  # no half lines
            raise
        self._waiting.clear()

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None


class Events:
    """The file at `path`; None on all ranks but 0, which write nothing.

    For people and for `python -m train report`; training reads none of it. A line that cannot be written is lost, and
    nothing else: a warning has been on standard error before.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, event: str, **more: Any) -> None:
        """Adds an event with its time. more: JSON"""
        if self._path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **more}).encode() + b"\n"
        with contextlib.suppress(OSError):
            handle = append_to(self._path)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)


class Board:
    """Events in `folder`; those after step `first` are taken back. warn: called once, with why it gave up"""

    def __init__(self, folder: Path, first: int, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._writer: SummaryWriter | None = None
        self._hook = threading.excepthook
        threading.excepthook = self._in_thread  # tensorboard writes in a thread, whose failure would be a traceback
        self.rewind(first)

    def add(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            try:
                self._writer.add_scalar(name, value, step)
            except OSError as error:
                self._give_up(error)

    def rewind(self, step: int) -> None:
        self._close()
        try:
            self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self._close()
        threading.excepthook = self._hook

    def _close(self) -> None:
        writer = self._writer
        self._writer = None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: BaseException | None) -> None:
        self._writer = None
        self._warn(f"{self._folder}: {error}; no more TensorBoard events of this start, metrics.jsonl has the numbers")

    def _in_thread(self, failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.exc_value, OSError):  # else the next `add` meets it
            self._hook(failure)


FILES = ("lock", "config.json", "metrics.jsonl", "events.jsonl", "timeline.json")
FOLDERS = ("checkpoints", "tensorboard", "tokenizer")


def refuse_links(folder: Path) -> None:
    """Raises ConfigError where something else lies in the place of a file or a folder that a run writes."""
    for names, is_one, kind in ((FILES, stat.S_ISREG, "a file"), (FOLDERS, stat.S_ISDIR, "a folder")):
        for name in names:
            path = folder / name
            if os.path.lexists(path) and not is_one(path.lstat().st_mode):
                what = "a link" if path.is_symlink() else "something else"
                raise ConfigError(
                    f"{path} is {what}, expected {kind}: what a run writes stays in its folder. Remove it, or put what "
                    "it stands for in its place; --runs names another disk"
                )


def append_to(path: Path) -> int:
    """A handle that appends to a file, which is made where there is none. Raises OSError for a link, and for a pipe."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


PATIENCE = 2.0
"""Seconds that a run waits for another one's folder: a process that was killed holds its files until it has ended."""


@contextlib.contextmanager
def held(folder: Path, run_id: str = "") -> Iterator[dict[str, Any]]:
    """Holds `folder`, which exists; gives what the holder before wrote: `pid`, `host`, `run_id`, or nothing.

    Raises ConfigError where another process holds it, OSError where `folder` cannot be written.

    The lock is the kernel's (flock): it ends with the process, however that ends, so no stale one is ever left. The
    file `lock` says who holds it, or held it last.
    """
    path = folder / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        until = time.monotonic() + PATIENCE
        while not (taken := _take(handle, path)) and time.monotonic() < until:
            time.sleep(PATIENCE / 40)
        earlier = _holder(handle)
        if not taken:
            raise ConfigError(
                f"{folder} is in use by process {earlier.get('pid', 'unknown')} on {earlier.get('host', 'unknown')}, a "
                "run that is still going on: end that first, or give this run another --name"
            )
        with contextlib.suppress(OSError):  # on a full disk: the lock holds, its text is for people
            os.ftruncate(handle, 0)
            me = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id}
            os.pwrite(handle, json.dumps(me).encode(), 0)
        yield earlier
    finally:
        os.close(handle)


def _take(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        warnings.warn(f"{path}: this file system has no locks ({error}): see that no other run uses it", stacklevel=4)
    return True


def _holder(handle: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
