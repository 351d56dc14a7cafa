"""`metrics.jsonl`: whole lines, each step once, whatever the disk does.

write(record)      goes to the file; what cannot be written waits in memory, and goes with a later line
rewind(step)       drops what is about later steps, before the next line
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from yafsdp_fn.disk import replace

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
            self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        size, left = os.fstat(self._handle).st_size, b"".join(line for _, line in self._waiting)
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
