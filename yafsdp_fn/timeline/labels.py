"""Which boxes of a lane are labelled: all that have room, else every k-th layer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from yafsdp_fn.timeline.layout import Bar, Layout

CLEAR = 0.04  # inches that a label keeps free around it, in its box


class Label(NamedTuple):
    """`text` in the middle of `bar`. ground: it needs one of its own to be legible"""

    bar: Bar
    text: str
    ground: bool


class _Rule(NamedTuple):
    """How the boxes of layers in a lane are numbered.

    every: k, for each k-th layer, across its neighbours; 0 for those that have room
    widest: number, in inches; busy: there are gaps between the boxes, or hatching, behind what crosses neighbours
    """

    every: int = 0
    widest: float = 0.0
    busy: bool = False


def labels(layout: Layout, bars: Sequence[Bar], size: float) -> list[Label]:
    """In order, without overlaps. bars: of one lane, in order; size: of the text, in points"""
    rules = [
        _rule(layout, [b for b in bars if b.number is not None and b.dark == dark], size) for dark in (False, True)
    ]
    ends, starts = [0.0, *(bar.end for bar in bars)], [*(bar.start for bar in bars[1:]), layout.seconds]
    found: list[Label] = []
    free = 0.0  # everything to the left of it is taken
    for bar, before, after in zip(bars, ends, starts, strict=False):
        room, centre = layout.inches(bar.end - bar.start) - CLEAR, layout.inches(bar.start + bar.end) / 2
        every, widest, busy = rules[bar.dark]
        if bar.number is None:
            text = next((text for text in (bar.text, bar.short) if wide(text, size) <= room), "")
        else:
            around = 2 * min(centre - layout.inches(before), layout.inches(after) - centre) - 2 * CLEAR
            shows = bar.number % every == 0 if every else widest <= max(room, around)
            text = bar.text if shows else ""
        half = wide(text, size) / 2
        if text and free <= centre - half and centre + half <= layout.across:
            free = centre + half + 0.03
            crosses = bar.number is not None and (every > 1 or 2 * half > room)
            found.append(Label(bar, text, bar.hatched or (busy and crosses)))
    return found


def _rule(layout: Layout, bars: Sequence[Bar], size: float) -> _Rule:
    if not bars:
        return _Rule()
    widest = max(wide(bar.text, size) for bar in bars)
    lengths = sorted(layout.inches(bar.end - bar.start) for bar in bars)
    pitches = sorted(layout.inches(b.start - a.start) for a, b in itertools.pairwise(bars)) or lengths
    gaps = sum(lengths) < 0.9 * layout.inches(bars[-1].end - bars[0].start)
    busy = gaps or any(bar.hatched for bar in bars)
    if widest + CLEAR <= lengths[len(lengths) // 2]:
        return _Rule(0, widest, busy)
    pitch = pitches[len(pitches) // 2]
    return _Rule(next((k for k in (1, 2, 5, 10, 20, 50) if k * pitch >= widest + 0.1), 100), widest, busy)


@functools.lru_cache(maxsize=4096)
def wide(text: str, size: float) -> float:
    """Width of `text` in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text:
        return 0.0
    return float(TextPath((0, 0), text, size=size, prop=FontProperties(family="DejaVu Sans")).get_extents().width) / 72
