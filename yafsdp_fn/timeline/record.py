"""Measured timelines: when each op of a step really ran.

    with ya.record() as recording:
        state, metrics = step(state, batch)      # one or several steps
    timeline = recording.timeline()              # of the last one

Clocks are read where the work is done: on CUDA by events on the op's own stream, on the CPU by the thread that does it.
An op's span begins when its waits are over. Nothing is waited for until a timeline is asked for. In a trace of torch's
profiler that is taken meanwhile, each op is a range called "op NUMBER on STREAM".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from yafsdp_fn.schedules.ops import Op, with_computes
from yafsdp_fn.schedules.trace import Trace
from yafsdp_fn.timeline.timeline import Span, Timeline

if TYPE_CHECKING:
    from yafsdp_fn.comm.streams import Event, Work


class Run:
    """One op of a step under way. number: its place in the program; it has no times if there was nothing to do."""

    __slots__ = ("_mark", "_range", "event", "number", "op", "start", "stop", "stream", "waits")

    def __init__(self, number: int, op: Op, mark: Callable[[], Any]) -> None:
        self.number, self.op, self._mark = number, op, mark
        self.stream: str | None = None
        self.event: Event | None = None
        self.waits: Sequence[Event] = ()
        self.start: Any = None
        self.stop: Any = None
        self._range: Any = None

    def begin(self) -> None:
        self._range = torch.profiler.record_function(f"op {self.number} on {self.stream or 'compute'}")
        self._range.__enter__()
        self.start = self._mark()

    def end(self) -> None:
        self.stop = self._mark()
        if self._range is not None:
            self._range.__exit__(None, None, None)

    def on(self, stream: str, event: Event | None, waits: Sequence[Event] = ()) -> None:
        """Where it runs, what it completes and what it waits for."""
        self.stream, self.event, self.waits = stream, event, waits

    def timed(self, work: Work) -> Work:
        """`work` between `begin` and `end`."""

        def run() -> None:
            self.begin()
            work()
            self.end()

        return run


class Recorder:
    """One step: its runs, in issue order.

    key: of the stores that the step's update may be on; cuda: whether streams are CUDA's
    number: of the next op; below zero are gathers of what the program's slots should have held when it began
    """

    def __init__(self, key: Hashable, cuda: bool) -> None:
        self.key, self.number = key, 0
        self._title, self._cuda = "", cuda
        self._mark: Callable[[], Any] = _cuda_mark if cuda else time.perf_counter
        self._origin: Any = self._mark()
        self._runs: list[Run] = []
        self._trace: Trace | None = None

    def issue(self, op: Op) -> Run:
        """The next op, which has not begun yet."""
        run = Run(self.number, op, self._mark)
        self._runs.append(run)
        self.number += 1
        return run

    def finish(self, trace: Trace, title: str) -> None:
        """The step's session is over; updates outside of its program may follow."""
        self._trace, self._title = trace, title

    @property
    def trains(self) -> bool:
        return self._trace is not None and self._trace.trains

    def timeline(self) -> Timeline:
        """Waits for what still runs. The step lasts from its session's beginning to the end of its last op."""
        assert self._trace is not None
        for run in self._runs:
            if run.event is not None:
                run.event.wait()  # the host, on the CPU; on CUDA the current stream
        if self._cuda:
            self._origin.synchronize()  # elapsed_time needs both ends done, and a gather may be done before compute
        runs = [run for run in self._runs if run.stop is not None]
        starts = [self._seconds(run.start) for run in runs]
        ends = [self._seconds(run.stop) for run in runs]
        early = min([0.0, *starts])  # on CUDA a gather may begin before the compute stream reaches the step
        causes = _causes(runs, ends, host_computes=not self._cuda)
        computes = [compute for _, compute in with_computes((run.op for run in runs), self._trace)]
        spans = tuple(
            Span(
                run.number,
                run.op,
                run.stream or "compute",
                start - early,
                end - early,
                compute and compute.microbatch,
                cause,
            )
            for run, start, end, compute, cause in zip(runs, starts, ends, computes, causes, strict=True)
        )
        return Timeline(self._trace, spans, max(ends, default=0.0) - early, self._title)

    def _seconds(self, mark: Any) -> float:
        if not self._cuda:
            return float(mark - self._origin)
        mark.synchronize()
        return float(self._origin.elapsed_time(mark)) / 1e3


def _causes(runs: Sequence[Run], ends: Sequence[float], host_computes: bool) -> list[int | None]:
    """Of each run the number of the last to end of what it waited for and the one before it on its stream.

    host_computes: the thread that issues also computes: nothing is issued before the compute ahead of it has ended
    """
    at = {id(run.event): index for index, run in enumerate(runs) if run.event is not None}
    before: dict[str | None, int] = {}
    causes: list[int | None] = []
    for index, run in enumerate(runs):
        found = [at[id(wait)] for wait in run.waits if id(wait) in at]
        found += [before[stream] for stream in {run.stream, "compute" if host_computes else run.stream} & set(before)]
        last = max(found, key=lambda i: ends[i], default=None)
        causes.append(None if last is None else runs[last].number)
        before[run.stream] = index
    return causes


def _cuda_mark() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Recording:
    """The steps that ran on sharded states inside a `record` block. Steps that raised are not among them."""

    def __init__(self) -> None:
        self.steps: list[Recorder] = []
        self.goes_on = True

    def timeline(self) -> Timeline:
        """Of the last step. Raises RuntimeError inside the block, and where no step ran."""
        return self._finished()[-1].timeline()

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Of every step, in order."""
        return tuple(step.timeline() for step in self._finished())

    def _finished(self) -> list[Recorder]:
        if self.goes_on:
            raise RuntimeError("the recording goes on: ask for timelines after the `with ya.record()` block")
        if not self.steps:
            raise RuntimeError(
                "nothing was recorded: no step on a sharded state finished inside the `with ya.record()` block, in its "
                "thread (a PlainState has no ops; other threads need the block's context, see ya.record)"
            )
        return self.steps


# Those under way, the outermost first, which has all that the others have. Read in the thread that calls steps alone:
# backwards may run in another, and get the recorder by hand.
_recordings: ContextVar[tuple[Recording, ...]] = ContextVar("recordings", default=())


@contextmanager
def record() -> Iterator[Recording]:
    """Records the steps in the block, of `train_step`, `value_and_grad`, `eval_step` and their updates.

    A step function's first step runs on demand and is recorded so: its ops are numbered as they are issued, and are not
    those of the program that runs from the second step on. On one rank nothing is gathered: computes are what is left.
    Visits without grad inside a training step belong to no program and are left out.

    Recordings nest: the outer one has the steps of the inner one, too. Steps are recorded of the thread that is in the
    block; a thread that it starts records only what it runs in a copy of the block's context:
    `Thread(target=contextvars.copy_context().run, args=(train,))`.
    """
    recording = Recording()
    token = _recordings.set((*_recordings.get(), recording))
    try:
        yield recording
    finally:
        _recordings.reset(token)
        recording.goes_on = False


def new_recorder(key: Hashable, cuda: bool) -> Recorder | None:
    """For a step that begins; None where nobody records."""
    return Recorder(key, cuda) if _recordings.get() else None


def keep(recorder: Recorder, trace: Trace, title: str) -> None:
    """The step's session ended well."""
    recorder.finish(trace, title)
    for recording in _recordings.get():
        recording.steps.append(recorder)


def after_step(key: Hashable, op: Op) -> Run | None:
    """`op` follows, outside of its program, the last training step on a store with that key; None if none is kept."""
    steps = [step for recording in _recordings.get()[:1] for step in recording.steps]
    return next((step.issue(op) for step in reversed(steps) if step.trains and step.key == key), None)
