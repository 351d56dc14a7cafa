"""The legend of a picture of timelines: swatches with words, in rows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from yafsdp_fn.timeline.colours import PLAIN, Colour
from yafsdp_fn.timeline.geometry import IDLE, OTHERWISE, Layout
from yafsdp_fn.timeline.labels import wide
from yafsdp_fn.timeline.paint import HATCH, INK, OUTLINE, TEXT

Swatch = Callable[[Any, float, float, float, float], None]
"""Draws on axes at (x, y), of a width and a height."""
ROW, HIGH, SMALL, LARGE = 0.2, 0.11, 0.24, 0.55  # of a row and of a swatch; widths of swatches; inches
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
    """What is to be explained, in rows no wider than `across`."""
    palette = layouts[0].palette
    found: list[tuple[str, float, Swatch]] = []
    for name, units in palette.stacks.items():
        which = f"{units[0].layer} to {units[-1].layer}" + f" of {name}" * (len(palette.stacks) > 1)
        light = [palette.of(unit.id, dark=False) for unit in units]
        found.append(("forward and weights, layers " * (not found) + which, LARGE, ramp(light)))
    if found:
        every = [palette.of(unit.id, dark=True) for units in palette.stacks.values() for unit in units]
        found.append(("backward and gradients", LARGE, ramp(every)))
    for unit in palette.others[:4]:
        found.append((unit.name, SMALL, ramp([palette.of(unit.id, dark) for dark in (False, True)])))
    if any(each.recomputing for each in layouts):
        found.append(("recomputes its forward first", SMALL, box(facecolor=palette.middle(True), **HATCH)))
    if plain := {type(span.op).__name__.lower() for each in layouts for span in each.plain()}:
        found.append((", ".join(sorted(plain)), SMALL, box(facecolor=PLAIN)))
    idle = {bar.colour for each in layouts for bar in each.idle()}
    found += [(words, SMALL, box(facecolor=colour)) for colour, words in REASONS.items() if colour in idle]
    if any(each.rows for each in layouts):
        found.append(("slot being filled", SMALL, box(facecolor=[0.5 + 0.5 * c for c in palette.middle(False)])))
    found.append(("critical path", SMALL, box(**OUTLINE)))
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
    """On axes of that size in inches."""
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for x, row, words, size, swatch in found:
        top = 0.08 + row * ROW
        swatch(axes, x, top, size, HIGH)
        axes.text(x + size + 0.06, top + HIGH / 2, words, va="center_baseline", fontsize=TEXT, color=INK)
