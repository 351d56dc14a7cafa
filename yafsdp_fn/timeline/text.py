"""Timelines in words: a few lines for terminals, times with a unit, why a stream was idle."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yafsdp_fn.schedules import further_ops, ops
from yafsdp_fn.timeline.spans import Span, Spans

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
KINDS: dict[type[ops.Op], str] = dict.fromkeys((ops.Forward, ops.Backward, ops.Norm, ops.Update), "compute") | {
    ops.Gather: "gather",
    ops.Reduce: "reduce",
    further_ops.AllReduce: "all-reduce",
    further_ops.Exchange: "exchange",
    further_ops.Stash: "stash",
    further_ops.Offload: "offload",
    further_ops.Fetch: "fetch",
    further_ops.Send: "send",
    further_ops.Receive: "receive",
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
    return KINDS.get(type(span.op), "copy")


class Gap(NamedTuple):
    """A gap of a stream. why: a kind of op, of the `cause` that ended the gap; or `host`, `end`

    `host`: the step's Python between two ops that nothing else kept apart; `end`: after the stream's last op;
    `overhead`: the same, where a prediction says that no op explains it
    """

    start: float
    end: float
    why: str
    cause: Span | None = None


def gaps(timeline: Spans, stream: str = "compute") -> list[Gap]:
    """When `stream` was idle, and why."""
    at = {span.number: span for span in timeline.spans}
    found = []
    for _, start, end, number in timeline.idle(stream):
        cause = None if number is None else at[number]
        if cause is not None and cause.stream != stream:
            found.append(Gap(start, end, kind(cause), cause))
        elif cause is not None or end < timeline.seconds:
            found.append(Gap(start, end, "host"))
        else:
            found.append(Gap(start, end, "overhead" if end - start <= timeline.overhead * (1 + 1e-9) else "end"))
    return found


def reasons(timeline: Spans, stream: str = "compute") -> Counter[str]:
    """Seconds that `stream` was idle, by reason."""
    return _sums((gap.why, gap.end - gap.start) for gap in gaps(timeline, stream))


def _sums(parts: Iterable[tuple[str, float]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, seconds in parts:
        found[name] += seconds  # type: ignore[assignment]
    return found


WORDS = {"gather": "gathers", "reduce": "reductions", "all-reduce": "all-reductions", "host": "the host"}
WORDS |= {"copy": "copies", "offload": "offloads", "fetch": "fetches", "send": "sends", "receive": "receives"}
ENDS = {"end": "after the last op", "overhead": "overhead", "fill": "filling", "drain": "draining"}


def because(why: str) -> str:
    """A reason in a sentence."""
    return ENDS.get(why) or f"waiting for {WORDS.get(why, why)}"


def render(timeline: Spans) -> str:
    """Title, step time, what every stream did, why compute was idle, and what the critical path consists of."""
    total = timeline.seconds or 1.0
    lines = [f"{timeline.title}: {shown(timeline.seconds)}"]
    for stream in timeline.streams:
        busy = timeline.busy(stream)
        lines.append(f"  {stream:<14}{shown(busy):>9}  {busy / total:4.0%} busy, {_ops(timeline.on(stream))}")
    idle = reasons(timeline)
    why = ", ".join(f"{shown(seconds)} {because(name)}" for name, seconds in idle.most_common(3))
    lines.append(f"  {'compute idle':<14}{shown(sum(idle.values())):>9}" + (f"  {why}" if why else ""))
    path = timeline.critical_path()
    along = _sums((kind(span), span.seconds) for span in path)
    running = sum(along.values())
    parts = ", ".join(f"{shown(seconds)} {name}" for name, seconds in along.most_common())
    rest = timeline.seconds - running
    gaps = f"; between and after them {shown(rest)}" if rest > 1e-3 * total else ""
    return "\n".join([*lines, f"  {'critical path':<14}{shown(running):>9}  {_ops(path)}: {parts}{gaps}"])


def _ops(spans: Sequence[Span]) -> str:
    return f"{len(spans)} op{'s' * (len(spans) != 1)}"
