"""Timelines in words: a few lines for terminals, times with a unit, why a stream was idle, of a stage or of all."""

from collections import Counter

from yafsdp_fn.program.trace import shortened
from yafsdp_fn.timeline.spans import Spans, StageTraffic, kind, sums
from yafsdp_fn.util.words import counted

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
    before = 1 + (value >= 10) + (value >= 100)  # digits before the point
    return f"{value:.{digits - before}f} {name}"


WORDS = {"gather": "gathers", "reduce": "reductions", "all-reduce": "all-reductions", "host": "the host"}
WORDS |= {"copy": "copies", "offload": "offloads", "fetch": "fetches", "send": "sends", "receive": "receives"}
ENDS = {"end": "after the last op", "overhead": "overhead", "fill": "filling", "drain": "draining"}


def because(why: str) -> str:
    """Returns a reason in a sentence."""
    return ENDS.get(why) or f"waiting for {WORDS.get(why, why)}"


def longest(waits: Counter[str], most: int = 3) -> str:
    """Returns the longest waits, in words."""
    waited = [(why, seconds) for why, seconds in waits.most_common(most) if seconds > 1e-9]
    return ", ".join(f"{shown(seconds)} {because(why)}" for why, seconds in waited) or "never"


def share(timeline: Spans, stream: str = "compute") -> str:
    """Returns the part of the step in which a stream is busy."""
    return f"{timeline.busy(stream) / (timeline.seconds or 1.0):.0%}"


def render(timeline: Spans) -> str:
    """Returns title, step time, the work of every stream, the causes of idle compute, and the critical path; for
    several stages bubble and step time, the waits of each stage, and the messages between stages."""
    head = f"{timeline.title}: {shown(timeline.seconds)}"
    if timeline.stage_count > 1:
        head += f", bubble {timeline.bubble:.1%}"
        stages = [_stage(number, part) for number, part in enumerate(timeline.by_stage)]
        crossings = [_crossing(each) for each in timeline.crossings]
        return "\n".join([head, *shortened(stages), *shortened(crossings)])
    lines = [head]
    for stream in timeline.streams:
        words = f"{share(timeline, stream):>4} busy, {counted(len(timeline.on(stream)), 'op')}"
        lines.append(_line(stream, timeline.busy(stream), words))
    if timeline.inside:
        inside = sum(each.end - each.start for each in timeline.inside)
        part = inside / (timeline.seconds or 1.0)
        lines.append(_line("of compute", inside, f"{part:4.0%} in the collectives of blocks"))
    waits = timeline.bubbles()
    lines.append(_line("compute idle", sum(waits.values()), longest(waits)))
    path = timeline.critical_path()
    along = sums((kind(span), span.seconds) for span in path)
    running = sum(along.values())
    parts = ", ".join(f"{shown(seconds)} {name}" for name, seconds in along.most_common())
    words = f"{counted(len(path), 'op')}: {parts}"
    rest = timeline.seconds - running
    if rest > 1e-3 * timeline.seconds:
        words += f"; between and after them {shown(rest)}"
    return "\n".join([*lines, _line("critical path", running, words)])


def _line(name: str, seconds: float, words: str) -> str:
    return f"  {name:<14}{shown(seconds):>9}  {words}"


def _stage(number: int, part: Spans) -> str:
    return _line(f"stage {number}", part.compute_s, f"{share(part):>4} busy; idle {longest(part.bubbles())}")


def _crossing(crossing: StageTraffic) -> str:
    source, target, link, messages, nbytes = crossing
    return f"  {f'stage {source} -> {target}':<16}{messages} messages, {nbytes / 2**30:.2f} GiB a rank, over the {link}"
