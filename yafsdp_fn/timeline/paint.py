"""Draws a layout on matplotlib's axes, with labels where boxes have room."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from yafsdp_fn.timeline.geometry import IDLE, OTHERWISE, PLAIN, Bar, Colour, Lane, Layout
from yafsdp_fn.timeline.spans import Held
from yafsdp_fn.timeline.text import because, reasons, shown, unit_of

# ---- Which boxes of a lane are labelled: all that have room, else every k-th layer.

CLEAR = 0.06  # inches between a label and the next, as wide as a digit: numbers that are nearer read as one


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


@functools.lru_cache(maxsize=4096)
def wide(text: str, size: float) -> float:
    """Width of `text` in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text:
        return 0.0
    return float(TextPath((0, 0), text, size=size, prop=FontProperties(family="DejaVu Sans")).get_extents().width) / 72


# ---- Draws a layout on matplotlib's axes, which are as large as the layout, in inches.

TEXT, SMALL, LARGE = 7.0, 6.0, 9.0  # sizes in points
INK, SOFT, GRID, FLOOR, WAITS = "#1b1f24", "#6b7280", "#d5d8dd", "#f3f4f6", "#7a4a45"
HATCH: dict[str, Any] = {"hatch": "//////", "edgecolor": (0.2, 0.2, 0.25), "linewidth": 0.0}
OUTLINE: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 0.9}
GROUND = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.6}


class Painter:
    """Draws one layout on its axes. before: inches of the figure to the left of them"""

    def __init__(self, layout: Layout, axes: Any, before: float) -> None:
        self.layout, self.axes, self.before = layout, axes, before
        self.scale, self.unit = unit_of(layout.seconds)

    def draw(self, last: bool) -> None:
        """Draws the layout. last: has the numbers of the time axis below it"""
        layout = self.layout
        self._frame(last)
        for lane in (*layout.lanes.values(), *layout.named):
            self._name(lane, TEXT + 1 if lane.name in layout.lanes else SMALL + 0.5)
        for lane, bars in layout.strips:
            self._name(lane, SMALL + 0.5)
            self._boxes(lane, bars)
            self._labels(lane, labels(layout, bars, SMALL), SMALL)
        for stream, lane in layout.lanes.items():
            gaps, bars = layout.idle() if stream == "compute" else [], layout.bars(stream)
            found = labels(layout, bars, TEXT)
            self._boxes(lane, gaps)
            self._boxes(lane, bars)
            self._labels(lane, found, TEXT)
            self._labels(lane, labels(layout, gaps, TEXT, found), TEXT, color=WAITS, style="italic")
        for rows, held, dark in layout.rows:
            for slot, lane in rows.items():
                self._slot(lane, [each for each in held if each.slot == slot], dark)
        self._path()
        self._header()

    def _x(self, seconds: float) -> float:
        return seconds / self.scale

    def _frame(self, last: bool) -> None:
        axes = self.axes
        axes.set(xlim=(0, self._x(self.layout.seconds)), ylim=(self.layout.height, 0), yticks=[])
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(SOFT)
        axes.tick_params(axis="x", colors=SOFT, labelsize=TEXT, length=3 if last else 0, labelbottom=last)
        axes.grid(axis="x", color=GRID, linewidth=0.5)
        axes.set_axisbelow(True)
        if last:
            axes.set_xlabel(f"time since the step began, {self.unit}", fontsize=TEXT + 0.5, color=INK)

    def _name(self, lane: Lane, size: float) -> None:
        """The lane's ground, as long as the step, and its name beside it."""
        whole = [(0, self._x(self.layout.timeline.seconds))]
        self.axes.broken_barh(whole, (lane.top, lane.height), color=FLOOR, zorder=0.5)
        self._beside(lane.name, lane.top + lane.height / 2, (-5, 0), ha="right", va="center", fontsize=size, color=INK)

    def _beside(self, text: str, y: float, points: tuple[float, float], **options: Any) -> None:
        """Text outside of the axes, at a distance from their left edge."""
        self.axes.annotate(text, (0, y), points, textcoords="offset points", annotation_clip=False, **options)

    def _boxes(self, lane: Lane, bars: Sequence[Bar], alpha: float = 1.0) -> None:
        for hatched in (False, True):
            some = [bar for bar in bars if bar.hatched == hatched and bar.end > bar.start]
            # a white edge tells neighbours apart; it must not cover what is thin, nor may that be moved to whole pixels
            typical = sorted(self.layout.inches(bar.end - bar.start) for bar in some)[len(some) // 2] if some else 0.0
            self.axes.broken_barh(
                [(self._x(bar.start), self._x(bar.end - bar.start)) for bar in some],
                (lane.top, lane.height),
                facecolor=[bar.colour for bar in some],
                alpha=alpha,
                zorder=2,
                snap=None if typical > 0.02 else False,
                **(HATCH if hatched else {"edgecolor": "white", "linewidth": min(0.5, 3 * typical)}),
            )

    def _labels(self, lane: Lane, found: Sequence[Label], size: float, **options: Any) -> None:
        style = {"color": INK, "ha": "center", "va": "center_baseline", "fontsize": size, "zorder": 6} | options
        for label in found:
            place = self._x((label.bar.start + label.bar.end) / 2), lane.top + lane.height / 2
            self.axes.text(*place, label.text, bbox=GROUND if label.ground else None, **style)

    def _slot(self, lane: Lane, held: Sequence[Held], dark: bool) -> None:
        layout = self.layout
        bars = [Bar(h.start, h.end, layout.palette.of(h.unit, dark), *layout.label(h.unit)) for h in held]
        self._boxes(lane, bars)
        self._boxes(lane, [Bar(h.start, h.ready, "white") for h in held if h.ready > h.start], alpha=0.55)
        if 72 * lane.height > SMALL + 1:
            self._labels(lane, labels(layout, bars, SMALL), SMALL)

    def _path(self) -> None:
        """Outlines the critical path: as one what follows on one stream; a line leads from one stream to the next."""
        from matplotlib.patches import Rectangle

        before: tuple[float, Lane] | None = None
        for stream, run in itertools.groupby(self.layout.timeline.critical_path(), key=lambda span: span.stream):
            lane, spans = self.layout.lanes[stream], list(run)
            start, end = self._x(spans[0].start), self._x(spans[-1].end)
            self.axes.add_patch(Rectangle((start, lane.top), end - start, lane.height, zorder=5, **OUTLINE))
            if before is not None:
                then, other = before
                down = other.top < lane.top
                ends = (other.top + other.height, lane.top) if down else (other.top, lane.top + lane.height)
                self.axes.plot((then, start), ends, color=INK, linewidth=OUTLINE["linewidth"], zorder=5)
            before = end, lane

    def _header(self) -> None:
        """Title, step time, and why compute was idle."""
        timeline = self.layout.timeline
        busy = f"compute busy {timeline.compute_s / (timeline.seconds or 1.0):.0%}"
        why = [f"{shown(seconds)} {because(name)}" for name, seconds in reasons(timeline).most_common(3)]
        text = f"step {shown(timeline.seconds)}, {busy}" + (f"; idle {', '.join(why)}" if why else "")
        left = -72 * self.before
        self._beside(timeline.title, 0, (left, 17), va="bottom", fontsize=LARGE, weight="bold", color=INK)
        self._beside(text, 0, (left, 6), va="bottom", fontsize=TEXT + 0.5, color=SOFT)


# ---- The legend of a picture of timelines: swatches with words, in rows.

Swatch = Callable[[Any, float, float, float, float], None]
"""Draws on axes at (x, y), of a width and a height."""
ROW, HIGH, NARROW, WIDE = 0.2, 0.11, 0.24, 0.55  # of a row and of a swatch; widths of swatches; inches
REASONS = {
    IDLE["gather"]: "idle: waits for a gather (its layer in italics)",
    IDLE["reduce"]: "idle: waits for a reduction",
    IDLE["fetch"]: "idle: waits for a copy to the host, or from it",
    OTHERWISE: "idle otherwise",
}


class Entry(NamedTuple):
    """A swatch with words, at x inches in a row. width: of the swatch"""

    x: float
    row: int
    words: str
    width: float
    swatch: Swatch


def box(**options: Any) -> Swatch:
    """A box in a style."""

    def draw(axes: Any, x: float, y: float, width: float, height: float) -> None:
        from matplotlib.patches import Rectangle

        axes.add_patch(Rectangle((x, y), width, height, **{"linewidth": 0, **options}))

    return draw


def ramp(colours: Sequence[Colour]) -> Swatch:
    """Colours beside each other."""

    def draw(axes: Any, x: float, y: float, width: float, height: float) -> None:
        each = width / len(colours)
        pieces = [(x + each * k, each) for k in range(len(colours))]
        axes.broken_barh(pieces, (y, height), facecolors=colours, linewidth=0)

    return draw


def entries(layouts: Sequence[Layout], across: float) -> list[Entry]:
    """Lays out what is to be explained, in rows no wider than `across`."""
    palette = layouts[0].palette
    found: list[tuple[str, float, Swatch]] = []
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
    if plain := {type(span.op).__name__.lower() for each in layouts for span in each.plain()}:
        found.append((", ".join(sorted(plain)), NARROW, box(facecolor=PLAIN)))
    idle = {bar.colour for each in layouts for bar in each.idle()}
    found += [(words, NARROW, box(facecolor=colour)) for colour, words in REASONS.items() if colour in idle]
    if any(each.rows for each in layouts):
        found.append(("slot being filled", NARROW, box(facecolor=[0.5 + 0.5 * c for c in palette.middle(False)])))
    found.append(("critical path", NARROW, box(**OUTLINE)))
    return in_rows(found, across)


def in_rows(found: Sequence[tuple[str, float, Swatch]], across: float) -> list[Entry]:
    """Words with their swatches and these one's widths, in rows no wider than `across`."""
    out, x, row = [], 0.0, 0
    for text, width, swatch in found:
        total = width + 0.06 + wide(text, TEXT) + 0.22
        if x and x + total > across:
            x, row = 0.0, row + 1
        out.append(Entry(x, row, text, width, swatch))
        x += total
    return out


def draw(axes: Any, found: Sequence[Entry], width: float, height: float) -> None:
    """Draws the entries on axes of that size in inches."""
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for x, row, words, size, swatch in found:
        top = 0.08 + row * ROW
        swatch(axes, x, top, size, HIGH)
        axes.text(x + size + 0.06, top + HIGH / 2, words, va="center_baseline", fontsize=TEXT, color=INK)
