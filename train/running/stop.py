"""Ctrl-C: the first one asks for a checkpoint and an end at a step boundary, the second one aborts.

    with Stopper() as stop:
        for ...:
            step(...)
            if stop.agreed():        # the same answer on every rank: any rank's signal stops all, at the same step
                save(); break

A terminal's Ctrl-C and a launcher that forwards it can both reach a rank, some milliseconds apart: signals within
`DEBOUNCE` seconds of the first are the same one.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from train.running.together import talking

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEBOUNCE = 1.0


class Stopper:
    """Counts signals while it is entered, and tells all ranks. Enter it on the main thread, after the mesh is made."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: Any = None
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopper:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is None:
            self._arrive()  # or the process group would be taken down under it

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first > DEBOUNCE:
            raise KeyboardInterrupt(f"second {signal.Signals(number).name}: aborted without a checkpoint")

    @property
    def requested(self) -> bool:
        """Whether this rank was signalled."""
        return self._first is not None

    def agreed(self) -> bool:
        """Whether some rank had been signalled by the previous call. Called by all ranks once a step.

        The tiny reduction runs beside the next step, on the CPU, so that no rank waits for another here; the price is
        that a signal takes effect one step later.
        """
        if self._ranks == 1:
            return self.requested
        self._arrive()
        stop, self._flag = bool(self._flag.item()), torch.tensor(int(self.requested), dtype=torch.int32)
        with talking("beginning the all-reduce of the stop flag"):
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return stop

    def _arrive(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with talking("all-reduce of the stop flag between two steps"):
                work.wait()
