"""A line chart as SVG, whose colours are the page's. No script: a band over each point shows its numbers.

matplotlib finds the ticks alone: its charts would be pictures, without those numbers, and without the page's colours in
the dark.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from markupsafe import Markup, escape
from matplotlib.ticker import LogLocator, MaxNLocator

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 26, 26
DOTS, BANDS, COLUMNS = 24, 120, 400
"""Points with a dot each at most; bands that show numbers; columns of which lines show the lowest and the highest."""

TICKS = 5
LINEAR = MaxNLocator(TICKS, steps=[1, 2, 5, 10])
"""Finds round ticks, about so many."""

Points = Sequence[tuple[float, float]]


class Line(NamedTuple):
    """A line of a chart. kind: the class of its colour, `a` to `d`; noisy: drawn pale, with its running median above"""

    name: str
    points: Points
    kind: str = "a"
    noisy: bool = False


def chart(title: str, lines: Sequence[Line], last: float, log: bool | None = None) -> Markup:
    """Draws a chart of `lines`.

    last: step at the right end; log: of the values' axis, by default where they span two decades
    """
    lines = [line for line in lines if line.points]
    values = [value for line in lines for _, value in line.points]
    if not values:
        return Markup("")
    decades = min(values) > 0 and (max(values) / min(values) > 100 if log is None else log)
    plot = Plot(steps_axis(last), axis(values, log=decades))
    parts = [_title(title, lines), plot.grid(), *map(plot.line, lines), *plot.bands(lines)]
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(WIDTH, HEIGHT, title, Markup("").join(parts))


def _title(title: str, lines: Sequence[Line]) -> Markup:
    names = [Markup('<tspan class="{} word" dx="12">{}</tspan>').format(line.kind, line.name) for line in lines]
    shown = Markup('<tspan class="names">{}</tspan>').format(Markup("").join(names)) if len(names) > 1 else ""
    return Markup('<text class="head" x="6" y="16"><tspan class="title">{}</tspan>{}</text>').format(title, shown)


class Plot(NamedTuple):
    """Two axes, and what is drawn between them, as SVG."""

    across: Axis
    up: Axis

    def x(self, step: float) -> float:
        return round(LEFT + self.across.at(step) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - self.up.at(value) * (HEIGHT - TOP - BOTTOM), 1)

    def at(self, points: Points) -> Points:
        return [(self.x(step), self.y(value)) for step, value in points]

    def grid(self) -> Markup:
        right = WIDTH - RIGHT
        floor = HEIGHT - BOTTOM
        parts = []
        for tick in self.up.ticks:
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
            parts.append(f'<text class="up" x="{LEFT - 6}" y="{y + 4}">{number(tick)}</text>')
        for tick in self.across.ticks:
            x = self.x(tick)
            parts.append(f'<path class="grid" d="M{x} {floor}v4"/>')
            parts.append(f'<text class="across" x="{x}" y="{floor + 17}">{number(tick)}</text>')
        return Markup("".join(parts))

    def line(self, line: Line) -> Markup:
        points = self.at(thinned(line.points))
        parts = [_path(points, f"line {line.kind}" + " pale" * line.noisy)]
        if line.noisy:
            parts.append(_path(self.at(medians(line.points)), f"line {line.kind}"))
        elif len(line.points) <= DOTS:
            parts += [_dot(line.kind, x, y, 2.6) for x, y in points]
        return Markup("".join(parts))

    def bands(self, lines: Sequence[Line]) -> Iterator[Markup]:
        """Yields columns over the whole height; under the pointer one shows its step and each line's value there."""
        steps = sorted({step for line in lines for step, _ in line.points})
        few = {step for line in lines if len(line.points) <= DOTS for step, _ in line.points}  # held-out ones, all
        chosen = sorted({*steps[:: -(-len(steps) // BANDS)], *few})
        places = [self.x(step) for step in chosen]
        ends = [LEFT, *map(statistics.mean, itertools.pairwise(places)), WIDTH - RIGHT]
        values = [(line, dict(line.points)) for line in lines]
        for step, x, (start, end) in zip(chosen, places, itertools.pairwise(ends), strict=True):
            here = [(line, found[step]) for line, found in values if step in found]
            words = ", ".join(f"{escape(line.name)} {number(value)}" for line, value in here)
            dots = "".join(_dot(line.kind, x, self.y(value), 3.5) for line, value in here)
            yield Markup(
                f'<g class="band"><rect x="{start:.1f}" y="{TOP}" width="{max(0.5, end - start):.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"/><path d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>{dots}'
                f'<text x="{WIDTH - RIGHT}" y="15">step {step:.0f}: {words}</text></g>'
            )


def _path(points: Points, kind: str) -> str:
    return f'<path class="{kind}" d="M{"L".join(f"{x} {y}" for x, y in points)}"/>'


def _dot(kind: str, x: float, y: float, radius: float) -> str:
    return f'<circle class="dot {kind}" cx="{x}" cy="{y}" r="{radius}"/>'


def thinned(points: Points) -> Points:
    """Keeps at most two points for each of `COLUMNS` parts of the steps: the lowest and the highest."""
    if len(points) <= 2 * COLUMNS:
        return points
    low = points[0][0]
    high = points[-1][0]
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int((point[0] - low) / (high - low) * COLUMNS), []).append(point)
    ends = ({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))} for part in columns.values())
    return [point for both in ends for point in sorted(both)]


def medians(points: Points) -> Points:
    """The running median over a window of a fortieth of the points, at some hundred of them."""
    half = max(1, len(points) // 80)
    found = []
    for at in range(0, len(points), max(1, len(points) // 120)):
        window = [value for _, value in points[max(0, at - half) : at + half + 1]]
        found.append((points[at][0], statistics.median(window)))
    return found


class Axis(NamedTuple):
    """An axis of a chart. low, high: what it spans; ticks: values on it; log: whether its steps are factors"""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """The place of `value`, from 0 at the low end to 1."""
        scaled: Callable[[float], float] = math.log if self.log else float
        low = scaled(self.low)
        high = scaled(self.high)
        return min(1.0, max(0.0, (scaled(value) - low) / (high - low)))


def axis(values: list[float], *, log: bool = False) -> Axis:
    """An axis that holds all `values`, with some round ticks. log: of positive values"""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if high - low <= 1e-9 * max(abs(high), abs(low), 1e-30):
        low = low - (abs(low) or 1.0) / 2
        high = high + (abs(high) or 1.0) / 2
    locator: Any = LINEAR
    if log:
        locator = LogLocator(subs=(1.0, 2.0, 5.0) if high / low <= 1e3 else (1.0,), numticks=TICKS + 1)
    ticks = tuple(float(f"{tick:.12g}") for tick in locator.tick_values(low, high))
    inside = tuple(tick for tick in ticks if low * 0.999 <= tick <= high * 1.001)
    if log and len(inside) > 1:
        return Axis(low, high, inside, log)
    return Axis(min(ticks[0], low), max(ticks[-1], high), ticks, log)


def steps_axis(last: float) -> Axis:
    """The axis from 0 to `last` itself, which need not be round."""
    last = max(last, 1)
    ticks = (float(tick) for tick in LINEAR.tick_values(0, last))
    return Axis(0, last, tuple(tick for tick in ticks if tick <= last and tick.is_integer()))


def number(value: float) -> str:
    """Four digits at most: 2.871, 12.3k, 6.5e-5."""
    size = abs(value)
    if size and size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    for limit, unit, scale in ((1e4, "", 1.0), (1e6, "k", 1e3), (1e9, "M", 1e6), (math.inf, "G", 1e9)):
        if size < limit:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def size(nbytes: float) -> str:
    """1.25 GiB, 12.3 MiB, 640 KiB."""
    scale, name, digits = next((each for each in UNITS if nbytes >= each[0] / 2), UNITS[-1])
    return f"{nbytes / scale:.{digits}f} {name}"


UNITS = ((2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 0), (1, "B", 0))
