"""A picture of a pipeline: its stages under one another on one time axis; of several timelines, one below the other.

stage          what compute does, in boxes of one call each: forward, backward, or halves of a backward; light to
               dark over the segments of the stage; numbers are microbatches. Without stages a row alone
below it       thin rows of gathers, of reductions, and of messages between stages
tinted         idle time of compute, by what it waited for
outlined       the critical path, from stage to stage
"""

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from yafsdp_fn.program.ops import Backward, Forward, kind_of
from yafsdp_fn.timeline import paint
from yafsdp_fn.timeline.geometry import IDLE, INSIDE, INSIDE_PART, OTHERWISE, PLAIN, Colour, oklch
from yafsdp_fn.timeline.paint import INK, NARROW, OUTLINE, SOFT, TEXT, WIDE, Panel, Sample, box, ramp, wide
from yafsdp_fn.timeline.spans import Span, Spans
from yafsdp_fn.timeline.text import idle, shown

HUES = {"forward": 255.0, "backward": 150.0, "inputs": 190.0, "weights": 80.0}
WORDS = {"forward": "forward", "backward": "backward", "inputs": "gradients of inputs", "weights": "of weights"}
ROWS = {"gather": ("gather",), "reduce": ("reduce", "replicate"), "message": ("send", "receive")}
THIN = {"gather": "#b9a7d6", "reduce": "#d9b98a", "message": "#6b7280"}
TINTS = IDLE | {"receive": "#ecebe4", "fill": "#f4f4f2", "drain": "#f4f4f2"}
IDLES = {"idle: receive": {"receive"}, "idle: gather": {"gather"}, "idle: reduction": {"reduce", "all-reduce"}}
HEADER, RIGHT, TALL, ROW, GAP = 0.5, 0.55, 0.27, 0.05, 0.1
PER_CALL = 0.17  # wanted width of a call of the fullest stage
MOST = 16  # stages of full height


class Call(NamedTuple):
    """A stretch of compute without a break, in one call. segment: its number among those of the stage; None: no call"""

    start: float
    end: float
    kind: str
    microbatch: int
    segment: int | None


def save(timelines: Sequence[Spans], path: str | Path | io.BytesIO, words: Sequence[str] = ()) -> None:
    """Draws `timelines` to a file, under one another, and lines of text below. Raises ValueError for one without ops,
    or another suffix."""
    paint.write(lambda: _figure(timelines, words), path, timelines)


def _figure(timelines: Sequence[Spans], words: Sequence[str]) -> Any:
    rows = [_Rows(each, sum(one.stage_count for one in timelines)) for each in timelines]
    across = paint.across(max(len(row) for each in rows for row in each.calls) * PER_CALL, RIGHT)
    heights = [each.high for each in rows]
    figure, axes = paint.sheet(across, RIGHT, HEADER, heights, _samples(rows), words)
    for each, on in zip(rows, axes, strict=True):
        panel = Panel(on, max(one.seconds for one in timelines), across)
        each.draw(panel, last=on is axes[-1])
    return figure


def calls(timeline: Spans, stage: int) -> list[Call]:
    """The calls that compute does on `stage`, in order."""
    split, own, home = timeline.trace.split, timeline.parts[stage], timeline.trace.stage
    segments = () if split is None else split.of(stage if home is None else home)

    def of(span: Span) -> tuple[Any, ...]:
        if not isinstance(span.op, Forward | Backward):
            return ("update", 0, None)
        segment = 0 if split is None else segments.index(split.segment(span.op.visit))
        return kind_of(span.op), span.op.microbatch, segment

    found = []
    for what, run in itertools.groupby(own.on("compute"), of):
        for spans in _unbroken(run):
            found.append(Call(spans[0].start, spans[-1].end, *what))
    return found


def _unbroken(spans: Iterator[Span]) -> Iterator[list[Span]]:
    out: list[Span] = []
    for span in spans:
        if out and span.start > out[-1].end:
            yield out
            out = []
        out.append(span)
    yield out


class _Rows:
    """The rows of one timeline, on a sheet of `among` in all."""

    def __init__(self, timeline: Spans, among: int) -> None:
        self.timeline = timeline
        self.calls = [calls(timeline, stage) for stage in range(timeline.stage_count)]
        used = {span.stream for span in timeline.spans if span.seconds}
        self.rows = {name: streams for name, streams in ROWS.items() if used & set(streams)}
        squeezed = min(1.0, MOST / among)
        self.tall = TALL * squeezed
        self.pitch = self.tall + ROW * len(self.rows) + GAP * squeezed
        self.high = self.pitch * timeline.stage_count
        split = timeline.trace.split
        self.most_segments = 1 if split is None else max(map(split.homes.count, split.homes))

    def draw(self, panel: Panel, *, last: bool) -> None:
        timeline = self.timeline
        several, where = timeline.stage_count > 1, ", over all stages" * (timeline.stage_count > 1)
        lost = f"{'bubble' if several else 'compute idle'} {timeline.bubble:.1%}"
        panel.frame(
            self.high, timeline.title, f"step {shown(timeline.seconds)}, {lost}{where}: {idle(timeline)}", last=last
        )
        for stage in range(timeline.stage_count):
            self._stage(panel, stage, stage * self.pitch)
        path = (span for span in timeline.critical_path() if span.stream == "compute")
        panel.outline(path, lambda span: (span.stage * self.pitch, self.tall))

    def _stage(self, panel: Panel, stage: int, top: float) -> None:
        timeline, tall = self.timeline, self.tall
        own, middle = timeline.parts[stage], top + tall / 2
        busy, style = f"{own.compute_s / (timeline.seconds or 1.0):.0%}", dict[str, Any](va="center", fontsize=TEXT)
        name = f"stage {stage}" if timeline.stage_count > 1 else "compute"
        panel.beside(name, middle, (-5, 0), ha="right", color=INK, **style)
        panel.beside(busy, middle, (5, 0), x=1, ha="left", color=SOFT, **style)
        gaps = [gap for gap in timeline.idle_of(stage) if gap.why != "overhead"]
        panel.boxes(top, tall, [(g.start, g.end, TINTS.get(g.why, OTHERWISE)) for g in gaps], edge=0.0)
        panel.boxes(top, tall, [(c.start, c.end, self._colour(c)) for c in self.calls[stage]])
        inside, low = [(each.start, each.end, INSIDE) for each in own.inside], INSIDE_PART * tall
        panel.boxes(top + tall - low, low, inside, edge=0.0)
        if 72 * tall > TEXT and timeline.trace.microbatches > 1:
            for call in self.calls[stage]:
                room = panel.inches(call.end - call.start) - 0.02
                if call.segment is not None and wide(str(call.microbatch), TEXT) <= room:
                    panel.label(str(call.microbatch), call.start, call.end, middle)
        for number, (name, streams) in enumerate(self.rows.items()):
            spans = [span for stream in streams for span in own.on(stream) if span.seconds]
            at = top + tall + ROW * number + 0.01
            panel.boxes(at, ROW - 0.01, [(s.start, s.end, THIN[name]) for s in spans], edge=0.0)

    def _colour(self, call: Call) -> Colour:
        return PLAIN if call.segment is None else shade(call.kind, call.segment, self.most_segments)


def _samples(rows: Sequence[_Rows]) -> list[Sample]:
    """Returns what is to be explained: words with their swatches."""
    kinds = {call.kind for each in rows for row in each.calls for call in row}
    count = max(each.most_segments for each in rows)
    found: list[Sample] = []
    for kind in [kind for kind in HUES if kind in kinds]:
        over = f", {count} segments" * (count > 1 and not found)
        colours = [shade(kind, number, count) for number in range(count)]
        found.append((WORDS[kind] + over, WIDE if count > 1 else NARROW, ramp(colours)))
    if "update" in kinds:
        found.append(("norm, update", NARROW, box(facecolor=PLAIN)))
    waits = {gap.why for each in rows for stage in range(len(each.calls)) for gap in each.timeline.idle_of(stage)}
    for words, whys in IDLES.items():
        if waits & whys:
            found.append((words, NARROW, box(facecolor=TINTS[min(whys)])))
    if any(each.timeline.inside for each in rows):
        found.append(("collectives in a block", NARROW, box(facecolor=INSIDE)))
    for name in [name for name in ROWS if any(name in each.rows for each in rows)]:
        found.append((f"{name}s" if name != "reduce" else "reductions", NARROW, box(facecolor=THIN[name])))
    found.append(("critical path", NARROW, box(**OUTLINE)))
    return found


def shade(kind: str, segment: int, count: int) -> Colour:
    """The colour of a call: a hue for each kind, darker from the first segment of a stage to the last."""
    return oklch(0.86 - 0.2 * segment / max(1, count - 1) if count > 1 else 0.8, 0.09, HUES[kind])
