"""Measured timelines: when each op of a step really ran.

    with ya.timeline.record() as recording:
        state, metrics = step(state, batch)      # one or several steps
    timeline = recording.timeline()              # of the last one

Clocks are read where the work is done: on CUDA by events on the op's own stream, on the CPU by the thread that does it.
An op's span begins when its waits are over. Nothing is waited for until a timeline is asked for. In a trace of torch's
profiler that is taken meanwhile, each op is a range called "op NUMBER on STREAM".
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from yafsdp_fn.communication.streams import Event, Work
from yafsdp_fn.program.ops import Op
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime.protocols import OBSERVE
from yafsdp_fn.timeline.spans import MEASURED, Inside, Span
from yafsdp_fn.timeline.timeline import Timeline


@dataclass(slots=True, eq=False)
class OpRun:
    """One op of a step under way. number: its place in the program; it has no times if there was nothing to do.

    mark: reads the clock; inside: name, beginning and end of the collectives of its block
    """

    number: int
    op: Op
    mark: Callable[[], Any]
    stream: str = "compute"
    event: Event | None = None
    waits: Sequence[Event] = ()
    start: Any = None
    stop: Any = None
    inside: list[tuple[str, Any, Any]] = field(default_factory=list)
    profiled: Any = None

    def on(self, stream: str, event: Event | None, waits: Sequence[Event] = ()) -> None:
        """Notes where it runs, what it completes and what it waits for."""
        self.stream = stream
        self.event = event
        self.waits = waits

    def begin(self) -> None:
        self.profiled = torch.profiler.record_function(f"op {self.number} on {self.stream}")
        self.profiled.__enter__()
        self.start = self.mark()

    def end(self) -> None:
        self.stop = self.mark()
        self.profiled.__exit__(None, None, None)

    def collective(self, name: str) -> Callable[[], None]:
        """Begins a collective of the op's block; the result ends it."""
        start = self.mark()
        return lambda: self.inside.append((name, start, self.mark()))

    def timed(self, work: Work) -> Work:
        """Returns `work` between `begin` and `end`."""

        def run() -> None:
            self.begin()
            work()
            self.end()

        return run


class Recorder:
    """Observes one step: its runs, in issue order. Gradients that the step gives carry it, for their update.

    recordings: that it belongs to; cuda: whether streams are CUDA's
    """

    def __init__(self, recordings: "Sequence[Recording]", cuda: bool) -> None:
        self._recordings = recordings
        self._cuda = cuda
        self._numbers = itertools.count()
        self._title = ""
        self._mark: Callable[[], Any] = _cuda_mark if cuda else time.perf_counter
        self._origin: Any = self._mark()
        self._runs: list[OpRun] = []
        self._trace: Trace | None = None

    def issue(self, op: Op, number: int | None = None) -> OpRun:
        """Returns the next op, which has not begun. number: below zero, of a gather of what a slot should have held
        already"""
        self._runs.append(OpRun(next(self._numbers) if number is None else number, op, self._mark))
        return self._runs[-1]

    def finish(self, trace: Trace, rank: str) -> None:
        """The step's session ended well; an update of its gradients may follow."""
        self._trace = trace
        self._title = f"{MEASURED}, {rank}"
        for recording in self._recordings:
            recording.steps.append(self)

    def issue_late(self, op: Op) -> OpRun | None:
        """Issues an update outside of the step's program; None where the recording is over."""
        return self.issue(op) if any(recording.goes_on for recording in self._recordings) else None

    def timeline(self) -> Timeline:
        """Waits for what still runs. The step lasts from its session's beginning to the end of its last op."""
        assert self._trace is not None
        for run in self._runs:
            if run.event is not None:
                run.event.wait()  # the host, on the CPU; on CUDA the current stream
        if self._cuda:
            self._origin.synchronize()  # elapsed_time needs both ends done, and a gather may be done before compute
        runs = [run for run in self._runs if run.stop is not None]
        # on CUDA a gather may begin before the compute stream reaches the step
        early = min([0.0, *(self._seconds(run.start) for run in runs)])

        def at(mark: Any) -> float:
            return self._seconds(mark) - early

        spans = []
        for run, cause in zip(runs, _causes(runs, [at(run.stop) for run in runs], not self._cuda), strict=True):
            inside = tuple(Inside(at(start), at(stop), name) for name, start, stop in run.inside)
            spans.append(Span(run.number, run.op, run.stream, at(run.start), at(run.stop), cause, inside=inside))
        seconds = max((span.end for span in spans), default=0.0)
        return Timeline(self._trace, tuple(spans), seconds, self._title)

    def _seconds(self, mark: Any) -> float:
        if not self._cuda:
            return float(mark - self._origin)
        mark.synchronize()
        return float(self._origin.elapsed_time(mark)) / 1e3


def _causes(runs: Sequence[OpRun], ends: Sequence[float], host_computes: bool) -> list[int | None]:
    """Returns the cause of each run: the number of the last to end of what it waited for and the one before it on its
    stream.

    host_computes: the thread that issues also computes: nothing is issued before the compute ahead of it has ended
    """
    at = {id(run.event): index for index, run in enumerate(runs) if run.event is not None}
    before: dict[str, int] = {}
    causes: list[int | None] = []
    for index, run in enumerate(runs):
        found = [at[id(wait)] for wait in run.waits if id(wait) in at]
        ahead = {run.stream, "compute"} if host_computes else {run.stream}
        found += [before[stream] for stream in ahead.intersection(before)]
        causes.append(runs[max(found, key=lambda i: ends[i])].number if found else None)
        before[run.stream] = index
    return causes


def _cuda_mark() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Recording:
    """The steps that ran on sharded states inside a `record` block. Steps that raised are not among them.

    >>> step = ya.train_step(loss_fn, tx)
    >>> with ya.timeline.record() as recording:
    ...     for _ in range(2):
    ...         state, _ = step(state, batch)
    >>> [timeline.measured for timeline in recording.timelines]
    [True, True]
    """

    def __init__(self) -> None:
        self.steps: list[Recorder] = []
        self.goes_on = True

    def timeline(self) -> Timeline:
        """Returns the timeline of the last step. Raises RuntimeError inside the block, and where no step ran."""
        return self._finished()[-1].timeline()

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The timelines of all steps, in order."""
        return tuple(step.timeline() for step in self._finished())

    def _finished(self) -> list[Recorder]:
        if self.goes_on:
            raise RuntimeError("the recording goes on: ask for timelines after the `with ya.timeline.record()` block")
        if not self.steps:
            raise RuntimeError(
                "nothing was recorded: no step on a sharded state finished inside the `with ya.timeline.record()` "
                "block, in its "
                "thread (a PlainState has no ops; other threads need the block's context, see ya.timeline.record)"
            )
        return self.steps


class Recordings(tuple[Recording, ...]):
    """The recordings under way, the outermost first, which has all that the others have: they make the observer of a
    step."""

    def __call__(self, cuda: bool) -> Recorder:
        return Recorder(self, cuda)


@contextmanager
def record() -> Iterator[Recording]:
    """Records the steps in the block, of `train_step`, `value_and_grad`, `eval_step` and their updates.

    On one rank nothing is gathered: computes are what is left. Visits without grad inside a training step belong to no
    program and are left out.

    Recordings nest: the outer one has the steps of the inner one, too. Steps are recorded of the thread that is in the
    block; a thread that it starts records only what it runs in a copy of the block's context:
    `Thread(target=contextvars.copy_context().run, args=(train,))`.

    >>> step = ya.train_step(loss_fn, tx)
    >>> state, _ = step(state, batch)                          # makes the program, slots and threads
    >>> with ya.timeline.record() as recording:
    ...     state, _ = step(state, batch)
    >>> recording.timeline().on("compute")[0].op
    Forward(visit=0, slots=(2,), keep=True, microbatch=0, carry_slot=None, early=(), takes=(), gives=())
    """
    recording = Recording()
    outer: Any = OBSERVE.get() or ()
    token = OBSERVE.set(Recordings((*outer, recording)))
    try:
        yield recording
    finally:
        OBSERVE.reset(token)
        recording.goes_on = False
