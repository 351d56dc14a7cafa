"""A timeline as JSON: measured on one machine, kept, and shown on another."""

import json
import math
import reprlib
from typing import Any

from yafsdp_fn import strict_json
from yafsdp_fn.schedules import serialised
from yafsdp_fn.schedules.ops import OPS
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.well_formed import check_form
from yafsdp_fn.timeline.spans import Span, Spans

KEYS = {"title", "seconds", "overhead", "program", "spans"}


def to_json(timeline: Spans) -> str:
    """The whole of it; spans as `[number, stream, start, end, cause]`, beside their ops. Raises ValueError for a
    simulated peer's: its copies are no ops of a program."""
    ops = [span.op for span in timeline.spans]
    if foreign := [op for op in ops if not isinstance(op, tuple(OPS.values()))]:
        raise ValueError(f"{timeline.title!r} holds {foreign[0]!r}, which is no op of a program: it cannot be kept")
    spans = [[span.number, *span[2:]] for span in timeline.spans]
    program = serialised.as_data(timeline.trace, ops)
    about = {"title": timeline.title, "seconds": timeline.seconds, "overhead": timeline.overhead}
    return json.dumps({**about, "program": program, "spans": spans})


def from_json(text: str) -> Spans:
    """What `to_json` wrote. Raises ValueError with what is wrong."""
    try:
        data = strict_json.loads(text)
        if not isinstance(data, dict) or data.keys() != KEYS:
            raise ValueError(f"expected an object of {', '.join(sorted(KEYS))}")
        trace, ops = serialised.checked(data["program"])
        check_form(Program(trace, ops))
        title, seconds, overhead = data["title"], _time(data["seconds"], "seconds"), _time(data["overhead"], "overhead")
        if not isinstance(title, str):
            raise ValueError(f"title: expected a string, got {reprlib.repr(title)}")
        if not isinstance(data["spans"], list) or len(data["spans"]) != len(ops):
            raise ValueError(f"spans: expected a list of {len(ops)}, as many as ops")
        spans: list[Span] = []
        known: set[int] = set()
        for at, (op, item) in enumerate(zip(ops, data["spans"], strict=True)):
            spans.append(_span(f"spans[{at}]", op, item, known, seconds))
            known.add(spans[-1].number)
        return Spans(trace, tuple(spans), seconds, title, overhead)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a timeline in JSON: {error}") from error


def _span(where: str, op: Any, item: Any, known: set[int], most: float) -> Span:
    if not isinstance(item, list) or len(item) != 5:
        raise ValueError(f"{where}: expected [number, stream, start, end, cause], got {reprlib.repr(item)}")
    number, stream, start, end, cause = item
    if type(number) is not int or number in known:
        raise ValueError(f"{where}: expected an op's number that is not there yet, got {reprlib.repr(number)}")
    if stream != op.stream:
        raise ValueError(f"{where}: {type(op).__name__.lower()} runs on {op.stream}, got {reprlib.repr(stream)}")
    if cause is not None and (type(cause) is not int or cause not in known):
        raise ValueError(f"{where}: its cause is no earlier op: {reprlib.repr(cause)}")
    if not _time(start, f"{where}, start") <= _time(end, f"{where}, end") <= most:
        raise ValueError(f"{where}: it lasts from {start} to {end} s, in a step of {most} s")
    return Span(number, op, stream, float(start), float(end), cause)


def _time(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{where}: expected seconds, got {reprlib.repr(value)}")
    return float(value)
