"""Timelines in words: a few lines for terminals, times with a unit, why a stream was idle, of a stage or of all."""

from collections import Counter
from collections.abc import Sequence

from yafsdp_fn.program.trace import shortened
from yafsdp_fn.timeline.spans import Span, Spans, StageTraffic, by_reason, kind, sums

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def unit_of(seconds: float) -> tuple[float, str]:
    """Returns `(its seconds, name)` of the unit that a time of that length is shown in."""
    return next((unit for unit in UNITS if seconds >= unit[0]), UNITS[-1])


def shown(seconds: float, digits: int = 3) -> str:
    """Returns a time in so many digits, with a unit: `1.24 s`, `56.2 ms`; `0 s`."""
    if seconds == 0:
        return "0 s"
    scale, name = unit_of(seconds)
    value = seconds / scale
    return f"{value:.{digits - (1 if value < 10 else 2 if value < 100 else 3)}f} {name}"


def reasons(timeline: Spans) -> Counter[str]:
    """Returns the seconds that compute was idle, by reason."""
    return by_reason(timeline.idle())


WORDS = {"gather": "gathers", "reduce": "reductions", "all-reduce": "all-reductions", "host": "the host"}
WORDS |= {"copy": "copies", "offload": "offloads", "fetch": "fetches", "send": "sends", "receive": "receives"}
ENDS = {"end": "after the last op", "overhead": "overhead", "fill": "filling", "drain": "draining"}


def because(why: str) -> str:
    """Returns a reason in a sentence."""
    return ENDS.get(why) or f"waiting for {WORDS.get(why, why)}"


def longest(waits: Counter[str], most: int = 3) -> str:
    """Returns the longest waits, in words."""
    return ", ".join(f"{shown(seconds)} {because(why)}" for why, seconds in waits.most_common(most))


def render(timeline: Spans) -> str:
    """Returns title, step time, the work of every stream, the causes of idle compute, and the critical path; for
    several stages bubble and step time, the waits of each stage, and the messages between stages."""
    if timeline.stage_count > 1:
        return _of_stages(timeline)
    total = timeline.seconds or 1.0
    lines = [f"{timeline.title}: {shown(timeline.seconds)}"]
    for stream in timeline.streams:
        busy = timeline.busy(stream)
        lines.append(f"  {stream:<14}{shown(busy):>9}  {busy / total:4.0%} busy, {_ops(timeline.on(stream))}")
    if timeline.inside:
        inside = sum(each.end - each.start for each in timeline.inside)
        lines.append(f"  {'of compute':<14}{shown(inside):>9}  {inside / total:4.0%} in the collectives of blocks")
    waits = reasons(timeline)
    lines.append(f"  {'compute idle':<14}{shown(sum(waits.values())):>9}  {longest(waits)}".rstrip())
    path = timeline.critical_path()
    along = sums((kind(span), span.seconds) for span in path)
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
    for number, part in enumerate(timeline.by_stage):
        busy = part.compute_s
        rows.append(f"  stage {number:<4}{shown(busy):>10}  {busy / total:4.0%} busy; idle " + idle(timeline, number))
    head = f"{timeline.title}: {shown(timeline.seconds)}, bubble {timeline.bubble:.1%}"
    return "\n".join([head, *shortened(rows), *shortened([*map(_crossing, timeline.crossings)])])


def idle(timeline: Spans, stage: int | None = None) -> str:
    """Says why compute was idle, on a stage or on all together."""
    waits = Counter({why: seconds for why, seconds in timeline.bubbles(stage).items() if seconds > 1e-9})
    return longest(waits) or "never"


def _crossing(crossing: StageTraffic) -> str:
    source, target, link, messages, nbytes = crossing
    return f"  {f'stage {source} -> {target}':<16}{messages} messages, {nbytes / 2**30:.2f} GiB a rank, over the {link}"
