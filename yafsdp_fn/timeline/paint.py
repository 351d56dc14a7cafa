"""Draws layouts with matplotlib: panels under one another on one time axis, and a legend below them.

Lengths are inches until they are drawn. matplotlib is imported when something is drawn.
"""

import functools
import io
import itertools
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from yafsdp_fn.timeline.layout import Bar, BoxRow, Layout, Sample, of_stage, of_stages
from yafsdp_fn.timeline.spans import Spans
from yafsdp_fn.timeline.text import unit_of

SUFFIXES = (".pdf", ".png", ".svg")
NOT_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")
"""Characters of which a name may be and a file of XML may not."""
NARROWEST, WIDEST = 9.0, 18.0  # of a figure
MARGIN, LEFT, RIGHT, ASIDE = 0.12, 1.0, 0.15, 0.4  # ASIDE: more to the right, where rows have words there
HEADER, BETWEEN, AXIS = 0.46, 0.18, 0.28  # above a panel; below it; more below the last, for the axis
TEXT, SMALL, LARGE = 7.0, 6.0, 9.0  # sizes in points
LINE, LETTER = 0.15, 0.062  # of lines of text: from one to the next, and how wide a letter is, about
CLEAR = 0.045  # inches between a label and the next: numbers that are nearer read as one
INK, SOFT, GRID, FLOOR, ITALIC = "#1b1f24", "#6b7280", "#d5d8dd", "#f3f4f6", "#7a4a45"
FILLING = "#c3edf2"  # in the legend: between two layers, paler
STYLE: dict[Any, Any] = {  # of matplotlib
    "svg.fonttype": "none",
    "svg.hashsalt": "timeline",
    "text.parse_math": False,
    "hatch.linewidth": 0.5,
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": TEXT + 0.5,
    "axes.axisbelow": True,
    "axes.edgecolor": SOFT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "xtick.color": SOFT,
    "xtick.labelsize": TEXT,
}
HATCH: dict[str, Any] = {"hatch": "//////", "edgecolor": (0.2, 0.2, 0.25), "linewidth": 0.0}
OUTLINE: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.9}
GROUND = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.6}
NO_EDGE: dict[str, Any] = {"linewidth": 0.0}
STYLES: dict[str, dict[str, Any]] = {
    "idle": NO_EDGE,
    "op": {},
    "slot": {},
    "strip": {},
    "thin": NO_EDGE,
    "again": HATCH,
    "inside": NO_EDGE,
    "filling": {"alpha": 0.55},
}
"""The styles of boxes by their kind: idle time is drawn first, and what covers others last."""


def save(timelines: Sequence[Spans], path: str | Path, words: Sequence[str] = (), *, by_stage: bool = False) -> None:
    """Draws `timelines` to a file under one another, and lines of text below.

    by_stage: as pipelines are drawn, also where none is one
    Raises ValueError for one without ops, and for another suffix.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: a picture is a file that ends in one of {', '.join(SUFFIXES)}")
    path.write_bytes(picture(timelines, words, by_stage=by_stage, kind=suffix[1:]))


def picture(
    timelines: Sequence[Spans], words: Sequence[str] = (), *, by_stage: bool = False, kind: str = "svg"
) -> bytes:
    """Returns the content of such a file."""
    if empty := [each.title for each in timelines if not each.spans]:
        raise ValueError(f"the timeline {empty[0]!r} has no ops to draw")
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to draw a timeline, pip install 'yafsdp_fn[plan]': it needs matplotlib") from error
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the same bytes every time
    drawn = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = sheet(layouts(timelines, by_stage), words)
        figure.savefig(drawn, format=kind, dpi=120, metadata=dated.get(kind))
    return NOT_XML.sub(b"?", drawn.getvalue()) if kind == "svg" else drawn.getvalue()


def layouts(timelines: Sequence[Spans], by_stage: bool = False) -> list[Layout]:
    """Returns the layout of each: all by stage where one is of several."""
    staged = by_stage or any(each.stage_count > 1 for each in timelines)
    return [of_stages(each) if staged else of_stage(each) for each in timelines]


@functools.lru_cache(maxsize=4096)
def wide(text: str, size: float) -> float:
    """Width of `text` in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=size)
    width, *_ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


# ---- A sheet: panels under one another, and a legend below them.


def sheet(drawn: Sequence[Layout], words: Sequence[str] = ()) -> Any:
    """Returns the figure of some layouts, with lines of text below."""
    from matplotlib.figure import Figure

    sides = LEFT + RIGHT + ASIDE * any(row.aside for each in drawn for row in each.rows)
    width = min(WIDEST, max(NARROWEST, sides + max(each.wanted for each in drawn)))
    across = width - sides
    inner = width - 2 * MARGIN
    samples = {sample.words: sample for each in drawn for sample in each.legend}
    entries = in_rows([*samples.values(), Sample("critical path", ("none",), "path")], inner)
    said = [line for text in words for line in textwrap.wrap(text, int(inner / LETTER), subsequent_indent="      ")]
    legend = ROW * (1 + entries[-1].row) + 0.1
    floor = legend + LINE * len(said) + 0.1 * bool(said)
    panels = sum(HEADER + each.height + BETWEEN for each in drawn)
    height = MARGIN + panels + AXIS + floor
    figure: Any = Figure(figsize=(width, height), facecolor="white")
    seconds = max(each.timeline.seconds for each in drawn)
    top = height - MARGIN
    for each in drawn:
        top -= HEADER + each.height
        axes = figure.add_axes((LEFT / width, top / height, across / width, each.height / height))
        Panel(axes, each, seconds, across).draw(last=each is drawn[-1])
        top -= BETWEEN
    below = figure.add_axes((MARGIN / width, 0, inner / width, floor / height))
    below.set(xlim=(0, inner), ylim=(floor, 0))
    below.axis("off")
    for entry in entries:
        _explain(below, entry)
    below.text(0, legend + 0.05, "\n".join(said), va="top", fontsize=TEXT + 0.5, linespacing=1.45)
    return figure


ROW, HIGH, NARROW, WIDE = 0.2, 0.11, 0.24, 0.55  # of a row and of a swatch; widths of swatches
SWATCHES: dict[str, dict[str, Any]] = {"again": HATCH, "path": OUTLINE, "filling": {"facecolor": FILLING}}


class Swatch(NamedTuple):
    """A sample of the legend, its place, and the width of its colours."""

    sample: Sample
    x: float
    row: int
    width: float


def in_rows(samples: Sequence[Sample], across: float) -> list[Swatch]:
    """Samples beside each other, in rows no wider than `across`."""
    found = []
    x = 0.0
    row = 0
    for sample in samples:
        swatch = WIDE if len(sample.colours) > 2 else NARROW
        total = swatch + 0.06 + wide(sample.words, TEXT) + 0.22
        if x and x + total > across:
            x = 0.0
            row = row + 1
        found.append(Swatch(sample, x, row, swatch))
        x += total
    return found


def _explain(axes: Any, entry: Swatch) -> None:
    """Draws a sample of the legend: its swatch, in pieces of each colour, and its words."""
    sample, x, row, width = entry
    top = 0.08 + row * ROW
    each = width / len(sample.colours)
    pieces = [(x + each * k, each) for k in range(len(sample.colours))]
    style = {"facecolor": sample.colours} | SWATCHES.get(sample.kind, NO_EDGE)
    axes.broken_barh(pieces, (top, HIGH), **style)
    axes.text(x + width + 0.06, top + HIGH / 2, sample.words, va="center_baseline")


# ---- A panel: one layout on axes as large as itself.


class Panel:
    """One layout on its axes. Across, `seconds` take `across` inches; heights are in inches from the top."""

    def __init__(self, axes: Any, layout: Layout, seconds: float, across: float) -> None:
        self.axes = axes
        self.layout = layout
        self.seconds = seconds or 1.0
        self.across = across
        self.scale, self.unit = unit_of(seconds)

    def inches(self, seconds: float) -> float:
        return seconds / self.seconds * self.across

    def middle(self, bar: Bar) -> float:
        return self.inches(bar.start + bar.end) / 2

    def draw(self, last: bool) -> None:
        """Draws everything. last: of the sheet, with the numbers of the time axis below it"""
        self._frame(last)
        for row in self.layout.rows:
            self._row(row)
        self._outline()

    def _frame(self, last: bool) -> None:
        axes = self.axes
        layout = self.layout
        axes.set(xlim=(0, self.seconds / self.scale), ylim=(layout.height, 0), yticks=[])
        axes.tick_params(axis="x", length=3 if last else 0, labelbottom=last)
        if last:
            axes.set_xlabel(f"time since the step began, {self.unit}")
        left = -72 * (LEFT - MARGIN)
        title = layout.timeline.title
        size = LARGE * min(1.0, (self.across + LEFT) / (1.15 * wide(title, LARGE) or 1.0))  # it is bold
        self._beside(title, 0, (left, 17), va="bottom", fontsize=size, weight="bold")
        self._beside(layout.words, 0, (left, 6), va="bottom", fontsize=TEXT + 0.5, color=SOFT)

    def _beside(self, text: str, y: float, points: tuple[float, float], *, x: float = 0, **options: Any) -> None:
        """Writes text outside of the axes, at a distance from their left edge (x=0), or from their right one (1)."""
        how = {"xycoords": self.axes.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
        self.axes.annotate(text, (x, y), points, **how, **options)

    def _row(self, row: BoxRow) -> None:
        middle = row.top + row.height / 2
        if row.name:
            size = TEXT + 1 if row.stream else SMALL + 0.5
            whole = [(0, self.layout.timeline.seconds / self.scale)]
            self.axes.broken_barh(whole, (row.top, row.height), color=FLOOR, zorder=0.5)
            self._beside(row.name, middle, (-5, 0), ha="right", va="center", fontsize=size)
            self._beside(row.aside, middle, (5, 0), x=1, ha="left", va="center", color=SOFT)
        bars = [bar for bar in row.bars if bar.end > bar.start]
        for kind, style in STYLES.items():
            self._boxes(row, [bar for bar in bars if bar.kind == kind], **style)
        size = SMALL if any(bar.kind in ("strip", "slot") for bar in bars) else TEXT
        if 72 * row.height <= size + 1:
            return
        for label in labels(bars, size, self):
            how = {"color": ITALIC, "style": "italic"} if label.bar.kind == "idle" else {}
            x = (label.bar.start + label.bar.end) / 2 / self.scale
            text = self.axes.text(x, middle, label.text, fontsize=size, zorder=6, **how)
            text.set(ha="center", va="center_baseline", bbox=GROUND if label.ground else None)

    def _boxes(self, row: BoxRow, bars: Sequence[Bar], **style: Any) -> None:
        if not bars:
            return
        # a white edge tells neighbours apart; it must not cover what is thin, nor may that be moved to whole pixels
        typical = sorted(self.inches(bar.end - bar.start) for bar in bars)[len(bars) // 2]
        self.axes.broken_barh(
            [(bar.start / self.scale, (bar.end - bar.start) / self.scale) for bar in bars],
            (row.top, row.height),
            facecolor=[bar.colour for bar in bars],
            zorder=2,
            snap=None if typical > 0.02 else False,
            **{"edgecolor": "white", "linewidth": min(0.5, 3 * typical)} | style,
        )

    def _outline(self) -> None:
        """Outlines the critical path: as one what follows in one row; a line leads from one row to the next."""
        path = [(row, start / self.scale, end / self.scale) for row, start, end in self.layout.path]
        for row, start, end in path:
            span = [(start, end - start)]
            self.axes.broken_barh(span, (row.top, row.height), facecolor="none", zorder=5, **OUTLINE)
        for (one, _, end), (two, start, _) in itertools.pairwise(path):
            below = two.top > one.top
            edges = (one.top + one.height * below, two.top + two.height * (not below))
            self.axes.plot((end, start), edges, color=INK, linewidth=OUTLINE["linewidth"], zorder=5)


# ---- Which boxes of a row are labelled.


class Label(NamedTuple):
    """`text` in the middle of `bar`, `half` inches to either side. ground: it needs one of its own to be legible"""

    bar: Bar
    text: str
    middle: float
    half: float
    ground: bool


def labels(bars: Sequence[Bar], size: float, panel: Panel) -> list[Label]:
    """Returns the labels of boxes in one row of `panel`, clear of each other: the first of two that are not.

    Words are written where they have room in their box; numbers of layers also across its neighbours, and where layers
    are too near for all of them, those of every fifth layer. size: of the text, in points
    """
    layers = [bar for bar in bars if bar.number is not None]
    widest = max((wide(bar.text, size) for bar in layers), default=0.0)
    crowded: set[Bar] = set()
    for pair in itertools.pairwise(layers):
        before, after = (panel.middle(bar) for bar in pair)
        if abs(after - before) < widest + CLEAR:
            crowded.update(pair)
    found: list[Label] = []
    for bar in bars:
        room = panel.inches(bar.end - bar.start)
        if bar.number is None:
            text = next((text for text in (bar.text, bar.short) if wide(text, size) <= room - 0.01), "")
        else:
            text = "" if bar in crowded and bar.number % 5 else bar.text
        half = wide(text, size) / 2
        label = Label(bar, text, panel.middle(bar), half, bar.kind == "again" or 2 * half > room)
        if text and _is_clear(label, found, panel.across):
            found.append(label)
    return found


def _is_clear(label: Label, others: Sequence[Label], across: float) -> bool:
    near = any(abs(label.middle - other.middle) < label.half + other.half + CLEAR for other in others)
    return not near and label.half <= label.middle <= across - label.half
