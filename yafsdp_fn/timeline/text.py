"""Timelines in words: a few lines for terminals, times with a unit, why a stream was idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from yafsdp_fn.schedules.ops import (
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Reduce,
    Stash,
    Update,
)

if TYPE_CHECKING:
    from yafsdp_fn.timeline.timeline import Span, Timeline

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
KINDS: dict[type[Op], str] = {
    Gather: "gather",
    Stash: "stash",
    Reduce: "reduce",
    AllReduce: "all-reduce",
    Offload: "offload",
    Fetch: "fetch",
}


def unit_of(seconds: float) -> tuple[float, str]:
    """`(its seconds, name)` of the unit that a time of that length is shown in."""
    return next((unit for unit in UNITS if seconds >= unit[0]), UNITS[-1])


def shown(seconds: float) -> str:
    """Three digits and a unit: `1.24 s`, `56.2 ms`."""
    scale, name = unit_of(seconds)
    value = seconds / scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"


def kind(span: Span) -> str:
    """What the op of `span` does, in a word: a communication's own name, `compute` of all that is computed."""
    computes = isinstance(span.op, Forward | Backward | Norm | Update)
    return KINDS.get(type(span.op), "compute" if computes else "copy")


class Gap(NamedTuple):
    """A gap of a stream. why: a kind of op, of the `cause` that ended the gap; or `host`, `end`

    `host`: the step's Python between two ops that nothing else kept apart; `end`: after the stream's last op;
    `overhead`: the same, where a prediction says that no op explains it
    """

    start: float
    end: float
    why: str
    cause: Span | None


def gaps(timeline: Timeline, stream: str = "compute") -> list[Gap]:
    """When `stream` was idle, and why."""
    at = {span.number: span for span in timeline.spans}
    found = []
    for _, start, end, number in timeline.idle(stream):
        cause = None if number is None else at[number]
        if cause is not None and cause.stream != stream:
            found.append(Gap(start, end, kind(cause), cause))
        else:
            found.append(Gap(start, end, _without_cause(timeline, start, end) if cause is None else "host", None))
    return found


def _without_cause(timeline: Timeline, start: float, end: float) -> str:
    if end < timeline.seconds:
        return "host"
    return "overhead" if end - start <= timeline.overhead * (1 + 1e-9) else "end"


def reasons(timeline: Timeline, stream: str = "compute") -> Counter[str]:
    """Seconds that `stream` was idle, by reason."""
    found: Counter[str] = Counter()
    for gap in gaps(timeline, stream):
        found[gap.why] += gap.end - gap.start  # type: ignore[assignment]
    return found


WORDS = {
    "gather": "gathers",
    "copy": "copies",
    "reduce": "reductions",
    "all-reduce": "all-reductions",
    "offload": "offloads",
    "fetch": "fetches",
    "host": "the host",
}


ENDS = {"end": "after the last op", "overhead": "overhead"}


def because(why: str) -> str:
    """A reason in a sentence."""
    return ENDS.get(why) or f"waiting for {WORDS.get(why, why)}"


def render(timeline: Timeline) -> str:
    """Title, step time, what every stream did, why compute was idle, and what the critical path consists of."""
    total = timeline.seconds or 1.0
    lines = [f"{timeline.title}: {shown(timeline.seconds)}"]
    for stream in timeline.streams:
        busy = timeline.busy(stream)
        lines.append(f"  {stream:<14}{shown(busy):>9}  {busy / total:4.0%} busy, {_ops(timeline.on(stream))}")
    idle = reasons(timeline)
    why = ", ".join(f"{shown(seconds)} {because(name)}" for name, seconds in idle.most_common(3))
    lines.append(f"  {'compute idle':<14}{shown(sum(idle.values())):>9}" + (f"  {why}" if why else ""))
    path, along = timeline.critical_path(), Counter[str]()
    for span in path:
        along[kind(span)] += span.seconds  # type: ignore[assignment]
    running = sum(along.values())
    parts = ", ".join(f"{shown(seconds)} {name}" for name, seconds in along.most_common())
    rest = timeline.seconds - running
    gaps = f"; between and after them {shown(rest)}" if rest > 1e-3 * total else ""
    return "\n".join([*lines, f"  {'critical path':<14}{shown(running):>9}  {_ops(path)}: {parts}{gaps}"])


def _ops(spans: Sequence[Span]) -> str:
    return f"{len(spans)} op{'s' * (len(spans) != 1)}"
