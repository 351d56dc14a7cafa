"""A picture of a pipeline: its stages under one another on one time axis.

stage          what compute does, in boxes of one call each: forward, backward, or halves of a backward; light to
               dark over the segments of the stage; numbers are microbatches
below it       thin rows of gathers, of reductions, and of messages between stages
tinted         idle time of compute, by what it waited for
outlined       the critical path, from stage to stage
"""

import io
import itertools
from collections.abc import Iterator
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


def save(timeline: Spans, path: str | Path | io.BytesIO) -> None:
    """Draws `timeline` to a file. Raises ValueError for what has no ops, or another suffix."""
    paint.write(lambda: _Picture(timeline).figure, path, [timeline])


def calls(timeline: Spans, stage: int) -> list[Call]:
    """The calls that compute does on `stage`, in order."""
    split, own = timeline.trace.split, timeline.parts[stage]
    assert split is not None
    numbers = {segment: number for number, segment in enumerate(split.of(stage))}

    def of(span: Span) -> tuple[Any, ...]:
        if not isinstance(span.op, Forward | Backward):
            return ("update", 0, None)
        return kind_of(span.op), span.op.microbatch, numbers[split.segment(span.op.visit)]

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


class _Picture(Panel):
    def __init__(self, timeline: Spans) -> None:
        self.timeline = timeline
        self.calls = [calls(timeline, stage) for stage in range(timeline.stage_count)]
        used = {span.stream for span in timeline.spans if span.seconds}
        self.rows = {name: streams for name, streams in ROWS.items() if used & set(streams)}
        self.tall = TALL * min(1.0, MOST / timeline.stage_count)
        self.pitch = self.tall + ROW * len(self.rows) + GAP * min(1.0, MOST / timeline.stage_count)
        across, high = paint.across(max(map(len, self.calls)) * PER_CALL, RIGHT), self.pitch * timeline.stage_count
        self.figure, (axes,) = paint.sheet(across, RIGHT, HEADER, [high], self._samples())
        super().__init__(axes, timeline.seconds, across)
        text = f"step {shown(timeline.seconds)}, bubble {timeline.bubble:.1%}; idle, over all stages: {idle(timeline)}"
        self.frame(high, timeline.title, text)
        for stage in range(timeline.stage_count):
            self._stage(stage, stage * self.pitch)
        path = (span for span in timeline.critical_path() if span.stream == "compute")
        self.outline(path, lambda span: (span.stage * self.pitch, self.tall))

    def _stage(self, stage: int, top: float) -> None:
        own, middle = self.timeline.parts[stage], top + self.tall / 2
        busy, style = f"{own.compute_s / self.seconds:.0%}", dict[str, Any](va="center", fontsize=TEXT)
        self.beside(f"stage {stage}", middle, (-5, 0), ha="right", color=INK, **style)
        self.beside(busy, middle, (5, 0), x=1, ha="left", color=SOFT, **style)
        gaps = [gap for gap in self.timeline.idle_of(stage) if gap.why != "overhead"]
        self.boxes(top, self.tall, [(g.start, g.end, TINTS.get(g.why, OTHERWISE)) for g in gaps], edge=0.0)
        self.boxes(top, self.tall, [(c.start, c.end, self._colour(c)) for c in self.calls[stage]])
        inside, low = [(each.start, each.end, INSIDE) for each in own.inside], INSIDE_PART * self.tall
        self.boxes(top + self.tall - low, low, inside, edge=0.0)
        if 72 * self.tall > TEXT:
            for call in self.calls[stage]:
                room = self.inches(call.end - call.start) - 0.02
                if call.segment is not None and wide(str(call.microbatch), TEXT) <= room:
                    self.label(str(call.microbatch), call.start, call.end, middle)
        for number, (name, streams) in enumerate(self.rows.items()):
            spans = [span for stream in streams for span in own.on(stream) if span.seconds]
            at = top + self.tall + ROW * number + 0.01
            self.boxes(at, ROW - 0.01, [(s.start, s.end, THIN[name]) for s in spans], edge=0.0)

    def _colour(self, call: Call) -> Colour:
        return PLAIN if call.segment is None else shade(call.kind, call.segment, self._most_segments())

    def _most_segments(self) -> int:
        assert self.timeline.trace.split is not None
        homes = self.timeline.trace.split.homes
        return max(map(homes.count, homes))

    def _samples(self) -> list[Sample]:
        kinds = {call.kind for row in self.calls for call in row}
        count = self._most_segments()
        found: list[Sample] = []
        for kind in [kind for kind in HUES if kind in kinds]:
            over = f", {count} segments" * (count > 1 and not found)
            colours = [shade(kind, number, count) for number in range(count)]
            found.append((WORDS[kind] + over, WIDE if count > 1 else NARROW, ramp(colours)))
        if "update" in kinds:
            found.append(("norm, update", NARROW, box(facecolor=PLAIN)))
        waits = {gap.why for stage in range(len(self.calls)) for gap in self.timeline.idle_of(stage)}
        for words, whys in IDLES.items():
            if waits & whys:
                found.append((words, NARROW, box(facecolor=TINTS[min(whys)])))
        if self.timeline.inside:
            found.append(("collectives in a block", NARROW, box(facecolor=INSIDE)))
        for name in self.rows:
            found.append((f"{name}s" if name != "reduce" else "reductions", NARROW, box(facecolor=THIN[name])))
        found.append(("critical path", NARROW, box(**OUTLINE)))
        return found


def shade(kind: str, segment: int, count: int) -> Colour:
    """The colour of a call: a hue for each kind, darker from the first segment of a stage to the last."""
    return oklch(0.86 - 0.2 * segment / max(1, count - 1) if count > 1 else 0.8, 0.09, HUES[kind])
