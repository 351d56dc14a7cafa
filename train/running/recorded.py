"""`timeline.json`: when each op of one step ran, on rank 0, with what its visits cost.

    with Recorded(train_step, folder, ...) as step:
        state, metrics = step(state, batch)          # as train_step; now and then recorded

Recording reads two clocks an op. Steps are recorded by fives, and the one of median length is kept: a single step may
be any; they are read when they have ended on a GPU, too. What visits cost is found on fake tensors, before the first
step of a start, which takes its time anyway.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import yafsdp_fn as ya
from train.data.rows import Batch
from yafsdp_fn.disk import replace
from yafsdp_fn.timeline import Recording
from yafsdp_fn.train_step import TrainStep

State = ya.ShardedState
Warn = Callable[[str], None]
TOGETHER = 5
"""Steps recorded one after the other."""


class Recorded:
    """`train_step`, recorded up to each step that `every` divides, from the second step of a start on, and up to the
    last of the run; every=0: never.

    path: of timeline.json, None on all ranks but 0; warn: told why there will be none
    """

    def __init__(self, train_step: TrainStep, path: Path | None, *, every: int, steps: int, warn: Warn) -> None:
        self._step, self._every, self._steps, self._warn = train_step, every, steps, warn
        self._path = path if every else None
        self._trace: ya.schedules.Trace | None = None
        self._written = False  # whether this start has recorded any
        self._taken: list[tuple[int, ya.Program, Recording]] = []

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._write()

    def __call__(self, state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        if self._path is not None and self._trace is None:
            self._measure(state, batch)
        program = self._program(state)
        if program is None:
            done = self._step(state, batch)
            self._write()  # behind a step that was none of them: on a GPU they have ended, or soon will have
            return done
        with ya.record() as recording:
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
        """Of the next step, where that is to be recorded. The first one runs on demand, and has none."""
        step = state.step + 1
        soon = min(-step % self._every, self._steps - step) < TOGETHER if self._every else False
        first = not self._written and len(self._taken) < TOGETHER
        program = self._step.program(state) if self._trace is not None and (soon or first) else None
        return program if isinstance(program, ya.Program) else None

    def _write(self) -> None:
        if not self._taken or self._path is None or self._trace is None:
            return
        timelines = sorted(((recording.timeline(), at) for at, (*_, recording) in enumerate(self._taken)), key=_seconds)
        timeline, at = timelines[len(timelines) // 2]
        step, program, _ = self._taken[at]
        whole = ya.Timeline(self._trace, *timeline[1:])  # the trace of a running step has no costs
        kept = {"step": step, "timeline": json.loads(whole.to_json()), "ops": json.loads(program.to_json())["ops"]}
        self._taken, self._written = [], True
        with contextlib.suppress(OSError):  # the next ones may find room
            replace(self._path, json.dumps(kept).encode())


def _seconds(of: tuple[ya.Timeline, int]) -> float:
    return of[0].seconds
