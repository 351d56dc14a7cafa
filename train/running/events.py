"""`events.jsonl`: what happened to a run, a line each: starts, warnings, the machine's figures, ends.

For people and for `python -m train report`; training reads none of it.

A line that cannot be written is lost, and nothing else: a warning has been on standard error before.
"""

from __future__ import annotations

import contextlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Events:
    """The file at `path`; None on all ranks but 0, which write nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, event: str, **more: Any) -> None:
        """more: JSON"""
        if self._path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **more}).encode() + b"\n"
        with contextlib.suppress(OSError):
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
