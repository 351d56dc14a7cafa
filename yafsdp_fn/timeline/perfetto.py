"""A timeline as trace events in JSON, which https://ui.perfetto.dev and chrome://tracing open.

one process per timeline, or per stage of a pipeline, one track per stream, one slice per op, with those of the
collectives in its block; an arrow from the op whose end let another begin on another stream. Times are microseconds.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from yafsdp_fn.program.ops import AllReduce, Fetch, Gather, Offload, Receive, Reduce, Send, Stash
from yafsdp_fn.timeline.spans import Inside, Span, Spans, kind

Event = dict[str, Any]
Tracks = Mapping[tuple[int, str], Event]
"""Stage and stream -> its process and its track."""
STEP = 0.125  # of times, in microseconds


def save(timelines: Sequence[Spans], path: str | Path) -> None:
    """Writes the JSON of `timelines`, each as processes of its own."""
    Path(path).write_text(json.dumps(document(timelines)))


def document(timelines: Sequence[Spans]) -> dict[str, Any]:
    """Returns the document that is written: an object with a list of trace events."""
    events: list[Event] = []
    seconds: dict[str, list[str]] = {}  # of all with a title, which several can have
    process = 0
    for timeline in timelines:
        of = f"{timeline.title}, " * (timeline.stage_count > 1 < len(timelines))
        tracks: dict[tuple[int, str], Event] = {}
        for stage, part in enumerate(timeline.by_stage):
            tracks |= {(stage, name): {"pid": process, "tid": track} for track, name in enumerate(part.streams)}
            events.append({"ph": "M", "pid": process, "tid": 0, **_about("process_name", name=of + part.title)})
            events += _slices(part, stage, tracks)
            process += 1
        events += _arrows(timeline, tracks, len(events))
        seconds.setdefault(timeline.title, []).append(f"{timeline.seconds} s")
    return {
        "displayTimeUnit": "ms",
        "otherData": {title: ", ".join(each) for title, each in seconds.items()},
        "traceEvents": events,
    }


def _slices(part: Spans, stage: int, tracks: Tracks) -> Iterator[Event]:
    """Yields what a stage does: its tracks, and a slice for each op, and for each collective in its block."""
    for number, stream in enumerate(part.streams):
        yield {"ph": "M", **tracks[stage, stream], **_about("thread_name", name=stream)}
        yield {"ph": "M", **tracks[stage, stream], **_about("thread_sort_index", sort_index=number)}
    for span in part.spans:
        track = tracks[stage, span.stream]
        about = {"name": part.describe(span), "cat": kind(span), "args": _arguments(part, span)}
        yield {"ph": "X", **track, **_times(span), **about}
        for each in span.inside:
            yield {"ph": "X", **track, **_times(each), "name": each.name or "collectives of a block", "cat": "inside"}


def _arrows(timeline: Spans, tracks: Tracks, first: int) -> Iterator[Event]:
    """Yields arrows from ops to those on other streams, or stages, that they let begin. first: the id of the first"""
    # ids are numbers, and of one document: Perfetto reads text as hexadecimal, and looks at no process
    ids = itertools.count(first)
    for span in timeline.spans:
        cause = timeline.by_number.get(span.cause)
        if cause is None or (cause.stage, cause.stream) == (span.stage, span.stream):
            continue
        # an arrow leaves from a slice, whose end is no longer in it
        leaves = max(_microseconds(cause.start), _microseconds(cause.end) - STEP)
        about = {"name": "lets begin", "cat": "cause", "id": next(ids)}
        yield {"ph": "s", **tracks[cause.stage, cause.stream], "ts": leaves, **about}
        yield {"ph": "f", "bp": "e", **tracks[span.stage, span.stream], "ts": _microseconds(span.start), **about}


def _microseconds(seconds: float) -> float:
    """Microseconds, rounded to an eighth, which is a whole number of nanoseconds and exact in binary.

    Perfetto cuts beginnings and lengths off to nanoseconds, each by itself: others might overlap by one, and slices of
    a track that overlap are dropped.
    """
    return round(1e6 * seconds / STEP) * STEP


def _times(what: Span | Inside) -> Event:
    start = _microseconds(what.start)
    return {"ts": start, "dur": _microseconds(what.end) - start}


def _about(what: str, **args: Any) -> Event:
    return {"name": what, "args": args}


def _arguments(timeline: Spans, span: Span) -> Event:
    """Returns a slice's details in Perfetto. bytes: of the whole vectors that a collective gathers or reduces, or of
    what is copied to the host or from it, or sent to another stage."""
    op = span.op
    trace = timeline.trace
    cause = timeline.by_number.get(span.cause)
    units = [] if isinstance(op, Send | Receive) else [trace.units[unit] for unit in trace.units_of(op)]
    found: Event = {"op": span.number, "units": [unit.name for unit in units]}
    found |= {key: list(getattr(op, key)) for key in ("slots", "grad_slots") if hasattr(op, key)}
    if isinstance(op, Offload | Fetch):
        found |= {"carry_slot": op.carry_slot, "bytes": trace.visits[op.visit].cost.carry_slot_bytes}
    elif isinstance(op, Send | Receive) and trace.split is not None:
        flow = trace.split.flows[op.flow]
        found |= {"carry_slot": op.carry_slot, "bytes": flow.grad_bytes if op.back else flow.nbytes}
    elif isinstance(op, Gather | Stash):
        found["bytes"] = sum(unit.gather_bytes for unit in units)
    elif isinstance(op, Reduce | AllReduce):
        found["bytes"] = sum(unit.reduce_bytes for unit in units)
    if span.microbatch is not None:
        found["microbatch"] = span.microbatch
    if cause is not None:
        found["cause"] = {"op": cause.number, "name": timeline.describe(cause)}
    return found
