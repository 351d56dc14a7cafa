"""Turns a step's metrics, tensors on the device, into numbers, one step late.

    state, metrics = train_step(state, batch)     # CUDA: queued, not run
    meter.push(step, metrics)                     # reads the metrics of the step before, which has ended or soon will

Reading a tensor of the device waits for all that is queued, the step just issued included. So metrics are copied to
pinned memory behind their step, and one step later the host waits for that copy alone. A CPU's step has ended when it
returns, and is read at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from models.parts.config import Shape
from train.data.rows import Batch, Place
from train.running.flops import peak, per_token
from train.running.report import Record, memory_bytes
from yafsdp_fn.api.train_step import TrainStep
from yafsdp_fn.timeline import Recording
from yafsdp_fn.util.disk import replace


class Late:
    """Values of the device on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """Waits for what was queued before the copy, and for nothing after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


class Meter:
    """Gives `sink` a `Record` per step."""

    def __init__(
        self,
        sink: Callable[[Record], None],
        *,
        lr: Callable[[int], float],
        tokens: int,
        model: Shape,
        seq_len: int,
        place: Place,
        skipped: int = 0,
    ) -> None:
        self.skipped = skipped
        """Steps so far that were skipped: the optimizer, and so the learning rate, has not counted them."""
        self._sink, self._lr, self._tokens, self._device = sink, lr, tokens, place.device
        most = peak(place.device)
        self._mfu_seconds = None if most is None else per_token(model, seq_len) * tokens / (most * place.devices)
        """Seconds that a step would take at the peak of all devices."""
        self._late: tuple[int, Late] | None = None
        self._since = time.perf_counter()

    def push(self, step: int, metrics: Mapping[str, Tensor]) -> None:
        """Takes the metrics of `step`, counted from 1, and hands on those of the step before (on a CPU, of `step`)."""
        late = step, Late(torch.stack([metrics[key].float() for key in ("loss", "grad_norm", "skipped")]))
        previous, self._late = (late, None) if self._device.type == "cpu" else (self._late, late)
        self._hand_on(previous)

    def flush(self) -> None:
        """Hands on what was taken; the device is idle then."""
        previous = self._late
        self._late = None
        self._hand_on(previous)

    def restart(self) -> None:
        """Begins the time of the next step here, after work that belongs to none."""
        self._since = time.perf_counter()

    def _hand_on(self, late: tuple[int, Late] | None) -> None:
        if late is None:
            return
        step, (loss, grad_norm, skipped) = late[0], late[1].read()
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        lost = bool(skipped) or not math.isfinite(loss)
        self._sink(
            Record(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                lr=self._lr(step - 1 - self.skipped),
                tokens_per_s=round(self._tokens / seconds, 1),
                step_ms=round(seconds * 1e3, 3),
                mem_bytes=memory_bytes(self._device),
                mfu=None if self._mfu_seconds is None else round(self._mfu_seconds / seconds, 4),
                skipped=lost,
            )
        )
        self.skipped += lost


State = ya.ShardedState
Warn = Callable[[str], None]
TOGETHER = 5
"""Steps recorded one after the other."""


class Recorded:
    """`train_step`, recorded up to each step that `every` divides, from the second step of a start on, and up to the
    last of the run; every=0: never.

    path: of timeline.json, None on all ranks but 0; warn: told why there will be none

    Writes `timeline.json`: when each op of one step ran, on rank 0, with what its visits cost. Recording reads two
    clocks an op. Steps are recorded by fives, and the one of median length is kept: a single step may be any; they are
    read when they have ended on a GPU, too. What visits cost is found on fake tensors, before the first step of a
    start, which takes its time anyway.
    """

    def __init__(self, train_step: TrainStep, path: Path | None, *, every: int, steps: int, warn: Warn) -> None:
        self._step, self._every, self._steps, self._warn = train_step, every, steps, warn
        self._path = path if every else None
        self._trace: ya.schedules.Trace | None = None
        self._written = False  # whether this start has recorded any
        self._taken: list[tuple[int, ya.Program, Recording]] = []

    def __call__(self, state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        begins = self._trace is None
        if self._path is not None and begins:
            self._measure(state, batch)
        program = None if begins else self._program(state)
        if program is None:
            done = self._step(state, batch)
            self.write()  # behind a step that was none of them: on a GPU they have ended, or soon will have
            return done
        with ya.timeline.record() as recording:
            state, metrics = self._step(state, batch)
        self._taken = [*self._taken[1 - TOGETHER :], (state.step, program, recording)]
        return state, metrics

    def _measure(self, state: State, batch: Batch) -> None:
        try:
            self._trace = self._step.trace(state, batch)
        except Exception as error:  # of a block that fake tensors cannot go through: the step itself may run
            self._warn(f"{self._path}: no step is recorded, since the loss cannot be traced: {error}")
            self._path = None

    def _program(self, state: State) -> ya.Program | None:
        """The next step's program, where that step is to be recorded. The first one of a start has none yet."""
        step = state.step + 1
        soon = min(-step % self._every, self._steps - step) < TOGETHER
        first = not self._written and len(self._taken) < TOGETHER
        return self._step.program(state) if soon or first else None

    def write(self) -> None:
        """Writes what was recorded and not yet written: for steps that have ended."""
        if not self._taken or self._path is None or self._trace is None:
            return
        timed = [(recording.timeline(), step, program) for step, program, recording in self._taken]
        timed.sort(key=lambda each: each[0].seconds)
        timeline, step, program = timed[len(timed) // 2]
        whole = ya.timeline.Timeline(self._trace, *timeline[1:])  # the trace of a running step has no costs
        (ops,) = json.loads(program.to_json())["stages"]
        kept = {"step": step, "timeline": json.loads(whole.to_json()), "ops": ops}
        self._taken = []
        self._written = True
        with contextlib.suppress(OSError):  # the next ones may find room
            replace(self._path, json.dumps(kept).encode())
