"""The parts of all pictures of timelines: a sheet with a legend, panels on one time axis, files.

Lengths are inches until they are drawn. Needs matplotlib, which is imported when something is drawn.
"""

import functools
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from yafsdp_fn.timeline.geometry import Colour
from yafsdp_fn.timeline.spans import Span, Spans
from yafsdp_fn.timeline.text import unit_of

SUFFIXES = (".pdf", ".png", ".svg")
NOT_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")
"""Characters of which a name may be and a file of XML may not."""
NARROWEST, WIDEST = 9.0, 18.0  # of a figure
MARGIN, LEFT = 0.12, 1.0
AXIS, BETWEEN = 0.46, 0.18  # below the last panel; between two
TEXT, SMALL, LARGE = 7.0, 6.0, 9.0  # sizes in points
LINE, LETTER = 0.15, 0.062  # of lines of text: from one to the next, and how wide a letter is, about
CLEAR = 0.06  # inches between a label and the next, as wide as a digit: numbers that are nearer read as one
INK, SOFT, GRID, FLOOR = "#1b1f24", "#6b7280", "#d5d8dd", "#f3f4f6"
HATCH: dict[str, Any] = {"hatch": "//////", "edgecolor": (0.2, 0.2, 0.25), "linewidth": 0.0}
OUTLINE: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 0.9}


@functools.lru_cache(maxsize=4096)
def wide(text: str, size: float) -> float:
    """Width of `text` in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text:
        return 0.0
    try:
        path = TextPath((0, 0), text, size=size, prop=FontProperties(family="DejaVu Sans"))
    except AttributeError:  # of spaces and marks alone matplotlib makes no path
        return 0.0
    return float(path.get_extents().width) / 72


# ---- Panels: axes as large as a part of a picture.

Box = tuple[float, float, Any]
"""`(start, end, colour)`, in seconds."""


class Panel:
    """One timeline, or a pipeline, on axes of its own: `across` inches are `seconds`, from the top down in inches."""

    def __init__(self, axes: Any, seconds: float, across: float) -> None:
        self.axes, self.seconds, self.across = axes, seconds or 1.0, across
        self.scale, self.unit = unit_of(seconds)

    def x(self, seconds: float) -> float:
        """Returns the place of a time on the axis."""
        return seconds / self.scale

    def inches(self, seconds: float) -> float:
        """The length of a time."""
        return seconds / self.seconds * self.across

    def frame(self, height: float, title: str, text: str, *, last: bool = True) -> None:
        """Draws the axis, and a title with a line of text above it. last: has the numbers of the time axis below it"""
        axes = self.axes
        axes.set(xlim=(0, self.x(self.seconds)), ylim=(height, 0), yticks=[])
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(SOFT)
        axes.tick_params(axis="x", colors=SOFT, labelsize=TEXT, length=3 if last else 0, labelbottom=last)
        axes.grid(axis="x", color=GRID, linewidth=0.5)
        axes.set_axisbelow(True)
        if last:
            axes.set_xlabel(f"time since the step began, {self.unit}", fontsize=TEXT + 0.5, color=INK)
        left = -72 * (LEFT - MARGIN)
        size = LARGE * min(1.0, (self.across + LEFT) / (1.15 * wide(title, LARGE) or 1.0))  # it is bold
        self.beside(title, 0, (left, 17), va="bottom", fontsize=size, weight="bold", color=INK)
        self.beside(text, 0, (left, 6), va="bottom", fontsize=TEXT + 0.5, color=SOFT)

    def beside(self, text: str, y: float, points: tuple[float, float], *, x: float = 0, **options: Any) -> None:
        """Writes text outside of the axes, at a distance from their left edge (x=0), or from their right one (1)."""
        at = self.axes.get_yaxis_transform()
        of = {"xycoords": at, "textcoords": "offset points", "annotation_clip": False}
        self.axes.annotate(text, (x, y), points, **of, **options)

    def boxes(self, top: float, height: float, boxes: Sequence[Box], *, edge: float = 0.5, **style: Any) -> None:
        """Draws boxes that begin `top` inches below the upper edge."""
        # a white edge tells neighbours apart; it must not cover what is thin, nor may that be moved to whole pixels
        typical = sorted(self.inches(end - start) for start, end, _ in boxes)[len(boxes) // 2] if boxes else 0.0
        self.axes.broken_barh(
            [(self.x(start), self.x(end - start)) for start, end, _ in boxes],
            (top, height),
            facecolor=[colour for *_, colour in boxes],
            zorder=2,
            snap=None if typical > 0.02 else False,
            **{"edgecolor": "white", "linewidth": min(edge, 3 * typical)} | style,
        )

    def label(self, text: str, start: float, end: float, y: float, **style: Any) -> None:
        """Writes text in the middle of a box."""
        style = {"color": INK, "ha": "center", "va": "center_baseline", "fontsize": TEXT, "zorder": 6} | style
        self.axes.text(self.x((start + end) / 2), y, text, **style)

    def outline(self, path: Iterable[Span], row: Callable[[Span], tuple[float, float]]) -> None:
        """Outlines the critical path: as one what follows in one row; a line leads from one row to the next.

        row: top and height, in inches
        """
        from matplotlib.patches import Rectangle

        before: tuple[float, float, float] | None = None
        for (top, height), run in itertools.groupby(path, row):
            spans = list(run)
            start, end = self.x(spans[0].start), self.x(spans[-1].end)
            self.axes.add_patch(Rectangle((start, top), end - start, height, zorder=5, **OUTLINE))
            if before is not None:
                then, above, high = before
                ends = (above + high, top) if above < top else (above, top + height)
                self.axes.plot((then, start), ends, color=INK, linewidth=OUTLINE["linewidth"], zorder=5)
            before = end, top, height


# ---- A sheet: panels under one another, and a legend below them.


def across(fullest: float, right: float) -> float:
    """The inches that a time axis takes, of a figure for so many inches in the fullest row. right: of the panels"""
    return min(WIDEST, max(NARROWEST, fullest + LEFT + right)) - LEFT - right


def sheet(
    across: float,
    right: float,
    header: float,
    heights: Sequence[float],
    explained: Sequence["Sample"],
    words: Sequence[str] = (),
) -> tuple[Any, list[Any]]:
    """The figure, and axes for panels of these heights, each below a header of its own. words: lines of text below"""
    from matplotlib.figure import Figure

    width = across + LEFT + right
    found = in_rows(explained, width - 2 * MARGIN)
    letters = int((width - 2 * MARGIN) / LETTER)
    said = [line for text in words for line in textwrap.wrap(text, letters, subsequent_indent="      ")]
    legend = found[-1].row * ROW + 0.3
    below = AXIS + legend + len(said) * LINE + 0.1 * bool(said)
    height = sum(heights) + header * len(heights) + BETWEEN * (len(heights) - 1) + below + MARGIN
    figure: Any = Figure(figsize=(width, height), facecolor="white")
    top, axes = height - MARGIN, []
    for high in heights:
        top -= header
        axes.append(figure.add_axes((LEFT / width, (top - high) / height, across / width, high / height)))
        top -= high + BETWEEN
    floor = figure.add_axes((MARGIN / width, 0, 1 - 2 * MARGIN / width, (below - AXIS) / height))
    draw(floor, found, width - 2 * MARGIN, below - AXIS)
    for number, line in enumerate(said):
        floor.text(0, legend + 0.1 + number * LINE, line, va="center_baseline", fontsize=TEXT + 0.5, color=INK)
    return figure, axes


def write(figure: Callable[[], Any], path: str | Path | io.BytesIO, timelines: Sequence[Spans]) -> None:
    """Writes what `figure` makes of `timelines`; as SVG in memory. Raises ValueError for what has no ops, or another
    suffix."""
    path = path if isinstance(path, io.BytesIO) else Path(path)
    suffix = path.suffix.lower() if isinstance(path, Path) else ".svg"
    if isinstance(path, Path) and suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: a picture is a file that ends in one of {', '.join(SUFFIXES)}")
    if empty := [each.title for each in timelines if not each.spans]:
        raise ValueError(f"the timeline {empty[0]!r} has no ops to draw")
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to draw a timeline, pip install 'yafsdp_fn[plan]': it needs matplotlib") from error
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(style | {"hatch.linewidth": 0.5, "text.parse_math": False}):
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # the same bytes every time
        figure().savefig(drawn := io.BytesIO(), format=suffix[1:], dpi=120, metadata=dated.get(suffix))
    data = drawn.getvalue() if suffix != ".svg" else NOT_XML.sub(b"?", drawn.getvalue())
    path.write(data) if isinstance(path, io.BytesIO) else path.write_bytes(data)


# ---- The legend of a picture of timelines: swatches with words, in rows.

Swatch = Callable[[Any, float, float, float, float], None]
"""Draws on axes at (x, y), of a width and a height."""
Sample = tuple[str, float, Swatch]
"""Words with their swatch, and its width."""
ROW, HIGH, NARROW, WIDE = 0.2, 0.11, 0.24, 0.55  # of a row and of a swatch; widths of swatches; inches


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


def in_rows(found: Sequence["Sample"], across: float) -> list[Entry]:
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
