"""A timeline as trace events in JSON, which https://ui.perfetto.dev and chrome://tracing open.

one process per timeline, or per stage of a pipeline, one track per stream, one slice per op, with those of the
collectives in its block; an arrow from the op whose end let another begin on another stream. Times are microseconds.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from yafsdp_fn.program.ops import STREAMS, AllReduce, Fetch, Gather, MessageOp, Offload, Receive, Reduce, Send, Stash
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.timeline.spans import Inside, Span, Spans, kind

Event = dict[str, Any]
STEP = 0.125  # of times, in microseconds


def save(timelines: Sequence[Spans], path: str | Path) -> None:
    """Writes the JSON of `timelines`, each as processes of its own."""
    Path(path).write_text(json.dumps(document(timelines)))


def document(timelines: Sequence[Spans]) -> dict[str, Any]:
    """Returns the document that is written: an object with a list of trace events."""
    events: list[Event] = []
    first = 0  # process: of the first stage of a timeline
    for timeline in timelines:
        several = len(timelines) > 1 and timeline.stage_count > 1
        of = f"{timeline.title}, " * several
        for process, part in enumerate(timeline.by_stage, first):
            track = _track(process, next(iter(part.streams), STREAMS[0]))
            events.append(_about(track, "process_name", name=of + part.title))
            events += _slices(part, process)
        events += _arrows(timeline, first, len(events))
        first += timeline.stage_count
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _slices(part: Spans, process: int) -> Iterator[Event]:
    """Yields what a stage does: its tracks, and a slice for each op, and for each collective in its block."""
    for stream in part.streams:
        track = _track(process, stream)
        yield _about(track, "thread_name", name=stream)
        yield _about(track, "thread_sort_index", sort_index=track["tid"])
    for span in part.spans:
        slice_of = {"ph": "X", **_track(process, span.stream)}
        about = {"name": part.describe(span), "cat": kind(span), "args": _details(part, span)}
        yield {**slice_of, **_times(span), **about}
        for each in span.inside:
            yield {**slice_of, **_times(each), "name": each.name or "collectives of a block", "cat": "inside"}


def _arrows(timeline: Spans, process: int, first: int) -> Iterator[Event]:
    """Yields arrows from ops to those on other streams, or stages, that they let begin. process: of the first stage;
    first: the id of the first arrow"""
    # ids are numbers, and of one document: Perfetto reads text as hexadecimal, and looks at no process
    ids = itertools.count(first)
    for span in timeline.spans:
        cause = timeline.by_number.get(span.cause)
        if cause is None or (cause.stage, cause.stream) == (span.stage, span.stream):
            continue
        # an arrow leaves from a slice, whose end is no longer in it
        leaves = max(_microseconds(cause.start), _microseconds(cause.end) - STEP)
        about = {"name": "lets begin", "cat": "cause", "id": next(ids)}
        yield {"ph": "s", **_track(process + cause.stage, cause.stream), "ts": leaves, **about}
        begins = _microseconds(span.start)
        yield {"ph": "f", "bp": "e", **_track(process + span.stage, span.stream), "ts": begins, **about}


def _track(process: int, stream: str) -> Event:
    return {"pid": process, "tid": STREAMS.index(stream)}


def _microseconds(seconds: float) -> float:
    """Microseconds, rounded to an eighth, which is a whole number of nanoseconds and exact in binary.

    Perfetto cuts beginnings and lengths off to nanoseconds, each by itself: others might overlap by one, and slices of
    a track that overlap are dropped.
    """
    return round(1e6 * seconds / STEP) * STEP


def _times(what: Span | Inside) -> Event:
    start = _microseconds(what.start)
    return {"ts": start, "dur": _microseconds(what.end) - start}


def _about(where: Event, what: str, **args: Any) -> Event:
    return {"ph": "M", **where, "name": what, "args": args}


def _details(timeline: Spans, span: Span) -> Event:
    """Returns a slice's details in Perfetto."""
    op = span.op
    trace = timeline.trace
    units = () if isinstance(op, MessageOp) else trace.units_of(op)
    names = [trace.units[unit].name for unit in units]
    found = {"op": span.number, "units": names, "bytes": _nbytes(op, trace)}
    found |= {field: getattr(op, field, None) for field in ("slots", "grad_slots", "carry_slot", "microbatch")}
    if cause := timeline.by_number.get(span.cause):
        found["cause"] = {"op": cause.number, "name": timeline.describe(cause)}
    return {name: value for name, value in found.items() if value is not None}


def _nbytes(op: Any, trace: Trace) -> int | None:
    """Returns the bytes of the whole vectors that a collective gathers or reduces, or of what is copied to the host or
    from it, or sent to another stage; None of other ops."""
    match op:
        case Offload() | Fetch():
            return trace.visits[op.visit].cost.carry_slot_bytes
        case Send() | Receive():
            return trace.cut.bytes_of(op.message)
        case Gather() | Stash():
            return sum(trace.units[unit].gather_bytes for unit in op.units)
        case Reduce() | AllReduce():
            return sum(trace.units[unit].reduce_bytes for unit in op.units)
    return None
