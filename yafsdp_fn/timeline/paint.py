"""Draws a layout on matplotlib's axes, which are as large as the layout, in inches."""

import itertools
from collections.abc import Sequence
from typing import Any

from yafsdp_fn.timeline.geometry import Bar, Lane, Layout
from yafsdp_fn.timeline.labels import Label, labels
from yafsdp_fn.timeline.slot_contents import Held
from yafsdp_fn.timeline.text import because, reasons, shown, unit_of

TEXT, SMALL, LARGE = 7.0, 6.0, 9.0  # sizes in points
INK, SOFT, GRID, FLOOR, WAITS = "#1b1f24", "#6b7280", "#d5d8dd", "#f3f4f6", "#7a4a45"
HATCH: dict[str, Any] = {"hatch": "//////", "edgecolor": (0.2, 0.2, 0.25), "linewidth": 0.0}
OUTLINE: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 0.9}
GROUND = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.6}


class Painter:
    """Of one layout on its axes. before: inches of the figure to the left of them"""

    def __init__(self, layout: Layout, axes: Any, before: float) -> None:
        self.layout, self.axes, self.before = layout, axes, before
        self.scale, self.unit = unit_of(layout.seconds)

    def draw(self, last: bool) -> None:
        """last: has the numbers of the time axis below it"""
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
        """What follows on one stream is outlined as one; a line leads from one stream to the next."""
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
