"""Which boxes of a lane are labelled: all that have room, else every k-th layer."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from yafsdp_fn.timeline.geometry import Bar, Layout

CLEAR = 0.06  # inches between a label and the next, as wide as a digit: numbers that are nearer read as one


class Label(NamedTuple):
    """`text` in the middle of `bar`, `half` inches to either side. ground: it needs one of its own to be legible"""

    bar: Bar
    text: str
    middle: float
    half: float
    ground: bool = False


class _Rule(NamedTuple):
    """How the boxes of layers in a lane are numbered.

    every: k, for each k-th of the layers that the lane has, across its neighbours; 0 for those that have room
    places: layer -> how many layers of the lane come before it
    widest: number, in inches; busy: there are gaps between the boxes, or hatching, behind what crosses neighbours
    """

    every: int = 0
    places: Mapping[int, int] = {}
    widest: float = 0.0
    busy: bool = False


def labels(layout: Layout, bars: Sequence[Bar], size: float, among: Sequence[Label] = ()) -> list[Label]:
    """In order, clear of each other. bars: of one lane, in order; size: of the text, in points; among: others there"""
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
