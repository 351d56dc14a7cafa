"""Timelines: the spans of a step's ops, with what shows and keeps them."""

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from yafsdp_fn.program.json import as_data, checked
from yafsdp_fn.program.ops import OPS, Op, name_of
from yafsdp_fn.program.program import Program
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.timeline import paint, perfetto, text
from yafsdp_fn.timeline.spans import Inside, Seconds, Span, Spans, of_one_stage
from yafsdp_fn.util import strict_json
from yafsdp_fn.util.schema import typed_at

# ---- What a timeline in JSON consists of: it was measured on one machine, kept, and is shown on another.


class Ran(NamedTuple):
    """An op, as `Span`, whose op is in the program."""

    number: int
    stream: str
    start: Seconds
    end: Seconds
    cause: int | None
    inside: tuple[Inside, ...] = ()


class Kept(NamedTuple):
    title: str
    seconds: Seconds
    overhead: Seconds
    spans: tuple[Ran, ...]
    program: dict[str, Any]


def _spans(kept: Kept, ops: Sequence[Op]) -> Iterator[Span]:
    if len(kept.spans) != len(ops):
        raise ValueError(f"spans: expected a list of {len(ops)}, as many as ops")
    known: set[int | None] = {None}
    for at, (op, ran) in enumerate(zip(ops, kept.spans, strict=True)):
        where = f"spans[{at}]"
        if ran.number in known:
            raise ValueError(f"{where}: expected an op's number that is not there yet, got {ran.number}")
        if ran.stream not in (op.stream, "compute"):  # on one rank a reduction is a copy, on compute's stream
            raise ValueError(f"{where}: {name_of(op)} runs on {op.stream}, got {ran.stream!r:.40}")
        if ran.cause not in known:
            raise ValueError(f"{where}: its cause is no earlier op: {ran.cause}")
        _check_inside(where, (0.0, kept.seconds), ran)
        for part in ran.inside:
            _check_inside(f"{where}, inside", (ran.start, ran.end), part)
        known.add(ran.number)
        yield Span(ran.number, op, *ran[1:5], inside=ran.inside)


def _check_inside(where: str, times: tuple[float, float], what: Ran | Inside) -> None:
    start, end = times
    if not start <= what.start <= what.end <= end:
        raise ValueError(f"{where}: it lasts from {what.start} to {what.end} s, in what lasts from {start} to {end} s")


def _check_form(program: Program) -> None:
    """Raises ValueError where ops name what is not there. What ran is no whole program, and may break other rules."""
    try:
        verify(program)
    except Refused as refused:
        if refused.rule == "form":
            raise


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

    def __repr__(self) -> str:
        return f"Timeline({self.title!r}: {text.shown(self.seconds, 4)}, {len(self.spans)} ops)"

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
        if beside is None:
            return [self]
        if not isinstance(beside, Timeline):
            raise TypeError(f"{what}(beside=): expected a Timeline, got {type(beside).__name__}")
        return [self, beside]

    def to_json(self) -> str:
        """Returns the whole timeline as JSON, with its trace and ops: kept with a run, and drawn later. Of one stage.

        Spans are `[number, stream, start, end, cause]`, and what is inside, beside their ops. Raises ValueError for a
        simulated peer's: its copies are no ops of a program.
        """
        of_one_stage("to_json", self)
        ops = tuple(span.op for span in self.spans)
        if foreign := [op for op in ops if not isinstance(op, OPS)]:
            raise ValueError(f"{self.title!r} holds {foreign[0]!r}, which is no op of a program: it cannot be kept")
        spans = tuple(Ran(span.number, *span[2:6], span.inside) for span in self.spans)
        kept = Kept(self.title, self.seconds, self.overhead, spans, as_data(self.trace, (ops,)))
        return json.dumps(kept._asdict())

    @staticmethod
    def from_json(text: str) -> "Timeline":
        """Returns the timeline that `to_json` wrote. Raises ValueError where `text` is not one, with what is wrong."""
        try:
            kept: Kept = typed_at("timeline", Kept, strict_json.loads(text))
            trace, stages = checked(kept.program)
            program = Program(trace, *stages)
            _check_form(program)
            spans = tuple(_spans(kept, program.ops))
            found = Timeline(trace, spans, kept.seconds, kept.title, kept.overhead)
            of_one_stage("from_json", found)
            return found
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a timeline in JSON: {error}") from error
