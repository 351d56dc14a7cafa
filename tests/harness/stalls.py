"""Ranks that do not come, until another one has shown where all are.

self.mesh = watchful(breakable())                 # on which tables are shown after PATIENCE
with printed(fifo if rank != 2 else None) as said:    # ends the pause of rank 2 when it has shown the table
    step(now, batch)                                # that rank pauses in it: open(fifo).close()
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from yafsdp_fn.communication.communicators import communicators

PATIENCE = 3.0
"""Seconds that a rank waits before it shows where others are. It may come to its wait so much later than the others,
less a second, for all to be shown as waiting."""

SILENCE = 1.5
"""Seconds without a beat after which a rank counts as silent, on a busy machine too."""


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for an event, longer than any machine takes for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.01)


def watchful(mesh: Any) -> Any:
    """The mesh, of a process that serves such tests alone."""
    lookout: Any = communicators(mesh).watchdog
    lookout._patience = PATIENCE
    lookout._silence = SILENCE
    return mesh


def until_told(mesh: Any, place: str) -> None:
    """Returns when the watchdog of this rank has told the others that it is at this place."""
    beat: Any = communicators(mesh).watchdog
    # to wait for a missing key keeps the watchdog from writing it
    until(lambda: beat._store.check([beat._key]) and place in beat._store.get(beat._key).decode())


class Printed(io.StringIO):
    """What a rank prints. pause: a pipe that is opened for writing when it has shown a table, and so ends a pause"""

    def __init__(self, pause: Path | None) -> None:
        super().__init__()
        self._pause = pause

    def flush(self) -> None:
        if self._pause is not None and "Where ranks are" in self.getvalue():
            os.close(os.open(self._pause, os.O_WRONLY))
            self._pause = None


@contextmanager
def printed(pause: Path | None = None) -> Iterator[Printed]:
    """What is printed in this block."""
    sys.stderr, before = Printed(pause), sys.stderr
    try:
        yield sys.stderr
    finally:
        sys.stderr = before
