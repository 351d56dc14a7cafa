"""Order: who waits for whom, and the streams that wait.

    waits = board.use(event, stream, reads, writes)      # found from what each op reads and writes: hazards
    stream.submit(work, waits, event, label)             # returns at once; runs in order, then completes the event
    event.wait()                                         # the compute stream waits; on the CPU, this thread

On the CPU a stream is one thread with a queue. On CUDA it is a CUDA stream (cuda_streams.py).
"""

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:  # programs are built and proved where there is no torch; a stream imports it
    from torch import Tensor

# ---- Hazards: who must wait for whom. Nobody ever writes a wait by hand.
#
#     for buffer in reads:   wait for its last writer; become a reader
#     for buffer in writes:  wait for its last writer and for the readers since; become the writer
#
# Every op declares the buffers it reads and writes; one scoreboard runs through the whole life of a state. A wait
# always points to an op issued earlier, and all ranks issue in one order, so nothing that is issued can deadlock.

Key = TypeVar("Key")


class Scoreboard(Generic[Key]):
    """The last uses of each buffer, by keys in issue order: op numbers in a simulation, events in the engine.

    >>> board = ya.schedules.Scoreboard()
    >>> board.use("gather", "gather", reads=[], writes=[("slot", 0)])
    []
    >>> board.use("forward", "compute", reads=[("slot", 0)], writes=[])        # waits for the gather
    ['gather']
    """

    def __init__(self) -> None:
        self._writer: dict[Hashable, tuple[str, Key]] = {}
        self._readers: dict[Hashable, dict[str, Key]] = {}
        self.open: list[Key] = []  # uses that go on: what is used inside of one must not wait for it

    def use(self, key: Key, stream: str, reads: Iterable[Hashable], writes: Iterable[Hashable]) -> list[Key]:
        """Records a use; returns the uses that it must wait for.

        A stream runs in order: its last reader stands for all, and a use waits for nothing on its own stream.
        """
        writer, readers = self._writer, self._readers
        waits: dict[Key, None] = {}
        for buffer in reads:
            last = writer.get(buffer)
            if last is not None and last[0] != stream:
                waits[last[1]] = None
            others = readers.get(buffer)
            if others is None:
                readers[buffer] = {stream: key}
            else:
                others[stream] = key
        for buffer in writes:
            last = writer.get(buffer)
            if last is not None and last[0] != stream:
                waits[last[1]] = None
            if (others := readers.pop(buffer, None)) is not None:
                for at, use in others.items():
                    if at != stream:
                        waits[use] = None
            writer[buffer] = stream, key
        return [use for use in waits if use not in self.open] if self.open else [*waits]

    def clear(self) -> None:
        """Forgets everything; only when all streams are idle."""
        self._writer.clear()
        self._readers.clear()
        self.open.clear()

    # ---- a use on the compute stream, by an event of the engine

    def begin(self, event: Any, reads: Iterable[Hashable], writes: Iterable[Hashable], run: Any = None) -> None:
        """Begins a use: waits for earlier uses on other streams. `end` ends it, after an error too.

        event: what its end completes; None where all runs on one stream, in order; run: observes the op, if anything
            does
        """
        waits: list[Any] = []
        if event is not None:
            waits = self.use(event, "compute", reads, writes)
            self.open.append(event)
        for wait in waits:
            if not wait.over:
                wait.wait()
        if run is not None:
            run.on("compute", event, waits)
            run.begin()

    def end(self, event: Any, run: Any = None) -> None:
        """Ends a use. run: observes the op, and has not failed"""
        try:
            if run is not None:
                run.end()
        finally:
            if event is not None:
                event.complete()
                if event in self.open:  # else a failure has cleared the board
                    self.open.remove(event)


# ---- Streams, and the events that they complete.

Work = Callable[[], None]

ADVICE = "Another rank has probably stopped: look for the first error among the ranks, then restart all"


class CommunicationError(RuntimeError):
    """A collective failed on this rank, usually because another rank stopped. The process group is unusable:
    restart."""


def failure(rank: int, what: str) -> CommunicationError:
    """Returns the error of a stream, for work that failed and for all work after it."""
    return CommunicationError(f"rank {rank}: {what}. {ADVICE}")


class Event(Protocol):
    """The end of a piece of work. `wait` makes the compute stream wait, and raises the work's error."""

    over: bool  # the work has succeeded, and the host knows: nothing to wait for

    def wait(self) -> None: ...
    def complete(self) -> None: ...


class HostEvent:
    """An event of a host thread that carries errors. Most end before anybody waits, so the waiter creates the lock."""

    over = False
    error: BaseException | None = None
    _ended = False
    _pending: "threading.Lock | None" = None

    def complete(self) -> None:
        if not self._ended:
            self._ended, self.over = True, self.error is None  # before looking at the lock: see `wait`
            if self._pending is not None:
                self._pending.release()

    def wait(self) -> None:
        if not self._ended:
            mine = threading.Lock()
            mine.acquire()
            pending: threading.Lock = self.__dict__.setdefault("_pending", mine)  # of several waiters the first one's
            if not self._ended:  # else whoever ended it may not have seen the lock
                with pending:  # one waiter lets the next one in
                    pass
        if self.error is not None:
            raise self.error


class HostStream:
    """One worker thread. After an error all later work on the stream fails too: the order is lost.

    doing: the label of the work running now, or that has failed, and since when; None while it waits for other streams
    """

    doing: tuple[str, float] | None = None
    _closed = _abandoned = False
    _event: HostEvent | None = None  # of the last work that began
    _failed: CommunicationError | None = None  # of all work since another thread has failed it

    def __init__(self, name: str, rank: int) -> None:
        import torch

        self._name = name
        self._rank = rank
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Event], HostEvent, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"yafsdp-{name}", daemon=True)
        threads = torch.get_num_threads()
        started = HostEvent()
        self._thread.start()
        self.submit(lambda: None, (), started, "start")
        started.wait()
        torch.set_num_threads(threads)  # the worker's own setting reaches threads that have not computed yet
        # a daemon thread inside a gloo call aborts the interpreter at exit: join it first
        atexit.register(self._at_exit)

    def submit(self, work: Work, waits: Sequence[Event], event: Any, label: str) -> None:
        """Runs `work` when all `waits` have ended, and completes `event`."""
        if self._closed:  # nobody would ever do it
            raise CommunicationError(f"rank {self._rank}: {label}: its mesh is gone; keep the mesh, or a state on it")
        self._queue.put((work, waits, event, label))
        if self._failed is not None:  # looked at behind it, since another thread empties the queue
            self._end(event)

    def mark_used(self, memory: "Tensor") -> None:
        """Keeps `memory` from being reused before the work submitted so far is done, whoever frees it: work holds what
        it uses."""

    def drain(self) -> None:
        """Blocks the host until the stream is idle. Errors stay in their events."""
        idle = threading.Event()
        self._queue.put((idle.set, (), HostEvent(), "drain"))
        while not idle.wait(1.0):
            if self._abandoned or not self._thread.is_alive():
                return

    def abandon(self) -> None:
        """Stops everyone from waiting for its work, the end of the process included."""
        self._abandoned = True

    def fail(self, what: str) -> None:
        """Raises CommunicationError in whoever waits for its work, of now and later. Called in another thread, while
        its own is in a call that nothing can end."""
        self.abandon()
        self._failed = failure(self._rank, what)
        self._end(self._event)
        with suppress(queue.Empty):
            while (job := self._queue.get_nowait()) is not None:
                self._end(job[2])

    def _end(self, event: HostEvent | None) -> None:
        if event is not None and not event.over:
            event.error = self._failed
            event.complete()

    def close(self) -> None:
        """Ends the stream, when the work submitted so far is done or abandoned."""
        if not self._abandoned:  # else left to the end of the process
            atexit.unregister(self._at_exit)
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:  # the collector may run here, and find its owner dead
            self._thread.join(0.0 if self._abandoned else None)

    def _at_exit(self) -> None:
        self.close()
        if self._abandoned:
            self._thread.join(1.0)
            if self._thread.is_alive():  # inside gloo, whose call nothing can end
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)

    def _run(self) -> None:
        import torch

        torch.set_num_threads(1)
        broken: str | None = None
        while (job := self._queue.get()) is not None:
            work, waits, event, label = job
            self._event = event
            try:
                if broken is None or label == "drain":
                    for wait in waits:
                        wait.wait()
                    failed = self.doing
                    self.doing = label, time.monotonic()
                    with torch.inference_mode():  # it may write to tensors that were made under it, and to all others
                        work()
                    self.doing = failed
                else:
                    event.error = failure(self._rank, f"{label}: not run, since {broken}")
            except BaseException as error:
                broken = f"{label} failed ({type(error).__name__}: {error})"
                event.error = failure(self._rank, broken)
                event.error.__cause__ = error
            event.complete()
            del job, work, waits, event
