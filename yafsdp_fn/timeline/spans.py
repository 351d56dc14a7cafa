"""Spans: when each op of a step began and ended, on which stream, and what slots held meanwhile."""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from operator import attrgetter
from typing import Annotated, NamedTuple, Self

from yafsdp_fn.program.ops import OPS, STREAMS, Backward, ComputeOp, Op, Reduce, filled, name_of
from yafsdp_fn.program.program import stage_trace_of_ops
from yafsdp_fn.program.text import describe
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.util.schema import Limits

Seconds = Annotated[float, Limits(0, 1e300)]
"""A time of a timeline in JSON."""
MEASURED = "measured"
"""The word that titles of recorded steps begin with."""


class Inside(NamedTuple):
    """A collective over axes inside blocks, or some that follow each other: in the compute, whose stream it blocks.

    name: of one, as recorded; "" of what is predicted
    """

    start: Seconds
    end: Seconds
    name: str = ""


class Span(NamedTuple):
    """One op of the step, in seconds since the step began.

    number: place of the op in issue order, stage by stage; stream: one of `schedules.ops.STREAMS`
    cause: number of the span whose end let this one begin, the last of those it had to wait for (the one before it on
        its stream among them); None where it began with the step, or nobody knows
    stage: of those that the timeline shows
    inside: collectives in the block of a compute

    >>> span = ya.planner.simulate(program, "a100-80g").spans[0]
    >>> span.number, span.stream, span.op, span.seconds > 0
    (0, 'gather', Gather(units=(0,), slots=(2,), source='shard'), True)
    """

    number: int
    op: Op
    stream: str
    start: float
    end: float
    cause: int | None = None
    stage: int = 0
    inside: tuple[Inside, ...] = ()

    @property
    def microbatch(self) -> int | None:
        """The microbatch of a compute or a message between stages, else None."""
        return getattr(self.op, "microbatch", None)

    @property
    def seconds(self) -> float:
        return self.end - self.start


def kind(span: Span) -> str:
    """Names what the op of `span` does: a communication's own name, `compute` of all that is computed."""
    computes = span.op.stream == "compute" and isinstance(span.op, OPS)  # a peer's copy does not
    return "compute" if computes else name_of(span.op)


class Idle(NamedTuple):
    """A gap on a stream.

    cause: number of the span whose end ended it; None at the end of the step
    why: the kind of the op of another stream that ended it. `host`: the step's Python between two ops that nothing else
        kept apart; `end`: after the stream's last op; `overhead`: time that a prediction adds at the end.
        Of a stage of a pipeline also `fill`: before its first microbatch has come; `drain`: after its last compute

    >>> idle = ya.planner.simulate(program, "a100-80g").idle("compute")[0]
    >>> idle.why, idle.start                                   # the first compute waits for its weights
    ('gather', 0.0)
    """

    stream: str
    start: float
    end: float
    cause: int | None
    why: str

    @property
    def waited(self) -> bool:
        """True if an op of another stream ended it."""
        return self.why not in ("host", "end", "overhead", "drain")


class StageTraffic(NamedTuple):
    """The messages of a rank of stage `source` to its like on stage `target` in a step. link: "node" or "network" """

    source: int
    target: int
    link: str
    messages: int
    nbytes: int


class _Fields(NamedTuple):
    trace: Trace
    spans: tuple[Span, ...]
    seconds: float
    title: str
    overhead: float = 0.0
    crossings: tuple[StageTraffic, ...] = ()


class Spans(_Fields):
    """One step, of all stages or of one.

    spans: in issue order, stage by stage; seconds: of the whole step; title: what made it, for people; overhead: the
    part of `seconds`, at its end, that a prediction adds and no op explains; crossings: between stages, as predicted
    """

    @property
    def stage_count(self) -> int:
        """The number of stages: one in plain training, and in a timeline of one stage's part."""
        return 1 if self.trace.stage is not None else self.trace.cut.stages

    @cached_property
    def by_stage(self) -> tuple[Self, ...]:
        """A timeline of each stage, as long as the step; this one where there is one stage."""
        return (self,) if self.stage_count == 1 else tuple(map(self._of_stage, range(self.stage_count)))

    def _of_stage(self, stage: int) -> Self:
        own = [span for span in self.spans if span.stage == stage]
        at: dict[int | None, int] = {span.number: number for number, span in enumerate(own)}
        spans = [span._replace(number=at[span.number], cause=at.get(span.cause), stage=0) for span in own]
        trace = stage_trace_of_ops(self.trace, stage, [span.op for span in own])
        return type(self)(trace, tuple(spans), self.seconds, f"stage {stage}", self.overhead)

    @cached_property
    def by_number(self) -> dict[int | None, Span]:
        """The spans by their numbers, for causes, which may be None."""
        return {span.number: span for span in self.spans}

    @property
    def measured(self) -> bool:
        """Tells whether it was recorded, as its title says."""
        return self.title.startswith(MEASURED)

    def describe(self, span: Span) -> str:
        """Returns the op of `span` in words."""
        return describe(span.op, self.trace)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams in use, in the order in which they are drawn; like `on`, `busy` and `idle`, of one stage."""
        of_one_stage("streams", self)
        used = {span.stream for span in self.spans}
        return tuple(name for name in STREAMS if name in used)

    def on(self, stream: str) -> tuple[Span, ...]:
        """Returns the spans of one stream, in order."""
        of_one_stage("on", self)
        return tuple(span for span in self.spans if span.stream == stream)

    def busy(self, *streams: str) -> float:
        """Seconds in which at least one of `streams` runs something."""
        of_one_stage("busy", self)
        total = end = 0.0
        spans = [span for span in self.spans if span.stream in streams]
        for span in sorted(spans, key=attrgetter("start")):
            total += max(0.0, span.end - max(span.start, end))
            end = max(end, span.end)
        return total

    @property
    def compute_s(self) -> float:
        """Seconds in which the compute stream runs something, contention included."""
        return self.busy("compute")

    @property
    def inside(self) -> tuple[Inside, ...]:
        """All collectives of blocks."""
        return tuple(each for span in self.spans for each in span.inside)

    @property
    def comm_s(self) -> float:
        """Seconds in which some other stream runs something: communication, or a copy to the host or from it."""
        return self.busy(*(name for name in self.streams if name != "compute"))

    def idle(self, stream: str = "compute") -> tuple[Idle, ...]:
        """Gaps of `stream`, with what ended each, and why it was idle."""
        spans = self.on(stream)
        staged = self.trace.stage is not None and stream == "compute"
        calls = [span for span in spans if staged and isinstance(span.op, ComputeOp)]
        gaps = []
        now = 0.0
        for span in spans:
            if span.start > now:
                cause = self.by_number.get(span.cause)
                why = "host" if cause is None or cause.stream == stream else kind(cause)
                if why == "receive" and span in calls[:1]:
                    why = "fill"
                elif why == "host" and calls and now >= calls[-1].end:
                    why = "drain"
                gaps.append(Idle(stream, now, span.start, span.cause, why))
            now = max(now, span.end)
        explained = max(now, self.seconds - self.overhead)
        gaps.append(Idle(stream, now, explained, None, "drain" if calls else "end"))
        gaps.append(Idle(stream, explained, self.seconds, None, "overhead"))
        rounding = 1e-9 * self.overhead
        return tuple(gap for gap in gaps if gap.end - gap.start > rounding)

    @property
    def bubble(self) -> float:
        """The part of the step in which compute is idle, a mean over stages; without the overhead."""
        seconds = self.seconds - self.overhead
        busy = sum(part.compute_s for part in self.by_stage) / self.stage_count
        return 1 - busy / seconds if seconds else 0.0

    def bubbles(self) -> Counter[str]:
        """Returns the seconds that compute was idle, by reason, on all stages together."""
        return sums((gap.why, gap.end - gap.start) for part in self.by_stage for gap in part.idle())

    def critical_path(self) -> tuple[Span, ...]:
        """Returns the chain of spans that made the step as long as it was: each began when the one before it ended."""
        path = []
        last = max(self.spans, key=attrgetter("end"), default=None)
        while last is not None:
            path.append(last)
            last = self.by_number.get(last.cause)
        return tuple(reversed(path))


def sums(parts: Iterable[tuple[str, float]]) -> Counter[str]:
    """Seconds by name."""
    found: Counter[str] = Counter()
    for name, seconds in parts:
        found[name] += seconds  # type: ignore[assignment]
    return found


def side_by_side(one: Spans, two: Spans) -> list[tuple[str, float, float]]:
    """Returns `(what, seconds in one, seconds in two)`: of the step, and busy ones of the streams that both use. Of
    pipelines the step alone."""
    both = [("step", one.seconds, two.seconds)]
    if one.stage_count == two.stage_count == 1:
        both += [(stream, one.busy(stream), two.busy(stream)) for stream in one.streams if stream in two.streams]
    return both


def of_one_stage(what: str, timeline: "Spans") -> None:
    """Raises TypeError unless it is a timeline of one stage."""
    if timeline.stage_count > 1:
        raise TypeError(
            f"{what}: expected the timeline of one stage, got one of {timeline.stage_count}; take one stage at a "
            "time, as in timeline.by_stage[0]"
        )


# ---- What weight slots and gradient slots hold during a timeline.
#
# weight slot      from the beginning of a gather into it until its last use; from the step's beginning where it was
#                  carried over, to its end where it is gathered for the next step
# gradient slot    from the beginning of the first backward that writes to it until its reduction has ended


class Held(NamedTuple):
    """A slot holds a unit. ready: when the gather has ended, or the first backward; before, the slot is being filled"""

    slot: int
    unit: int
    start: float
    ready: float
    end: float


def weight_slots(timeline: Spans) -> list[Held]:
    """Returns the contents of weight slots; empty where nothing is gathered."""
    found: list[Held] = []
    now: dict[int, Held] = {}  # an end of 0: nothing has used it yet
    gathered = False
    for span in timeline.spans:
        for unit, slot in timeline.trace.weights_of(span.op):
            held = now.get(slot) or Held(slot, unit, 0.0, 0.0, 0.0)
            now[slot] = held._replace(end=max(span.end, held.end))
        for unit, slot in filled(span.op):
            gathered = True
            if slot in now:
                found.append(now[slot])
            now[slot] = Held(slot, unit, span.start, span.end, 0.0)
    return _by_slot(timeline, [*found, *now.values()] if gathered else [])


def grad_slots(timeline: Spans) -> list[Held]:
    """Returns the contents of gradient slots; empty where nothing is reduced."""
    found: list[Held] = []
    now: dict[int, Held] = {}
    for span in timeline.spans:
        op = span.op
        if isinstance(op, Backward) and op.grad_slots:  # the half for inputs has none
            trained = timeline.trace.visits[op.visit].trained
            for unit, slot in zip(trained, op.grad_slots, strict=True):
                now.setdefault(slot, Held(slot, unit, span.start, span.end, 0.0))
        elif isinstance(op, Reduce):
            found += [now.pop(slot)._replace(end=span.end) for slot in op.grad_slots if slot in now]
    return _by_slot(timeline, [*found, *now.values()] if found else [])


def _by_slot(timeline: Spans, found: Iterable[Held]) -> list[Held]:
    """Returns contents in the order of slots; what has no end is held to the step's."""
    held = [each._replace(end=each.end or timeline.seconds) for each in found]
    return sorted(held, key=attrgetter("slot", "start"))
