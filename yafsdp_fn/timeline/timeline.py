"""Timelines: the spans of a step's ops, with what shows and keeps them."""

import json
import reprlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from yafsdp_fn.program.json import as_data, checked
from yafsdp_fn.program.ops import OPS
from yafsdp_fn.program.program import Program
from yafsdp_fn.proof.form import check_form
from yafsdp_fn.timeline import paint, perfetto, text
from yafsdp_fn.timeline.spans import Inside, Span, Spans, are_timelines, of_one_stage
from yafsdp_fn.util import strict_json
from yafsdp_fn.util.schema import typed_at

# ---- What a timeline in JSON consists of: it was measured on one machine, kept, and is shown on another.

KEYS = {"title", "seconds", "overhead", "program", "spans"}


def _span(where: str, op: Any, item: Any, known: set[int], most: float) -> Span:
    if not isinstance(item, list) or len(item) not in (5, 6):
        raise ValueError(f"{where}: expected [number, stream, start, end, cause], got {reprlib.repr(item)}")
    number, stream, start, end, cause, *rest = item
    if type(number) is not int or number in known:
        raise ValueError(f"{where}: expected an op's number that is not there yet, got {reprlib.repr(number)}")
    if stream != op.stream:
        raise ValueError(f"{where}: {type(op).__name__.lower()} runs on {op.stream}, got {reprlib.repr(stream)}")
    if cause is not None and (type(cause) is not int or cause not in known):
        raise ValueError(f"{where}: its cause is no earlier op: {reprlib.repr(cause)}")
    if not _time(start, f"{where}, start") <= _time(end, f"{where}, end") <= most:
        raise ValueError(f"{where}: it lasts from {start} to {end} s, in a step of {most} s")
    inside = tuple(_inside(f"{where}, inside", each, start, end) for each in (rest[0] if rest else ()))
    return Span(number, op, stream, float(start), float(end), cause, inside=inside)


def _inside(where: str, item: Any, start: float, end: float) -> Inside:
    if not isinstance(item, list) or len(item) != 3:
        raise ValueError(f"{where}: expected [start, end, name], got {reprlib.repr(item)}")
    if not start <= _time(item[0], where) <= _time(item[1], where) <= end:
        raise ValueError(f"{where}: it lasts from {item[0]} to {item[1]} s, in an op from {start} to {end} s")
    return Inside(float(item[0]), float(item[1]), typed_at(f"{where}, name", str, item[2]))


def _time(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{where}: expected seconds, got {reprlib.repr(value)}")
    return float(value)


# ---- A timeline: the spans of a step's ops, with what shows them.
#
# `simulate` predicts one, of all stages; `record` measures one, of the stage of a rank; they are drawn, compared and
# saved alike.


class Timeline(Spans):
    """One step: see `Spans` for what it holds.

    >>> timeline = ya.planner.simulate(program, "a100-80g", title="two A100s")
    >>> timeline.title, timeline.streams
    ('two A100s', ('gather', 'compute', 'reduce'))
    >>> ya.timeline.Timeline.from_json(timeline.to_json()) == timeline
    True
    """

    def __str__(self) -> str:
        return text.render(self)

    def _repr_svg_(self) -> str | None:
        """Shown by a notebook: its picture, None without matplotlib."""
        if not self.spans or find_spec("matplotlib") is None:
            return None
        return paint.picture([self]).decode()

    def save(self, path: str | Path, *, beside: "Timeline | None" = None) -> None:
        """Draws it to a .png, .svg or .pdf, and `beside`, a measured one say, below it on the same time axis. Stages
        are drawn under one another.

        Raises ValueError for another suffix and for a timeline without ops, ModuleNotFoundError without matplotlib.
        """
        paint.save(self._with("save", beside), path)

    def perfetto(self, path: str | Path, *, beside: "Timeline | None" = None) -> None:
        """Writes it as trace events in JSON, which https://ui.perfetto.dev opens: a process for each stage, and those
        of `beside`."""
        perfetto.save(self._with("perfetto", beside), path)

    def _with(self, what: str, beside: "Timeline | None") -> "list[Timeline]":
        both = [self] if beside is None else [self, beside]
        are_timelines(f"{what}(beside=)", *both)
        return both

    def to_json(self) -> str:
        """The whole timeline as JSON, with its trace and ops: kept with a run, and drawn later. Of one stage.

        Spans are `[number, stream, start, end, cause]`, and what is inside, beside their ops. Raises ValueError for a
        simulated peer's: its copies are no ops of a program.
        """
        of_one_stage("to_json", self)
        ops = tuple(span.op for span in self.spans)
        if foreign := [op for op in ops if not isinstance(op, OPS)]:
            raise ValueError(f"{self.title!r} holds {foreign[0]!r}, which is no op of a program: it cannot be kept")
        spans = [[span.number, *span[2:6], *([span.inside] if span.inside else [])] for span in self.spans]
        about = {"title": self.title, "seconds": self.seconds, "overhead": self.overhead}
        return json.dumps({**about, "program": as_data(self.trace, (ops,)), "spans": spans})

    @staticmethod
    def from_json(text: str) -> "Timeline":
        """The timeline that `to_json` wrote. Raises ValueError where `text` is not one, with what is wrong."""
        try:
            data = strict_json.loads(text)
            if not isinstance(data, dict) or data.keys() != KEYS:
                raise ValueError(f"expected an object of {', '.join(sorted(KEYS))}")
            trace, stages = checked(data["program"])
            ops = Program(trace, *stages).ops
            check_form(Program(trace, ops))
            title = typed_at("title", str, data["title"])
            seconds, overhead = (_time(data[name], name) for name in ("seconds", "overhead"))
            if not isinstance(data["spans"], list) or len(data["spans"]) != len(ops):
                raise ValueError(f"spans: expected a list of {len(ops)}, as many as ops")
            spans: list[Span] = []
            known: set[int] = set()
            for at, (op, item) in enumerate(zip(ops, data["spans"], strict=True)):
                spans.append(_span(f"spans[{at}]", op, item, known, seconds))
                known.add(spans[-1].number)
            found = Timeline(trace, tuple(spans), seconds, title, overhead)
            of_one_stage("from_json", found)
            return found
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a timeline in JSON: {error}") from error
