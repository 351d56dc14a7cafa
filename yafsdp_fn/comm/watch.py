"""Who hangs: a thread that names the collective which does not end, and ends it.

On CUDA nobody waits for a collective on the host: a rank whose peer has died goes on issuing, until it wants a value.
NCCL's own watchdog ends the process after its timeout, and knows neither op nor unit. So this one looks a little
sooner. It says what has not ended, and has the communicators aborted: what waits for them returns, with values that
mean nothing, and whoever asks next (`Communicators.check`) is told.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol

from yafsdp_fn.comm.streams import ADVICE

LOOKS, LONGEST_S = 20, 1.0
"""How often it looks in one timeout; and how long events of ended work are kept, which a step makes hundreds of."""


class Ending(Protocol):
    def query(self) -> bool: ...


class _Pending(NamedTuple):
    end: Ending
    label: tuple[str]
    since: float


class Watch:
    """Of one rank. late: is told, in words, of the first work that lasts longer than `timeout`; then the watch ends"""

    def __init__(self, rank: int, timeout: timedelta, late: Callable[[str], None]) -> None:
        self._rank, self._seconds, self._late = rank, timeout.total_seconds(), late
        self._pending: dict[str, deque[_Pending]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="yafsdp-watch", daemon=True)
        self._thread.start()

    def add(self, stream: str, end: Ending, label: str) -> None:
        """`end` is recorded behind the work called `label`, the last one of its stream so far."""
        self._pending.setdefault(stream, deque()).append(_Pending(end, (label,), time.monotonic()))

    def under_way(self) -> list[tuple[str]]:
        """What each stream does now, as the last look has found it: see `Lookout`."""
        return [first.label for pending in list(self._pending.values()) for first in list(pending)[:1]]

    def close(self) -> None:
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(min(self._seconds / LOOKS, LONGEST_S)):
            for pending in list(self._pending.values()):
                ended = time.monotonic()
                while pending and pending[0].end.query():
                    pending.popleft()
                    if pending:  # it could not begin before
                        pending[0] = pending[0]._replace(since=max(pending[0].since, ended))
                if pending and ended - pending[0].since > self._seconds:
                    what = (
                        f"rank {self._rank}: {pending[0].label[0]} has not ended after {self._seconds:.0f} s. {ADVICE}"
                    )
                    print(what, file=sys.stderr, flush=True)
                    self._late(what)
                    return
