"""When each op of a step began and ended, on which stream, and what it had waited for: the data."""

from typing import NamedTuple

from yafsdp_fn.schedules.ops import STREAMS, Op
from yafsdp_fn.schedules.text import describe
from yafsdp_fn.schedules.trace import Trace


class Span(NamedTuple):
    """One op of the step, in seconds since the step began.

    number: place of the op in issue order; stream: one of `schedules.ops.STREAMS`; cause: number of the span whose end
    let this one begin, the last of those it had to wait for (the one before it on its stream among them); None where it
    began with the step, or nobody knows
    """

    number: int
    op: Op
    stream: str
    start: float
    end: float
    cause: int | None = None

    @property
    def microbatch(self) -> int | None:
        """Of a compute or a message between stages, else None."""
        return getattr(self.op, "microbatch", None)

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Idle(NamedTuple):
    """A gap on a stream. cause: number of the span whose end ended it; None at the end of the step."""

    stream: str
    start: float
    end: float
    cause: int | None


class Spans(NamedTuple):
    """One step.

    spans: in issue order; seconds: of the whole step; title: what made it, for people; overhead: the part of `seconds`,
    at its end, that a prediction adds and no op explains
    """

    trace: Trace
    spans: tuple[Span, ...]
    seconds: float
    title: str
    overhead: float = 0.0

    def describe(self, span: Span) -> str:
        """The op of `span` in words."""
        return describe(span.op, self.trace)

    @property
    def streams(self) -> tuple[str, ...]:
        """Those in use, in the order in which they are drawn."""
        used = {span.stream for span in self.spans}
        return tuple(name for name in STREAMS if name in used)

    def on(self, stream: str) -> tuple[Span, ...]:
        """The spans of one stream, in order."""
        return tuple(span for span in self.spans if span.stream == stream)

    def busy(self, *streams: str) -> float:
        """Seconds in which at least one of `streams` runs something."""
        total = end = 0.0
        for span in sorted((s for s in self.spans if s.stream in streams), key=lambda s: s.start):
            total += max(0.0, span.end - max(span.start, end))
            end = max(end, span.end)
        return total

    @property
    def compute_s(self) -> float:
        """Seconds in which the compute stream runs something, contention included."""
        return self.busy("compute")

    @property
    def comm_s(self) -> float:
        """Seconds in which some other stream runs something: communication, or a copy to the host or from it."""
        return self.busy(*(name for name in self.streams if name != "compute"))

    def idle(self, stream: str = "compute") -> tuple[Idle, ...]:
        """Gaps of `stream`, with what ended each."""
        gaps, now = [], 0.0
        for span in self.on(stream):
            if span.start > now:
                gaps.append(Idle(stream, now, span.start, span.cause))
            now = max(now, span.end)
        if self.seconds > now:
            gaps.append(Idle(stream, now, self.seconds, None))
        return tuple(gaps)

    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that made the step as long as it was: each began when the one before it ended."""
        at = {span.number: span for span in self.spans}
        path = [max(self.spans, key=lambda span: span.end)] if self.spans else []
        while path and path[-1].cause is not None:
            path.append(at[path[-1].cause])
        return tuple(reversed(path))
