"""Passes on what ranks print, in whole lines: they write at the same time, in pieces, and pieces would mix.

    lines = Lines()
    with lines.of(rank) as (out, err):      # files for one process; None: the launcher's own
        start it
    lines.begin()                           # all are started: a thread for each file passes on what they write
    lines.end()                             # they have ended: and what is left

Lines that a rank writes at once, such as a traceback, stay together. A terminal is rank 0's own, for its live line.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator

OUT, ERR = 1, 2
QUIET, LATE = 0.03, 0.3
"""Seconds of silence after which what a rank has written is passed on, and after which it is in any case."""
AT_ONCE = 1 << 16
"""Bytes that are read at once."""
LONGEST = 1 << 20
"""Bytes of a line after which it is passed on without its end."""


class Lines:
    def __init__(self) -> None:
        self._pipes: list[tuple[int, int]] = []
        """A pipe's end to read from, and the launcher's own file that it goes to."""
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._one_at_a_time = threading.Lock()

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[tuple[int | None, int | None]]:
        """Standard output and error of a process that is started inside."""
        with contextlib.ExitStack() as stack:
            out = None if rank == 0 and os.isatty(OUT) else self._pipe(OUT, stack)
            if out is not None and os.path.sameopenfile(OUT, ERR):
                yield out, out  # 2>&1: in the order in which it was written
            else:
                yield out, None if rank == 0 and os.isatty(ERR) else self._pipe(ERR, stack)

    def _pipe(self, target: int, stack: contextlib.ExitStack) -> int:
        read, write = os.pipe()
        stack.callback(os.close, write)
        self._pipes.append((read, target))
        return write

    def begin(self) -> None:
        """Begins to read, after the last process: a process is better not forked beside threads."""
        while self._pipes:
            thread = threading.Thread(target=self._run, args=self._pipes.pop(), name="lines of a rank", daemon=True)
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """Passes on what is left, of processes that have ended; others, that these have started, lose their reader."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        while self._pipes:  # of processes that never began
            os.close(self._pipes.pop()[0])

    def _run(self, read: int, target: int) -> None:
        with contextlib.suppress(OSError):  # who reads it has gone, which the rank is to find out
            self._pass_on(read, target)
        os.close(read)

    def _pass_on(self, read: int, target: int) -> None:
        poll, kept, first, ended = select.poll(), b"", 0.0, False
        poll.register(read, select.POLLIN)
        while not ended:
            ending = self._over.is_set()
            ready = poll.poll(1e3 * (0 if ending else QUIET if kept else LATE))
            part = os.read(read, AT_ONCE) if ready else b""
            first = first if kept else time.monotonic()
            kept += part
            ended = not part and (bool(ready) or ending)
            if ended and kept and kept[-1:] not in b"\r\n":
                kept += b"\n"  # the end of a line that has none
            if ended or len(kept) > LONGEST:
                end = len(kept)
            elif not ready or time.monotonic() - first > LATE:
                end = 1 + max(kept.rfind(b"\n"), kept.rfind(b"\r"))
            else:
                continue
            said = kept[:end]
            kept = kept[end:]
            first = time.monotonic()
            with self._one_at_a_time:
                while said:
                    said = said[os.write(target, said) :]
