"""A timeline as trace events in JSON, which https://ui.perfetto.dev and chrome://tracing open.

one process per timeline, or per stage of a pipeline, one track per stream, one slice per op, with those of the
collectives in its block; an arrow from the op whose end let another begin on another stream. Times are microseconds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yafsdp_fn.program.ops import AllReduce, Fetch, Gather, Offload, Receive, Reduce, Send, Stash
from yafsdp_fn.timeline.spans import Span, Spans, kind

STEP = 0.125  # of times, in microseconds


def save(timelines: Sequence[Spans], path: str | Path) -> None:
    """Writes the JSON of `timelines`, each as processes of its own."""
    Path(path).write_text(json.dumps(document(timelines)))


def document(timelines: Sequence[Spans]) -> dict[str, Any]:
    """The document that is written: an object with a list of trace events."""
    events: list[dict[str, Any]] = []
    seconds: dict[str, list[str]] = {}  # of all with a title, which several can have
    first = 0
    for timeline in timelines:
        of = f"{timeline.title}, " * (timeline.stage_count > 1 < len(timelines))
        for process, each in enumerate(timeline.parts, first):
            _add(events, each._replace(title=of + each.title), process)
        _add_across(events, timeline, first)
        first += timeline.stage_count
        seconds.setdefault(timeline.title, []).append(f"{timeline.seconds} s")
    return {
        "displayTimeUnit": "ms",
        "otherData": {title: ", ".join(each) for title, each in seconds.items()},
        "traceEvents": events,
    }


def _add_across(events: list[dict[str, Any]], timeline: Spans, first: int) -> None:
    """Adds arrows from each span to those that it lets begin on other stages. first: process of its first stage"""
    at = {span.number: span for span in timeline.spans}
    for span in timeline.spans:
        cause = None if span.cause is None else at[span.cause]
        if cause is not None and cause.stage != span.stage:
            ends = [(first + of.stage, timeline.parts[of.stage].streams.index(of.stream), of) for of in (cause, span)]
            events += _arrow(len(events), *ends)


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
        for each in span.inside:
            begin = _microseconds(each.start)
            times = {"ts": begin, "dur": _microseconds(each.end) - begin}
            shown = {"name": each.name or "collectives of a block", "cat": "inside"}
            events.append({"ph": "X", "pid": process, "tid": tracks[span.stream], **times, **shown})
        if cause is not None and cause.stream != span.stream:
            events += _arrow(len(events), (process, tracks[cause.stream], cause), (process, tracks[span.stream], span))


def _arrow(number: int, source: tuple[int, int, Span], target: tuple[int, int, Span]) -> list[dict[str, Any]]:
    """An arrow from `(process, track, span)` to another, that it lets begin. number: of its own, in the document"""
    process, track, span = source
    # an arrow leaves from a slice, whose end is no longer in it
    leaves = max(_microseconds(span.start), _microseconds(span.end) - STEP)
    # ids are numbers, and of one document: Perfetto reads text as hexadecimal, and looks at no process
    about = {"name": "lets begin", "cat": "cause", "id": number}
    lands = {"ph": "f", "bp": "e", "pid": target[0], "tid": target[1], "ts": _microseconds(target[2].start)}
    return [{"ph": "s", "pid": process, "tid": track, "ts": leaves, **about}, {**lands, **about}]


def _microseconds(seconds: float) -> float:
    """Microseconds, rounded to an eighth, which is a whole number of nanoseconds and exact in binary.

    Perfetto cuts beginnings and lengths off to nanoseconds, each by itself: others might overlap by one, and slices of
    a track that overlap are dropped.
    """
    return round(1e6 * seconds / STEP) * STEP


def _about(what: str, process: int, track: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": args}


def _arguments(timeline: Spans, span: Span, cause: Span | None) -> dict[str, Any]:
    """A slice's details in Perfetto. bytes: of the whole vectors that a collective gathers or reduces, or of what is
    copied to the host or from it, or sent to another stage."""
    op, trace = span.op, timeline.trace
    parcels = trace.parcels_of(op) if isinstance(op, Send | Receive) else ()
    units = [] if parcels else [trace.units[unit] for unit in trace.units_of(op)]
    found: dict[str, Any] = {"op": span.number, "units": [unit.name for unit in units]}
    found |= {key: list(getattr(op, key)) for key in ("slots", "grad_slots") if hasattr(op, key)}
    if isinstance(op, Offload | Fetch):
        found["carry_slot"], found["bytes"] = op.carry_slot, trace.visits[op.visit].cost.carry_slot_bytes
    for parcel, slot in parcels:
        assert trace.split is not None
        flow = trace.split.flows[parcel.flow]
        found["carry_slot"], found["bytes"] = slot, flow.grad_bytes if parcel.back else flow.nbytes
    if isinstance(op, Gather | Stash):
        found["bytes"] = sum(unit.gather_bytes for unit in units)
    if isinstance(op, Reduce | AllReduce):
        found["bytes"] = sum(unit.reduce_bytes for unit in units)
    if span.microbatch is not None:
        found["microbatch"] = span.microbatch
    if cause is not None:
        found["cause"] = {"op": cause.number, "name": timeline.describe(cause)}
    return found
