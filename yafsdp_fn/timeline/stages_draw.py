"""A picture of a pipeline: its stages under one another on one time axis.

    stage          what compute does, in boxes of one call each: forward, backward, or halves of a backward; light to
                   dark over the segments of the stage; numbers are microbatches
    below it       thin rows of gathers, of reductions, and of messages between stages
    tinted         idle time of compute, by what it waited for
    outlined       the critical path, from stage to stage

Lengths are inches until they are drawn. Needs matplotlib, which is imported when something is drawn.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from yafsdp_fn.program.ops import Backward, Forward, kind_of
from yafsdp_fn.timeline import draw, paint
from yafsdp_fn.timeline.draw import AXIS, LEFT, MARGIN, NARROW, WIDE
from yafsdp_fn.timeline.geometry import IDLE, OTHERWISE, PLAIN, Colour, oklch
from yafsdp_fn.timeline.paint import GRID, INK, LARGE, OUTLINE, SOFT, TEXT, wide
from yafsdp_fn.timeline.spans import Span, Spans
from yafsdp_fn.timeline.text import bubble, idle, shown, stage_gaps, unit_of

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


def save(timeline: Spans, path: str | Path) -> None:
    """Draws `timeline` to a file. Raises ValueError for what has no ops, or another suffix."""
    draw.check_suffix(path := Path(path))
    if not timeline.spans:
        raise ValueError(f"the timeline {timeline.title!r} has no ops to draw")
    draw.write(lambda: _Picture(timeline).figure, path)


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


class _Picture:
    def __init__(self, timeline: Spans) -> None:
        from matplotlib.figure import Figure

        self.timeline = timeline
        self.calls = [calls(timeline, stage) for stage in range(timeline.stage_count)]
        used = {span.stream for span in timeline.spans if span.seconds}
        self.rows = {name: streams for name, streams in ROWS.items() if used & set(streams)}
        self.tall = TALL * min(1.0, MOST / timeline.stage_count)
        self.pitch = self.tall + ROW * len(self.rows) + GAP * min(1.0, MOST / timeline.stage_count)
        width = min(WIDE, max(NARROW, max(map(len, self.calls)) * PER_CALL + LEFT + RIGHT))
        self.across = width - LEFT - RIGHT
        self.scale, self.unit = unit_of(timeline.seconds)
        high = self.pitch * timeline.stage_count
        entries = paint.in_rows(self._swatches(), width - 2 * MARGIN)
        below = AXIS + entries[-1].row * paint.ROW + 0.3
        height = MARGIN + HEADER + high + below
        self.figure: Any = Figure(figsize=(width, height), facecolor="white")
        self.axes = self.figure.add_axes((LEFT / width, below / height, self.across / width, high / height))
        self._frame(high)
        for stage in range(timeline.stage_count):
            self._stage(stage, stage * self.pitch)
        self._path()
        floor = self.figure.add_axes((MARGIN / width, 0, 1 - 2 * MARGIN / width, (below - AXIS) / height))
        paint.draw(floor, entries, width - 2 * MARGIN, below - AXIS)

    def _x(self, seconds: float) -> float:
        return seconds / self.scale

    def _inches(self, seconds: float) -> float:
        return seconds / (self.timeline.seconds or 1.0) * self.across

    def _frame(self, high: float) -> None:
        axes, timeline = self.axes, self.timeline
        axes.set(xlim=(0, self._x(timeline.seconds)), ylim=(high, 0), yticks=[])
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(SOFT)
        axes.tick_params(axis="x", colors=SOFT, labelsize=TEXT, length=3)
        axes.grid(axis="x", color=GRID, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_xlabel(f"time since the step began, {self.unit}", fontsize=TEXT + 0.5, color=INK)
        left = -72 * (LEFT - MARGIN)
        above: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False}
        size = LARGE * min(1.0, (self.across + LEFT) / (1.15 * wide(timeline.title, LARGE) or 1.0))  # it is bold
        axes.annotate(timeline.title, (0, 0), (left, 19), fontsize=size, weight="bold", color=INK, **above)
        text = f"step {shown(timeline.seconds)}, bubble {bubble(timeline):.1%}; idle, over all stages: {idle(timeline)}"
        axes.annotate(text, (0, 0), (left, 8), fontsize=TEXT + 0.5, color=SOFT, **above)

    def _beside(self, text: str, right: bool, y: float, colour: str) -> None:
        x, shift, side = (1.0, 5, "left") if right else (0.0, -5, "right")
        style: dict[str, Any] = {
            "textcoords": "offset points",
            "annotation_clip": False,
            "va": "center",
            "fontsize": TEXT,
        }
        at = self.axes.get_yaxis_transform()
        self.axes.annotate(text, (x, y), (shift, 0), xycoords=at, ha=side, color=colour, **style)

    def _stage(self, stage: int, top: float) -> None:
        own, middle = self.timeline.parts[stage], top + self.tall / 2
        self._beside(f"stage {stage}", False, middle, INK)
        self._beside(f"{own.compute_s / (self.timeline.seconds or 1.0):.0%}", True, middle, SOFT)
        gaps = [gap for gap in stage_gaps(self.timeline, stage) if gap.why != "overhead"]
        self._boxes(top, self.tall, [(g.start, g.end, TINTS.get(g.why, OTHERWISE)) for g in gaps], edge=0.0)
        self._boxes(top, self.tall, [(c.start, c.end, self._colour(c)) for c in self.calls[stage]])
        if 72 * self.tall > TEXT:
            for call in self.calls[stage]:
                self._label(call, middle)
        for number, (name, streams) in enumerate(self.rows.items()):
            spans = [span for stream in streams for span in own.on(stream) if span.seconds]
            at = top + self.tall + ROW * number + 0.01
            self._boxes(at, ROW - 0.01, [(s.start, s.end, THIN[name]) for s in spans], edge=0.0)

    def _boxes(self, top: float, height: float, boxes: list[tuple[float, float, Any]], edge: float = 0.5) -> None:
        if not boxes:
            return
        typical = sorted(self._inches(end - start) for start, end, _ in boxes)[len(boxes) // 2]
        self.axes.broken_barh(
            [(self._x(start), self._x(end - start)) for start, end, _ in boxes],
            (top, height),
            facecolor=[colour for *_, colour in boxes],
            edgecolor="white",
            linewidth=min(edge, 3 * typical),
            zorder=2,
        )

    def _label(self, call: Call, y: float) -> None:
        text, room = str(call.microbatch), self._inches(call.end - call.start) - 0.02
        if call.segment is not None and wide(text, TEXT) <= room:
            style: dict[str, Any] = {
                "ha": "center",
                "va": "center_baseline",
                "fontsize": TEXT,
                "color": INK,
                "zorder": 6,
            }
            self.axes.text(self._x((call.start + call.end) / 2), y, text, **style)

    def _colour(self, call: Call) -> Colour:
        return PLAIN if call.segment is None else shade(call.kind, call.segment, self._most_segments())

    def _most_segments(self) -> int:
        assert self.timeline.trace.split is not None
        homes = self.timeline.trace.split.homes
        return max(map(homes.count, homes))

    def _swatches(self) -> list[tuple[str, float, paint.Swatch]]:
        kinds = {call.kind for row in self.calls for call in row}
        count = self._most_segments()
        found: list[tuple[str, float, paint.Swatch]] = []
        for kind in [kind for kind in HUES if kind in kinds]:
            over = f", {count} segments" * (count > 1 and not found)
            colours = [shade(kind, number, count) for number in range(count)]
            found.append((WORDS[kind] + over, paint.WIDE if count > 1 else paint.NARROW, paint.ramp(colours)))
        if "update" in kinds:
            found.append(("norm, update", paint.NARROW, paint.box(facecolor=PLAIN)))
        waits = {gap.why for stage in range(len(self.calls)) for gap in stage_gaps(self.timeline, stage)}
        for words, whys in IDLES.items():
            if waits & whys:
                found.append((words, paint.NARROW, paint.box(facecolor=TINTS[min(whys)])))
        for name in self.rows:
            found.append(
                (f"{name}s" if name != "reduce" else "reductions", paint.NARROW, paint.box(facecolor=THIN[name]))
            )
        found.append(("critical path", paint.NARROW, paint.box(**OUTLINE)))
        return found

    def _path(self) -> None:
        """Outlines as one what follows on the compute of one stage; a line leads from one stage to the next."""
        from matplotlib.patches import Rectangle

        before: tuple[float, int] | None = None
        path = [span for span in self.timeline.critical_path() if span.stream == "compute"]
        for stage, run in itertools.groupby(path, key=lambda span: span.stage):
            spans = list(run)
            start, end, top = self._x(spans[0].start), self._x(spans[-1].end), stage * self.pitch
            self.axes.add_patch(Rectangle((start, top), end - start, self.tall, zorder=5, **OUTLINE))
            if before is not None:
                then, other = before
                down = other < stage
                ends = (other * self.pitch + self.tall * down, top + self.tall * (not down))
                self.axes.plot((then, start), ends, color=INK, linewidth=OUTLINE["linewidth"], zorder=5)
            before = end, stage


def shade(kind: str, segment: int, count: int) -> Colour:
    """The colour of a call: a hue for each kind, darker from the first segment of a stage to the last."""
    return oklch(0.86 - 0.2 * segment / max(1, count - 1) if count > 1 else 0.8, 0.09, HUES[kind])
