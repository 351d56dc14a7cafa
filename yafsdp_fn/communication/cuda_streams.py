"""CUDA streams and events with the interface of streams.py. The host submits work and never waits for it."""

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.communication.streams import Event, Work, failure

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of the CUDA driver."""


def begin_thread(device: torch.device) -> None:
    """Prepares the calling thread for `device`; the first thing that a thread of ours does.

    A thread's device is GPU 0 until it says otherwise, and whatever it does first would make a context there, one for
    each rank. And CUDA ends any capture of a graph in the process (a user's `torch.cuda.graph`) at the query of an
    event by another thread, unless that thread is in relaxed mode, which torch has no function for.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if (driver := cuda_driver()) is not None:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))


def cuda_driver() -> Any:
    """Returns the library of the CUDA driver, which torch has loaded; None with another, such as AMD's."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class CudaEvent:
    """A CUDA event. Waiting blocks the current stream, never the host."""

    __slots__ = ("_event", "_recorded")
    over = False

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._recorded = False

    def complete(self) -> None:
        self._event.record()
        self._recorded = True

    def query(self) -> bool:
        """Returns whether the work before it is done, without waiting."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if not self._recorded:  # CUDA would not wait at all
            raise RuntimeError("a wait for work that was not issued yet")
        torch.cuda.current_stream().wait_event(self._event)


class CudaStream:
    """A high-priority CUDA stream. Collectives with `async_op=False` run on the current stream (torch >= 2.8).

    watched: a watchdog asks for `doing`; ended work is kept until then, hundreds of events a step
    """

    def __init__(self, device: torch.device, rank: int, *, watched: bool = False) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._rank = rank
        self._watched = watched
        self._pending: deque[tuple[CudaEvent, str]] = deque()
        self._since = 0.0  # when the first of them became the first
        self._broken: str | None = None

    def submit(self, work: Work, waits: Sequence[Event], event: Any, label: str) -> None:
        if self._broken is not None:
            raise failure(self._rank, f"{label}: not run, since {self._broken}")
        with torch.cuda.stream(self._stream), torch.no_grad(), torch.profiler.record_function(f"yafsdp::{label}"):
            for wait in waits:
                wait.wait()
            try:
                work()
            except Exception as error:
                self._broken = f"{label} failed ({type(error).__name__}: {error})"
                raise failure(self._rank, self._broken) from error
            event.complete()
            captured = torch.cuda.is_current_stream_capturing()
        if self._watched and not captured:  # the query of an event of a capture ends the capture
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append((event, label))

    @property
    def doing(self) -> tuple[str, float] | None:
        """The label of the first work that the device has not ended, and since when it is the first."""
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()
            self._since = time.monotonic()
        return (self._pending[0][1], self._since) if self._pending else None

    def mark_used(self, memory: Tensor) -> None:
        if memory.device.type == "cuda":  # a shard of an optimizer's state may be on the host
            memory.record_stream(self._stream)

    def drain(self) -> None:
        self._stream.synchronize()

    def abandon(self) -> None:
        """Nothing to do: its groups are aborted."""

    def close(self) -> None:
        """Nothing to do: torch lends its streams."""

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)


def must_differ(streams: Sequence[Any]) -> None:
    """Raises RuntimeError if two streams are the same CUDA stream: torch hands them out round-robin, from a
    pool of 32."""
    handles = [stream.handle for stream in streams]
    if len(set(handles)) < len(handles):
        raise RuntimeError(
            "two communication streams are one CUDA stream, and would wait for each other: other threads make streams "
            "at the same time; make the mesh and the first state before they start"
        )
