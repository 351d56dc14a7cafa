"""Timelines in words: a few lines for terminals, times with a unit, why a stream was idle, of a stage or of all."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yafsdp_fn.program.ops import OPS, Backward, Forward, name_of
from yafsdp_fn.timeline.spans import Crossing, Span, Spans

SHOWN = 16
"""Lines of stages, and of what crosses between them; of more, those in the middle are left out."""

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def unit_of(seconds: float) -> tuple[float, str]:
    """`(its seconds, name)` of the unit that a time of that length is shown in."""
    return next((unit for unit in UNITS if seconds >= unit[0]), UNITS[-1])


def shown(seconds: float) -> str:
    """Three digits and a unit: `1.24 s`, `56.2 ms`."""
    scale, name = unit_of(seconds)
    value = seconds / scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"


def kind(span: Span) -> str:
    """Names what the op of `span` does: a communication's own name, `compute` of all that is computed."""
    if not isinstance(span.op, OPS):
        return "copy"
    return "compute" if span.op.stream == "compute" else name_of(span.op)


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
    """The gaps in which `stream` was idle, and why."""
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


def bubble(timeline: Spans) -> float:
    """The part of the step in which compute is idle, a mean over stages; without the overhead."""
    seconds = timeline.seconds - timeline.overhead
    busy = sum(part.compute_s for part in timeline.parts) / timeline.stage_count
    return 1 - busy / seconds if seconds else 0.0


def bubbles(timeline: Spans, stage: int | None = None) -> Counter[str]:
    """Seconds that compute was idle, by reason as `stage_gaps` has it, on a stage or on all together."""
    stages = range(timeline.stage_count) if stage is None else (stage,)
    return _sums((gap.why, gap.end - gap.start) for number in stages for gap in stage_gaps(timeline, number))


def stage_gaps(timeline: Spans, stage: int) -> list[Gap]:
    """The gaps in which compute was idle on `stage`, and why.

    fill: before a stage's first microbatch has come; drain: after its last compute; receive: waits for another stage in
    between; gather, reduce, ...: for such an op of its own, which a slot may have kept back; overhead
    """
    own = timeline.parts[stage]
    computes = [span for span in own.on("compute") if isinstance(span.op, Forward | Backward)]
    first = computes[0].start if computes else timeline.seconds
    last, end = computes[-1].end if computes else 0.0, timeline.seconds - timeline.overhead
    found = []
    for gap in gaps(own):
        if gap.end <= first and gap.why == "receive":
            gap = gap._replace(why="fill")
        elif gap.start >= last and gap.cause is None:
            gap = gap._replace(why="drain", end=min(gap.end, max(end, gap.start)))
        found += [gap] if gap.end > gap.start else []
    if timeline.overhead:
        found.append(Gap(end, timeline.seconds, "overhead"))
    return found


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
    """Title, step time, what every stream did, why compute was idle, and what the critical path consists of; of several
    stages bubble and step time, what each stage waited for, and what crosses between stages."""
    if timeline.stage_count > 1:
        return _of_stages(timeline)
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


def _of_stages(timeline: Spans) -> str:
    total = timeline.seconds or 1.0
    rows = []
    for number, part in enumerate(timeline.parts):
        busy = part.compute_s
        rows.append(f"  stage {number:<4}{shown(busy):>10}  {busy / total:4.0%} busy; idle " + idle(timeline, number))
    head = f"{timeline.title}: {shown(timeline.seconds)}, bubble {bubble(timeline):.1%}"
    return "\n".join([head, *shortened(rows), *shortened([*map(_crossing, timeline.crossings)])])


def idle(timeline: Spans, stage: int | None = None, most: int = 3) -> str:
    """Says why compute was idle: the longest `most` reasons."""
    found = Counter({why: seconds for why, seconds in bubbles(timeline, stage).items() if seconds > 1e-9})
    return ", ".join(f"{shown(seconds)} {because(why)}" for why, seconds in found.most_common(most)) or "never"


def _crossing(crossing: Crossing) -> str:
    source, target, link, messages, nbytes = crossing
    return f"  {f'stage {source} -> {target}':<16}{messages} messages, {nbytes / 2**30:.2f} GiB a rank, over the {link}"


def shortened(rows: Sequence[str]) -> list[str]:
    """The first and the last of many."""
    if len(rows) <= SHOWN:
        return list(rows)
    return [*rows[: SHOWN // 2], f"  ... {len(rows) - SHOWN} more ...", *rows[-(SHOWN // 2) :]]
