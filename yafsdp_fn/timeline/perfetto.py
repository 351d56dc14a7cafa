"""A timeline as trace events in JSON, which https://ui.perfetto.dev and chrome://tracing open.

one process per timeline, one track per stream, one slice per op; an arrow from the op whose end let another begin
on another stream. Times are microseconds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yafsdp_fn.schedules.ops import AllReduce, Fetch, Gather, Offload, Reduce, Stash
from yafsdp_fn.timeline.spans import Span, Spans
from yafsdp_fn.timeline.text import kind

STEP = 0.125  # of times, in microseconds


def save(timeline: Spans, path: str | Path, beside: Spans | None = None) -> None:
    """Writes the JSON of `timeline`, and of `beside` as a process of its own."""
    Path(path).write_text(json.dumps(document([timeline] if beside is None else [timeline, beside])))


def document(timelines: Sequence[Spans]) -> dict[str, Any]:
    """What is written: an object with a list of trace events."""
    events: list[dict[str, Any]] = []
    for process, each in enumerate(timelines):
        _add(events, each, process)
    return {
        "displayTimeUnit": "ms",
        "otherData": {each.title: f"{each.seconds} s" for each in timelines},
        "traceEvents": events,
    }


def _add(events: list[dict[str, Any]], timeline: Spans, process: int) -> None:
    at = {span.number: span for span in timeline.spans}
    tracks = {stream: number for number, stream in enumerate(timeline.streams)}
    events.append(_about("process_name", process, 0, name=timeline.title))
    for stream, track in tracks.items():
        events.append(_about("thread_name", process, track, name=stream))
        events.append(_about("thread_sort_index", process, track, sort_index=track))
    for span in timeline.spans:
        cause = None if span.cause is None else at[span.cause]
        start = _microseconds(span.start)
        times = {"ts": start, "dur": _microseconds(span.end) - start}
        shown = {"name": timeline.describe(span), "cat": kind(span), "args": _arguments(timeline, span, cause)}
        events.append({"ph": "X", "pid": process, "tid": tracks[span.stream], **times, **shown})
        if cause is not None and cause.stream != span.stream:
            # ids are numbers, and of one document: Perfetto reads text as hexadecimal, and looks at no process
            flow = {"pid": process, "name": "lets begin", "cat": "cause", "id": len(events)}
            # an arrow leaves from a slice, whose end is no longer in it
            leaves = max(_microseconds(cause.start), _microseconds(cause.end) - STEP)
            events.append({"ph": "s", "tid": tracks[cause.stream], "ts": leaves, **flow})
            events.append({"ph": "f", "bp": "e", "tid": tracks[span.stream], "ts": start, **flow})


def _microseconds(seconds: float) -> float:
    """Rounded to an eighth, which is a whole number of nanoseconds and exact in binary.

    Perfetto cuts beginnings and lengths off to nanoseconds, each by itself: others might overlap by one, and slices of
    a track that overlap are dropped.
    """
    return round(1e6 * seconds / STEP) * STEP


def _about(what: str, process: int, track: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": args}


def _arguments(timeline: Spans, span: Span, cause: Span | None) -> dict[str, Any]:
    """What Perfetto shows of a slice. bytes: of the whole vectors that a collective gathers or reduces, or of what is
    copied to the host or from it."""
    op, trace = span.op, timeline.trace
    units = [trace.units[unit] for unit in trace.units_of(op)]
    found: dict[str, Any] = {"op": span.number, "units": [unit.name for unit in units]}
    found |= {key: list(getattr(op, key)) for key in ("slots", "grad_slots") if hasattr(op, key)}
    if isinstance(op, Offload | Fetch):
        found["carry_slot"], found["bytes"] = op.carry_slot, trace.visits[op.visit].cost.carry_slot_bytes
    if isinstance(op, Gather | Stash):
        found["bytes"] = sum(unit.gather_bytes for unit in units)
    if isinstance(op, Reduce | AllReduce):
        found["bytes"] = sum(unit.reduce_bytes for unit in units)
    if span.microbatch is not None:
        found["microbatch"] = span.microbatch
    if cause is not None:
        found["cause"] = {"op": cause.number, "name": timeline.describe(cause)}
    return found
