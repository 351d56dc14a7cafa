"""Ordered streams: submitted work runs in order, after the events it waits for, and completes an event.

    event = HostEvent()
    stream.submit(work, waits, event, label)      # returns at once
    event.wait()                                  # the compute stream waits; on the CPU, this thread

On the CPU a stream is one thread with a queue. On CUDA it is a CUDA stream (cuda_streams.py).
"""

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

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


class Stream(Protocol):
    doing: tuple[str] | None

    def submit(self, work: Work, waits: Sequence[Event], event: Any, label: str) -> None: ...

    def mark_used(self, memory: Tensor) -> None:
        """Keeps `memory` from being reused before the work submitted so far is done, whoever frees it."""

    def drain(self) -> None:
        """Blocks the host until the stream is idle. Errors stay in their events."""

    def abandon(self) -> None:
        """Stops everyone from waiting for its work, the end of the process included."""

    def close(self) -> None:
        """Ends the stream, when the work submitted so far is done or abandoned."""


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

    doing: the label of the work running now, in a tuple made for it; None while it waits for other streams
    """

    doing: tuple[str] | None = None
    _closed = _abandoned = False

    def __init__(self, name: str, rank: int) -> None:
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

    def submit(self, work: Work, waits: Sequence[Event], event: HostEvent, label: str) -> None:
        if self._closed:  # nobody would ever do it
            raise CommunicationError(f"rank {self._rank}: {label}: its mesh is gone; keep the mesh, or a state on it")
        self._queue.put((work, waits, event, label))

    def mark_used(self, memory: Tensor) -> None:
        """Nothing to do: work holds what it uses until it is done."""

    def drain(self) -> None:
        idle = threading.Event()
        self._queue.put((idle.set, (), HostEvent(), "drain"))
        while not idle.wait(1.0):
            if not self._thread.is_alive():
                return

    def abandon(self) -> None:
        self._abandoned = True

    def close(self) -> None:
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
        torch.set_num_threads(1)
        broken: str | None = None
        while (job := self._queue.get()) is not None:
            work, waits, event, label = job
            try:
                if broken is None or label == "drain":
                    for wait in waits:
                        wait.wait()
                    self.doing = (label,)
                    with torch.inference_mode():  # it may write to tensors that were made under it, and to all others
                        work()
                else:
                    event.error = failure(self._rank, f"{label}: not run, since {broken}")
            except BaseException as error:
                broken = f"{label} failed ({type(error).__name__}: {error})"
                event.error = failure(self._rank, broken)
                event.error.__cause__ = error
            self.doing = None
            event.complete()
            del job, work, waits, event
