"""What the trace-event format asks of a document, and Perfetto's reading of it, which drops what breaks these rules."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import Any

KEYS = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "f": {"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"},
}


def check(text: str) -> None:
    """`text` is JSON without NaN, of complete events, flows between them, and names for their tracks."""
    document = json.loads(text, parse_constant=lambda name: 1 / 0)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    by_phase = {phase: [event for event in events if event["ph"] == phase] for phase in KEYS}
    assert sum(map(len, by_phase.values())) == len(events)
    for event in events:
        assert set(event) == KEYS[event["ph"]]
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert event["name"]
        for key in {"ts", "dur"} & set(event):
            assert math.isfinite(event[key])
            assert event[key] >= 0
            assert (1000 * event[key]).is_integer(), "Perfetto cuts times to whole nanoseconds, each by itself"
    check_names(by_phase["M"], {(event["pid"], event["tid"]) for event in events})
    tracks = itertools.groupby(sorted(by_phase["X"], key=track), track)
    slices = {where: sorted(found, key=lambda event: event["ts"]) for where, found in tracks}
    for found in slices.values():
        for one, two in itertools.pairwise(found):
            assert one["ts"] + one["dur"] <= two["ts"], "slices of a track that overlap are dropped"
    check_flows(by_phase["s"], by_phase["f"], slices)


def check_names(metadata: list[dict[str, Any]], tracks: set[tuple[int, int]]) -> None:
    """Each process and each track has one name; what metadata has for an argument depends on its name."""
    argument = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
    for event in metadata:
        assert set(event["args"]) == {argument[event["name"]]}
    assert {track(event) for event in metadata if event["name"] == "thread_name"} == tracks
    named = Counter((event["pid"], event["tid"], event["name"]) for event in metadata)
    assert set(named.values()) == {1}
    assert {event["pid"] for event in metadata if event["name"] == "process_name"} == {pid for pid, _ in tracks}


def check_flows(begins: list[dict[str, Any]], ends: list[dict[str, Any]], slices: dict[Any, list[Any]]) -> None:
    """A flow is a pair of one id, name and category, one per document; both lie in a slice, in time's order."""
    assert [(e["id"], e["name"], e["cat"]) for e in begins] == [(e["id"], e["name"], e["cat"]) for e in ends]
    assert len({event["id"] for event in begins}) == len(begins)
    for begin, end in zip(begins, ends, strict=True):
        assert type(begin["id"]) is int and 0 <= begin["id"] < 2**53, "text is read as a hexadecimal number"
        assert end["bp"] == "e"
        assert begin["ts"] <= end["ts"]
        assert begin["pid"] == end["pid"]
        for event in (begin, end):
            at = [s for s in slices[track(event)] if s["ts"] <= event["ts"] < s["ts"] + max(s["dur"], 1e-3)]
            assert at, "a flow that begins or ends in no slice is dropped"


def track(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]
