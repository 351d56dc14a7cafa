"""A picture of a timeline: streams as lanes, slots below them; two timelines one above the other on one time axis.

    lanes          gather, compute, reduce, replicate, as far as they are used; a row per weight slot and gradient slot
    colour         the layer, from the first to the last; light: forward and weights, dark: backward and gradients
    hatched        a backward that recomputes its forward
    tinted         idle time of compute, by what it waited for
    outlined       the critical path

Lengths are inches until they are drawn. Needs matplotlib, which is imported when something is drawn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from yafsdp_fn.schedules.ops import AllReduce, Backward, Forward, Gather, Norm, Reduce
from yafsdp_fn.timeline.colours import PLAIN, Palette
from yafsdp_fn.timeline.slots import Held, grad_slots, weight_slots
from yafsdp_fn.timeline.text import because, reason, reasons, shown, unit_of

if TYPE_CHECKING:
    from yafsdp_fn.timeline.timeline import Span, Timeline

SUFFIXES = (".pdf", ".png", ".svg")
NARROW, WIDE = 9.0, 18.0  # of a figure
PER_SPAN = 0.085  # wanted width of an op of the fullest lane
MARGIN, LEFT, RIGHT = 0.12, 1.0, 0.15
HEADER, AXIS, BETWEEN = 0.42, 0.46, 0.18
LANE, GAP = {"compute": 0.40}, 0.07
OTHER_LANE, SLOT, BLOCK = 0.28, 0.15, 1.25  # a stream; a slot; all slots of a kind where there are many
MANY_SLOTS = 8
TEXT, SMALL = 7.0, 6.0  # sizes in points
INK, SOFT, FLOOR = "#1b1f24", "#6b7280", "#f3f4f6"
IDLE = {"gather": "#fbe1dc", "reduce": "#fbeccb", "all-reduce": "#fbeccb", "host": "#e5e7eb", "end": "#e5e7eb"}


class Lane(NamedTuple):
    """A row of the picture. top: distance from the upper edge of its panel"""

    name: str
    top: float
    height: float


class Bar(NamedTuple):
    """A box in a lane, in seconds.

    number: of the layer that `text` is, None where it is something else; short: instead of a `text` that does not fit
    """

    start: float
    end: float
    colour: Any
    text: str = ""
    number: int | None = None
    dark: bool = False
    hatched: bool = False
    short: str = ""


def save(timeline: Timeline, path: str | Path, beside: Timeline | None = None) -> None:
    """Draws `timeline`, and `beside` below it, to a file. Raises ValueError for what has no ops, or another suffix."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path.name}: a picture is a file that ends in one of {', '.join(SUFFIXES)}")
    both = [timeline] if beside is None else [timeline, beside]
    for each in both:
        if not each.spans:
            raise ValueError(f"the timeline {each.title!r} has no ops to draw")
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to draw a timeline, pip install 'yafsdp_fn[plan]': it needs matplotlib") from error
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "timeline",
        "hatch.linewidth": 0.5,
        "font.family": "DejaVu Sans",
    }
    with matplotlib.rc_context(style):
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # the same bytes every time
        _figure(both).savefig(path, dpi=120, metadata=dated.get(path.suffix.lower()))


def _figure(timelines: list[Timeline]) -> Any:
    from matplotlib.figure import Figure

    fullest = max(len(each.on(stream)) for each in timelines for stream in each.streams)
    width = min(WIDE, max(NARROW, fullest * PER_SPAN + LEFT + RIGHT))
    across = width - LEFT - RIGHT
    panels = [_Panel(each, across, max(t.seconds for t in timelines)) for each in timelines]
    legend = _legend(panels, width - 2 * MARGIN)
    below = AXIS + legend[-1].row * 0.2 + 0.3 if legend else AXIS
    height = sum(panel.height + HEADER for panel in panels) + BETWEEN * (len(panels) - 1) + below + MARGIN
    figure = Figure(figsize=(width, height), facecolor="white")
    top = height - MARGIN
    for panel in panels:
        top -= HEADER
        axes = figure.add_axes((LEFT / width, (top - panel.height) / height, across / width, panel.height / height))
        panel.draw(axes, last=panel is panels[-1])
        top -= panel.height + BETWEEN
    floor = figure.add_axes((MARGIN / width, 0, 1 - 2 * MARGIN / width, (below - AXIS) / height))
    _draw_legend(floor, legend, width - 2 * MARGIN, below - AXIS)
    return figure


class _Panel:
    """One timeline. across: width in inches of `seconds`"""

    def __init__(self, timeline: Timeline, across: float, seconds: float) -> None:
        self.timeline, self.across, self.seconds = timeline, across, seconds or 1.0
        self.palette = Palette(timeline.trace)
        self.scale, self.unit = unit_of(seconds)
        self.lanes: dict[str, Lane] = {}
        self.blocks: list[Lane] = []
        top = 0.0
        for stream in timeline.streams:
            height = LANE.get(stream, OTHER_LANE)
            self.lanes[stream] = Lane(stream, top, height)
            top += height + GAP
        self.held: list[tuple[dict[int, Lane], list[Held], bool]] = []
        for name, held, dark in (("slot", weight_slots(timeline), False), ("grad slot", grad_slots(timeline), True)):
            if held:
                top += GAP
                top = self._rows(name, held, dark, top)
        self.height = top

    def _rows(self, name: str, held: list[Held], dark: bool, top: float) -> float:
        """A row per slot; thin ones under one name where there are many."""
        numbers = sorted({each.slot for each in held})
        many = len(numbers) > MANY_SLOTS
        height = BLOCK / len(numbers) if many else SLOT
        gap = 0.0 if many else 0.03
        rows = {slot: Lane("", top + k * (height + gap), height) for k, slot in enumerate(numbers)}
        if many:
            self.blocks.append(Lane(f"{len(numbers)} {name}s", top, BLOCK))
        else:
            self.blocks += [row._replace(name=f"{name} {slot}") for slot, row in rows.items()]
        self.held.append((rows, held, dark))
        return top + (height + gap) * len(numbers) + GAP

    def inches(self, seconds: float) -> float:
        return seconds / self.seconds * self.across

    # ---- what is in the lanes

    def bar(self, span: Span, recomputed: Callable[[Span], bool]) -> Bar:
        op = span.op
        if isinstance(op, Forward | Backward):
            unit: int | None = self._leading(self.timeline.trace.visits[op.visit].units)
        else:
            few = 1 <= len(op.units) <= 2 and not isinstance(op, Norm)
            unit = self._leading(op.units) if few else None
        if unit is None:
            return Bar(span.start, span.end, PLAIN, type(op).__name__.lower())
        dark = isinstance(op, Backward | Reduce | AllReduce)
        if not isinstance(op, Gather | Forward | Backward | Reduce | AllReduce):
            return Bar(span.start, span.end, PLAIN, self.label(unit)[0])
        colour = self.palette.of(unit, dark)
        return Bar(span.start, span.end, colour, *self.label(unit), dark, recomputed(span))

    def _leading(self, units: Sequence[int]) -> int:
        """The unit that an op of several is shown as: the first that is a layer."""
        return next((unit for unit in units if self.timeline.trace.units[unit].stack is not None), units[0])

    def label(self, unit: int) -> tuple[str, int | None]:
        found = self.timeline.trace.units[unit]
        return (found.name.rpartition(".")[2], None) if found.stack is None else (str(found.layer), found.layer)

    def bars(self, stream: str) -> list[Bar]:
        kept = {
            (span.op.visit, span.microbatch)
            for span in self.timeline.spans
            if isinstance(span.op, Forward) and span.op.keep
        }

        def recomputed(span: Span) -> bool:
            return isinstance(span.op, Backward) and (span.op.visit, span.microbatch) not in kept

        return [self.bar(span, recomputed) for span in self.timeline.on(stream)]

    @functools.cached_property
    def recomputes(self) -> bool:
        return any(bar.hatched for bar in self.bars("compute"))

    def plain(self) -> list[Span]:
        """What is grey, as it is of no layer, or neither weights nor gradients; as far as it can be seen."""
        seen = [span for span in self.timeline.spans if self.inches(span.seconds) > 0.02]
        return [span for span in seen if self.bar(span, lambda _: False).colour == PLAIN]

    def idle(self) -> list[Bar]:
        """Gaps of compute that can be seen."""
        at = {span.number: span for span in self.timeline.spans}
        gaps = []
        for gap in self.timeline.idle():
            why = reason(self.timeline, gap)
            text, short = because(why), ""
            if gap.cause is not None and why != "host":
                short = self.bar(at[gap.cause], lambda _: False).text
                text = f"{why} {short}"
            gaps.append(Bar(gap.start, gap.end, IDLE.get(why, IDLE["host"]), text, short=short))
        return gaps

    # ---- drawing

    def draw(self, axes: Any, last: bool) -> None:
        axes.set_xlim(0, self.seconds / self.scale)
        axes.set_ylim(self.height, 0)
        axes.set_yticks([])
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(SOFT)
        axes.tick_params(axis="x", colors=SOFT, labelsize=TEXT, length=3 if last else 0, labelbottom=last)
        axes.grid(axis="x", color="#d5d8dd", linewidth=0.5, zorder=0)
        axes.set_axisbelow(True)
        if last:
            axes.set_xlabel(f"time since the step began, {self.unit}", fontsize=TEXT + 0.5, color=INK)
        for lane in (*self.lanes.values(), *self.blocks):
            axes.broken_barh([(0, self._x(self.timeline.seconds))], (lane.top, lane.height), color=FLOOR, zorder=0.5)
            size = TEXT + 1 if lane.name in self.lanes else SMALL + 0.5
            axes.annotate(
                lane.name,
                (0, lane.top + lane.height / 2),
                (-5, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=size,
                color=INK,
                annotation_clip=False,
            )
        for stream, lane in self.lanes.items():
            if stream == "compute":
                gaps = self.idle()
                self._boxes(axes, lane, gaps)
                self._texts(axes, lane, gaps, style="italic")
            bars = self.bars(stream)
            self._boxes(axes, lane, bars)
            self._texts(axes, lane, bars)
        for rows, held, dark in self.held:
            for slot, lane in rows.items():
                mine = [each for each in held if each.slot == slot]
                self._slot(axes, lane, mine, dark)
        self._path(axes)
        self._header(axes)

    def _x(self, seconds: float) -> float:
        return seconds / self.scale

    def _boxes(self, axes: Any, lane: Lane, bars: Sequence[Bar], alpha: float = 1.0) -> None:
        for hatch in (False, True):
            some = [bar for bar in bars if bar.hatched == hatch and bar.end > bar.start]
            # an edge tells neighbours apart; it must not cover what is thin
            typical = sorted(self.inches(bar.end - bar.start) for bar in some)[len(some) // 2] if some else 0.0
            axes.broken_barh(
                [(self._x(bar.start), self._x(bar.end - bar.start)) for bar in some],
                (lane.top, lane.height),
                facecolors=[bar.colour for bar in some],
                edgecolors=(0.2, 0.2, 0.25) if hatch else "white",
                hatch="//////" if hatch else None,
                linewidth=0.0 if hatch else min(0.5, 3 * typical),
                alpha=alpha,
                zorder=2,
            )

    def _texts(self, axes: Any, lane: Lane, bars: Sequence[Bar], style: str = "normal", size: float = TEXT) -> None:
        """Labels where they fit, in the box or the gaps beside it; of layers too narrow for that every k-th number."""
        layers = [[bar for bar in bars if bar.number is not None and bar.dark == dark] for dark in (False, True)]
        rules = [self._every(some, size) for some in layers]
        free = 0.0
        ends, starts = [0.0, *(bar.end for bar in bars)], [*(bar.start for bar in bars[1:]), self.seconds]
        for bar, before, after in zip(bars, ends, starts, strict=False):
            room, centre = self.inches(bar.end - bar.start) - 0.04, self.inches(bar.start + bar.end) / 2
            every, needs, busy = rules[bar.dark]
            if bar.number is None:
                text = next((text for text in (bar.text, bar.short) if _wide(text, size) <= room), "")
            else:
                around = 2 * min(centre - self.inches(before), self.inches(after) - centre) - 0.08
                text = bar.text if (every or needs <= max(room, around)) and bar.number % (every or 1) == 0 else ""
            half = _wide(text, size) / 2
            if not text or centre - half < free or centre + half > self.across:
                continue
            free = centre + half + 0.03
            ground = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.6}
            axes.text(
                self._x((bar.start + bar.end) / 2),
                lane.top + lane.height / 2,
                text,
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=INK if style == "normal" else "#7a4a45",
                style=style,
                zorder=6,
                bbox=ground
                if bar.hatched or (busy and bar.number is not None and (every or 2 * half > room))
                else None,
            )

    def _every(self, bars: Sequence[Bar], size: float) -> tuple[int, float, bool]:
        """`(k, widest, busy)` of the boxes of layers in a lane: every k-th gets its number, 0 where each has room.

        widest: number, in inches; busy: the ground of the boxes' neighbourhood, by gaps or by hatching
        """
        if not bars:
            return 0, 0.0, False
        widest = max(_wide(bar.text, size) for bar in bars)
        lengths = sorted(self.inches(bar.end - bar.start) for bar in bars)
        from_one_to_next = sorted(self.inches(b.start - a.start) for a, b in itertools.pairwise(bars)) or [self.across]
        length, pitch = lengths[len(lengths) // 2], from_one_to_next[len(from_one_to_next) // 2]
        gaps = sum(lengths) < 0.9 * self.inches(bars[-1].end - bars[0].start)
        busy = gaps or any(bar.hatched for bar in bars)
        if widest + 0.04 <= length:
            return 0, widest, busy
        return next((k for k in (1, 2, 5, 10, 20, 50) if k * pitch >= widest + 0.1), 100), widest, busy

    def _slot(self, axes: Any, lane: Lane, held: Sequence[Held], dark: bool) -> None:
        bars = [Bar(h.start, h.end, self.palette.of(h.unit, dark), *self.label(h.unit)) for h in held]
        filling = [Bar(h.start, h.ready, "white") for h in held if h.ready > h.start]
        self._boxes(axes, lane, bars)
        self._boxes(axes, lane, filling, alpha=0.55)
        if lane.height * 72 > SMALL + 1:
            self._texts(axes, lane, [bar._replace(dark=False) for bar in bars], size=SMALL)

    def _path(self, axes: Any) -> None:
        """What follows on one stream is outlined as one; a line leads from one stream to the next."""
        from matplotlib.patches import Rectangle

        before: tuple[float, Lane] | None = None
        for stream, run in itertools.groupby(self.timeline.critical_path(), key=lambda span: span.stream):
            lane, spans = self.lanes[stream], list(run)
            start, end = self._x(spans[0].start), self._x(spans[-1].end)
            box = Rectangle((start, lane.top), end - start, lane.height)
            box.set(fill=False, edgecolor=INK, linewidth=0.9, zorder=5)
            axes.add_patch(box)
            if before is not None:
                then, above = before
                down = above.top < lane.top
                ends = (above.top + above.height, lane.top) if down else (above.top, lane.top + lane.height)
                axes.plot((then, start), ends, color=INK, linewidth=0.9, zorder=5)
            before = end, lane

    def _header(self, axes: Any) -> None:
        timeline = self.timeline
        idle = reasons(timeline).most_common(3)
        busy = f"compute busy {timeline.compute_s / (timeline.seconds or 1.0):.0%}"
        why = ", ".join(f"{shown(seconds)} {because(name)}" for name, seconds in idle if seconds > 0)
        text = f"step {shown(timeline.seconds)}, {busy}" + (f"; idle {why}" if why else "")
        left = 72 * (MARGIN - LEFT)
        place: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "va": "bottom"}
        axes.annotate(timeline.title, (0, 0), (left, 17), fontsize=9, weight="bold", color=INK, **place)
        axes.annotate(text, (0, 0), (left, 6), fontsize=TEXT + 0.5, color=SOFT, **place)


# ---- the legend


class _Entry(NamedTuple):
    """A swatch with words, at (x, row). draw: the swatch, at a place and of a size"""

    x: float
    row: int
    words: str
    width: float
    draw: Callable[[Any, float, float, float, float], None]


def _box(**options: Any) -> Callable[[Any, float, float, float, float], None]:
    def draw(axes: Any, x: float, y: float, width: float, height: float) -> None:
        from matplotlib.patches import Rectangle

        axes.add_patch(Rectangle((x, y), width, height, **{"linewidth": 0, **options}))

    return draw


def _ramp(palette: Palette, dark: bool) -> Callable[[Any, float, float, float, float], None]:
    def draw(axes: Any, x: float, y: float, width: float, height: float) -> None:
        n = min(48, max(1, palette.layers))
        colours = [palette.ramp(k / max(1, n - 1), dark) for k in range(n)]
        pieces = [(x + width * k / n, width / n) for k in range(n)]
        axes.broken_barh(pieces, (y, height), facecolors=colours, linewidth=0)

    return draw


def _pair(palette: Palette, unit: int) -> Callable[[Any, float, float, float, float], None]:
    def draw(axes: Any, x: float, y: float, width: float, height: float) -> None:
        for k, dark in enumerate((False, True)):
            _box(facecolor=palette.of(unit, dark))(axes, x + k * width / 2, y, width / 2, height)

    return draw


def _legend(panels: Sequence[_Panel], across: float) -> list[_Entry]:
    """What is to be explained, in rows no wider than `across`."""
    palette = panels[0].palette
    found: list[tuple[str, float, Any]] = []
    if palette.layers:
        stacks = palette.stacks
        which = f"0 to {palette.layers - 1}" if len(stacks) == 1 else f"of {', then '.join(stacks)}"
        found.append((f"forward and weights, layers {which}", 0.55, _ramp(palette, False)))
        found.append(("backward and gradients", 0.55, _ramp(palette, True)))
    found += [(unit.name, 0.24, _pair(palette, unit.id)) for unit in palette.others[:4]]
    if any(panel.recomputes for panel in panels):
        hatched = _box(facecolor=palette.ramp(0.5, True), hatch="//////", edgecolor=(0.2, 0.2, 0.25))
        found.append(("recomputes its forward first", 0.24, hatched))
    plain = {type(span.op).__name__.lower() for panel in panels for span in panel.plain()}
    found += [(", ".join(sorted(plain)), 0.24, _box(facecolor=PLAIN))] if plain else []
    idle = {bar.colour: None for panel in panels for bar in panel.idle()}
    words = {
        IDLE["gather"]: "idle: waits for a gather (its layer in italics)",
        IDLE["reduce"]: "idle: waits for a reduction",
        IDLE["host"]: "idle otherwise",
    }
    found += [(text, 0.24, _box(facecolor=colour)) for colour, text in words.items() if colour in idle]
    if any(panel.held for panel in panels):
        fill = _box(facecolor=[0.5 + 0.5 * c for c in palette.ramp(0.5, False)])
        found.append(("slot being filled", 0.24, fill))
    found.append(("critical path", 0.24, _box(fill=False, edgecolor=INK, linewidth=0.9)))
    entries: list[_Entry] = []
    x, row = 0.0, 0
    for text, width, draw in found:
        total = width + 0.06 + _wide(text, TEXT) + 0.22
        if x and x + total > across:
            x, row = 0.0, row + 1
        entries.append(_Entry(x, row, text, width, draw))
        x += total
    return entries


def _draw_legend(axes: Any, entries: Sequence[_Entry], width: float, height: float) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for x, row, words, size, draw in entries:
        top = 0.08 + row * 0.2
        draw(axes, x, top, size, 0.11)
        axes.text(x + size + 0.06, top + 0.055, words, va="center_baseline", fontsize=TEXT, color=INK)


@functools.lru_cache(maxsize=4096)
def _wide(text: str, size: float) -> float:
    """Width of `text` in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text:
        return 0.0
    return float(TextPath((0, 0), text, size=size, prop=FontProperties(family="DejaVu Sans")).get_extents().width) / 72
