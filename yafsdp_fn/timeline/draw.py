"""A picture of a timeline: streams as lanes, slots below them; two timelines one above the other on one time axis.

lanes          gather, compute, reduce, replicate, offload, where used; a row per weight slot and gradient slot
strips         above compute: which microbatch and which stack it is at, where there are several
colour         the layer, from the first to the last; light: forward and weights, dark: backward and gradients
hatched        a backward that recomputes its forward
at the foot    of a compute: the collectives in its block, over axes inside blocks
tinted         idle time of compute, by what it waited for
outlined       the critical path
"""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from yafsdp_fn.timeline import paint
from yafsdp_fn.timeline.geometry import IDLE, INSIDE, INSIDE_PART, OTHERWISE, PLAIN, Bar, Lane, Layout
from yafsdp_fn.timeline.paint import (
    CLEAR,
    FLOOR,
    HATCH,
    INK,
    NARROW,
    OUTLINE,
    SMALL,
    TEXT,
    WIDE,
    Panel,
    Sample,
    box,
    ramp,
    wide,
)
from yafsdp_fn.timeline.spans import Held, Spans
from yafsdp_fn.timeline.text import because, reasons, shown

PER_SPAN = 0.085  # wanted width of an op of the fullest lane
RIGHT, HEADER = 0.15, 0.42
WAITS = "#7a4a45"
GROUND = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.6}
REASONS = {
    IDLE["gather"]: "idle: waits for a gather (its layer in italics)",
    IDLE["reduce"]: "idle: waits for a reduction",
    IDLE["fetch"]: "idle: waits for a copy to the host, or from it",
    OTHERWISE: "idle otherwise",
}


def save(timeline: Spans, path: str | Path | io.BytesIO, beside: Spans | None = None) -> None:
    """Draws `timeline`, and `beside` below it, to a file. Raises ValueError for what has no ops, or another suffix."""
    both = [timeline] if beside is None else [timeline, beside]
    paint.write(lambda: _figure(both), path, both)


def _figure(timelines: list[Spans]) -> Any:
    fullest = max(len(each.on(stream)) for each in timelines for stream in each.streams)
    across = paint.across(fullest * PER_SPAN, RIGHT)
    layouts = [Layout(each, across, max(t.seconds for t in timelines)) for each in timelines]
    figure, axes = paint.sheet(across, RIGHT, HEADER, [each.height for each in layouts], samples(layouts))
    for each, of_layout in zip(layouts, axes, strict=True):
        Painter(each, of_layout).draw(last=each is layouts[-1])
    return figure


def samples(layouts: Sequence[Layout]) -> list[Sample]:
    """Returns what is to be explained: words with their swatches."""
    palette = layouts[0].palette
    found: list[Sample] = []
    for name, units in palette.stacks.items():
        which = f"{units[0].layer} to {units[-1].layer}" + f" of {name}" * (len(palette.stacks) > 1)
        light = [palette.of(unit.id, dark=False) for unit in units]
        found.append(("forward and weights, layers " * (not found) + which, WIDE, ramp(light)))
    if found:
        every = [palette.of(unit.id, dark=True) for units in palette.stacks.values() for unit in units]
        found.append(("backward and gradients", WIDE, ramp(every)))
    for unit in palette.others[:4]:
        found.append((unit.name, NARROW, ramp([palette.of(unit.id, dark) for dark in (False, True)])))
    if any(each.recomputing for each in layouts):
        found.append(("recomputes its forward first", NARROW, box(facecolor=palette.middle(True), **HATCH)))
    if any(each.timeline.inside for each in layouts):
        found.append(("collectives in a block", NARROW, box(facecolor=INSIDE)))
    if plain := {type(span.op).__name__.lower() for each in layouts for span in each.plain()}:
        found.append((", ".join(sorted(plain)), NARROW, box(facecolor=PLAIN)))
    idle = {bar.colour for each in layouts for bar in each.idle()}
    found += [(words, NARROW, box(facecolor=colour)) for colour, words in REASONS.items() if colour in idle]
    if any(each.rows for each in layouts):
        found.append(("slot being filled", NARROW, box(facecolor=[0.5 + 0.5 * c for c in palette.middle(False)])))
    return [*found, ("critical path", NARROW, box(**OUTLINE))]


# ---- Which boxes of a lane are labelled: all that have room, else every k-th layer.


class Label(NamedTuple):
    """`text` in the middle of `bar`, `half` inches to either side. ground: it needs one of its own to be legible"""

    bar: Bar
    text: str
    middle: float
    half: float
    ground: bool = False


class _Rule(NamedTuple):
    """The rule that numbers the boxes of layers in a lane.

    every: k, for each k-th of the layers that the lane has, across its neighbours; 0 for those that have room
    places: layer -> how many layers of the lane come before it
    widest: number, in inches; busy: there are gaps between the boxes, or hatching, behind what crosses neighbours
    """

    every: int = 0
    places: Mapping[int, int] = {}
    widest: float = 0.0
    busy: bool = False


def labels(layout: Layout, bars: Sequence[Bar], size: float, among: Sequence[Label] = ()) -> list[Label]:
    """The labels of a lane, in order, clear of each other.

    bars: of one lane, in order; size: of the text, in points; among: others there
    """
    of_layers = [bar for bar in bars if bar.number is not None]
    rules = [_rule(layout, [bar for bar in of_layers if bar.dark == dark], size) for dark in (False, True)]
    ends, starts = [0.0, *(bar.end for bar in bars)], [*(bar.start for bar in bars[1:]), layout.seconds]
    found: list[Label] = []

    def is_clear(label: Label) -> bool:
        near = any(abs(label.middle - o.middle) < label.half + o.half + CLEAR for o in (*among, *found[-1:]))
        return not near and label.half <= label.middle <= layout.across - label.half

    for bar, before, after in zip(bars, ends, starts, strict=False):
        room, middle = layout.inches(bar.end - bar.start) - CLEAR, layout.inches(bar.start + bar.end) / 2
        every, places, widest, busy = rules[bar.dark]
        if bar.number is None:
            texts = [text for text in (bar.text, bar.short) if text and wide(text, size) <= room]
        else:
            around = 2 * min(middle - layout.inches(before), layout.inches(after) - middle) - CLEAR
            shows = places[bar.number] % every == 0 if every else widest <= max(room, around)
            texts = [bar.text] * shows
        some = (Label(bar, text, middle, wide(text, size) / 2) for text in texts)
        if label := next(filter(is_clear, some), None):
            crosses = bar.number is not None and (every > 1 or 2 * label.half > room)
            found.append(label._replace(ground=bar.hatched or (busy and crosses)))
    return found


def _rule(layout: Layout, bars: Sequence[Bar], size: float) -> _Rule:
    if not bars:
        return _Rule()
    places = {number: k for k, number in enumerate(sorted({bar.number for bar in bars if bar.number is not None}))}
    widest = max(wide(bar.text, size) for bar in bars)
    lengths = sorted(layout.inches(bar.end - bar.start) for bar in bars)
    pitches = sorted(layout.inches(b.start - a.start) for a, b in itertools.pairwise(bars)) or lengths
    gaps = sum(lengths) < 0.9 * layout.inches(bars[-1].end - bars[0].start)
    busy = gaps or any(bar.hatched for bar in bars)
    fits = widest + CLEAR <= lengths[len(lengths) // 2]
    pitch = pitches[len(pitches) // 4]  # forward is denser than backward
    every = 0 if fits else next((k for k in (1, 2, 5, 10, 20, 50) if k * pitch >= widest + 0.1), 100)
    return _Rule(every, places, widest, busy)


# ---- Draws a layout on matplotlib's axes, which are as large as the layout, in inches.


class Painter(Panel):
    """Draws one layout on its axes."""

    def __init__(self, layout: Layout, axes: Any) -> None:
        super().__init__(axes, layout.seconds, layout.across)
        self.layout = layout

    def draw(self, last: bool) -> None:
        """Draws the layout, with title, step time, and why compute was idle. last: of the sheet"""
        layout, timeline = self.layout, self.layout.timeline
        busy = f"compute busy {timeline.compute_s / (timeline.seconds or 1.0):.0%}"
        why = [f"{shown(seconds)} {because(name)}" for name, seconds in reasons(timeline).most_common(3)]
        text = f"step {shown(timeline.seconds)}, {busy}" + (f"; idle {', '.join(why)}" if why else "")
        self.frame(layout.height, timeline.title, text, last=last)
        for lane in (*layout.lanes.values(), *layout.named):
            self._name(lane, TEXT + 1 if lane.name in layout.lanes else SMALL + 0.5)
        for lane, bars in layout.strips:
            self._name(lane, SMALL + 0.5)
            self._bars(lane, bars)
            self._labels(lane, labels(layout, bars, SMALL), SMALL)
        for stream, lane in layout.lanes.items():
            gaps = layout.idle() if stream == "compute" else []
            bars = [bar for bar in layout.bars(stream) if bar.end > bar.start]
            found = labels(layout, bars, TEXT)
            self._bars(lane, gaps)
            self._bars(lane, bars)
            if stream == "compute":
                low = INSIDE_PART * lane.height
                self._bars(Lane("", lane.top + lane.height - low, low), layout.inside(), edge=0.0)
            self._labels(lane, found, TEXT)
            self._labels(lane, labels(layout, gaps, TEXT, found), TEXT, color=WAITS, style="italic")
        for rows, held, dark in layout.rows:
            for slot, lane in rows.items():
                self._slot(lane, [each for each in held if each.slot == slot], dark)
        at = {stream: (lane.top, lane.height) for stream, lane in layout.lanes.items()}
        self.outline(timeline.critical_path(), lambda span: at[span.stream])

    def _name(self, lane: Lane, size: float) -> None:
        """The lane's ground, as long as the step, and its name beside it."""
        whole = [(0, self.x(self.layout.timeline.seconds))]
        self.axes.broken_barh(whole, (lane.top, lane.height), color=FLOOR, zorder=0.5)
        self.beside(lane.name, lane.top + lane.height / 2, (-5, 0), ha="right", va="center", fontsize=size, color=INK)

    def _bars(self, lane: Lane, bars: Sequence[Bar], **style: Any) -> None:
        for hatched in (False, True):
            some = [(bar.start, bar.end, bar.colour) for bar in bars if bar.hatched == hatched and bar.end > bar.start]
            self.boxes(lane.top, lane.height, some, **style, **HATCH if hatched else {})

    def _labels(self, lane: Lane, found: Sequence[Label], size: float, **options: Any) -> None:
        for label in found:
            style = {"bbox": GROUND if label.ground else None, "fontsize": size} | options
            self.label(label.text, label.bar.start, label.bar.end, lane.top + lane.height / 2, **style)

    def _slot(self, lane: Lane, held: Sequence[Held], dark: bool) -> None:
        layout = self.layout
        bars = [Bar(h.start, h.end, layout.palette.of(h.unit, dark), *layout.label(h.unit)) for h in held]
        self._bars(lane, bars)
        self._bars(lane, [Bar(h.start, h.ready, "white") for h in held if h.ready > h.start], alpha=0.55)
        if 72 * lane.height > SMALL + 1:
            self._labels(lane, labels(layout, bars, SMALL), SMALL)
