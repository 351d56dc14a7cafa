"""The legend of a picture of timelines: swatches with words, in rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from yafsdp_fn.schedules.trace import Unit
from yafsdp_fn.timeline.colours import PLAIN, Palette
from yafsdp_fn.timeline.labels import wide
from yafsdp_fn.timeline.layout import IDLE, Layout
from yafsdp_fn.timeline.paint import HATCH, INK, OUTLINE, TEXT

Swatch = Callable[[Any, float, float, float, float], None]
"""Draws on axes at (x, y), of a width and a height."""
ROW, HIGH, SMALL, LARGE = 0.2, 0.11, 0.24, 0.55  # of a row and of a swatch; widths of swatches; inches


class Entry(NamedTuple):
    """A swatch with words, at x inches in a row. width: of the swatch"""

    x: float
    row: int
    words: str
    width: float
    swatch: Swatch


def _box(**options: Any) -> Swatch:
    def draw(axes: Any, x: float, y: float, width: float, height: float) -> None:
        from matplotlib.patches import Rectangle

        axes.add_patch(Rectangle((x, y), width, height, **{"linewidth": 0, **options}))

    return draw


def _ramp(palette: Palette, units: Sequence[Unit], dark: bool) -> Swatch:
    def draw(axes: Any, x: float, y: float, width: float, height: float) -> None:
        pieces = [(x + width * k / len(units), width / len(units)) for k in range(len(units))]
        axes.broken_barh(pieces, (y, height), facecolors=[palette.of(u.id, dark) for u in units], linewidth=0)

    return draw


def _pair(palette: Palette, unit: int) -> Swatch:
    def draw(axes: Any, x: float, y: float, width: float, height: float) -> None:
        for k, dark in enumerate((False, True)):
            _box(facecolor=palette.of(unit, dark))(axes, x + k * width / 2, y, width / 2, height)

    return draw


def entries(layouts: Sequence[Layout], across: float) -> list[Entry]:
    """What is to be explained, in rows no wider than `across`."""
    palette = layouts[0].palette
    found: list[tuple[str, float, Any]] = []
    for name, units in palette.stacks.items():
        which = f"{units[0].layer} to {units[-1].layer}" + f" of {name}" * (len(palette.stacks) > 1)
        found.append(("forward and weights, layers " * (not found) + which, LARGE, _ramp(palette, units, False)))
    if found:
        every = [unit for units in palette.stacks.values() for unit in units]
        found.append(("backward and gradients", LARGE, _ramp(palette, every, True)))
    found += [(unit.name, SMALL, _pair(palette, unit.id)) for unit in palette.others[:4]]
    if any(each.recomputing for each in layouts):
        hatched = _box(facecolor=palette.middle(True), **HATCH)
        found.append(("recomputes its forward first", SMALL, hatched))
    plain = {type(span.op).__name__.lower() for each in layouts for span in each.plain()}
    found += [(", ".join(sorted(plain)), SMALL, _box(facecolor=PLAIN))] if plain else []
    idle = {bar.colour: None for each in layouts for bar in each.idle()}
    words = {
        IDLE["gather"]: "idle: waits for a gather (its layer in italics)",
        IDLE["reduce"]: "idle: waits for a reduction",
        IDLE["fetch"]: "idle: waits for a copy to the host, or from it",
        IDLE["host"]: "idle otherwise",
    }
    found += [(text, SMALL, _box(facecolor=colour)) for colour, text in words.items() if colour in idle]
    if any(each.rows for each in layouts):
        fill = _box(facecolor=[0.5 + 0.5 * c for c in palette.middle(False)])
        found.append(("slot being filled", SMALL, fill))
    found.append(("critical path", SMALL, _box(**OUTLINE)))
    out: list[Entry] = []
    x, row = 0.0, 0
    for text, width, swatch in found:
        total = width + 0.06 + wide(text, TEXT) + 0.22
        if x and x + total > across:
            x, row = 0.0, row + 1
        out.append(Entry(x, row, text, width, swatch))
        x += total
    return out


def draw(axes: Any, found: Sequence[Entry], width: float, height: float) -> None:
    """On axes of that size in inches."""
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for x, row, words, size, swatch in found:
        top = 0.08 + row * ROW
        swatch(axes, x, top, size, HIGH)
        axes.text(x + size + 0.06, top + HIGH / 2, words, va="center_baseline", fontsize=TEXT, color=INK)
