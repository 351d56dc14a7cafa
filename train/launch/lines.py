"""Passes on what ranks print, in whole lines: they write at the same time, in pieces, and pieces would mix.

    lines = Lines()
    with lines.of(rank) as (out, err):      # files for one process; None: the launcher's own
        start it
    lines.begin()                           # all are started: a thread passes on what they write
    lines.end()                             # they have ended: and what is left

Lines that a rank writes at once, such as a traceback, stay together. A terminal is rank 0's own, for its live line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
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


@dataclasses.dataclass(slots=True)
class _Pipe:
    """A pipe from a rank to `target`, one of the launcher's own files.

    kept: what was read, first and last at these times
    """

    target: int
    kept: bytearray = dataclasses.field(default_factory=bytearray)
    first: float = 0.0
    last: float = 0.0


class Lines:
    def __init__(self) -> None:
        self._pipes: dict[int, _Pipe] = {}
        self._ready = selectors.DefaultSelector()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

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
        self._pipes[read] = _Pipe(target)
        self._ready.register(read, selectors.EVENT_READ)
        return write

    def begin(self) -> None:
        """Begins to read, after the last process: a process is better not forked beside threads."""
        self._thread = threading.Thread(target=self._run, name="lines of ranks", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Passes on what is left, of processes that have ended; others, that these have started, lose their reader."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for number in list(self._pipes):
            self._close(number)

    def _run(self) -> None:
        over = False
        while self._pipes and not over:
            ending = self._over.is_set()
            ready = [key.fd for key, _ in self._ready.select(0 if ending else QUIET)]
            over = ending and not ready
            for number in ready:
                self._read(number)
            for number, pipe in list(self._pipes.items()):
                now = time.monotonic()
                if over:
                    self._pass_all(number)
                elif now - pipe.last > QUIET or now - pipe.first > LATE:
                    self._pass_on(number, 1 + max(pipe.kept.rfind(b"\n"), pipe.kept.rfind(b"\r")))

    def _read(self, number: int) -> None:
        pipe, read = self._pipes[number], os.read(number, AT_ONCE)
        pipe.last = time.monotonic()
        if not pipe.kept:
            pipe.first = pipe.last
        pipe.kept += read
        if not read:
            self._pass_all(number)
            self._close(number)
        elif len(pipe.kept) > LONGEST:
            self._pass_on(number, len(pipe.kept))

    def _pass_all(self, number: int) -> None:
        """The end: of a line that has none, too."""
        kept = self._pipes[number].kept
        if kept and kept[-1:] not in b"\r\n":
            kept += b"\n"
        self._pass_on(number, len(kept))

    def _pass_on(self, number: int, end: int) -> None:
        pipe = self._pipes[number]
        said, pipe.kept, pipe.first = bytes(pipe.kept[:end]), pipe.kept[end:], pipe.last
        try:
            while said:
                said = said[os.write(pipe.target, said) :]
        except OSError:  # who reads it has gone, which the rank is to find out
            self._close(number)

    def _close(self, number: int) -> None:
        if self._pipes.pop(number, None) is not None:
            self._ready.unregister(number)
            os.close(number)
