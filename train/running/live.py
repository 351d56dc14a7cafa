"""The line that follows a run in a terminal. It is drawn when a step has ended, twice a second at most: quiet over a
slow connection, too.

    step 120/200 ━━━━━━━━━╸      loss 2.7619 ▇▆▅▅▄▃▃▂▂▁  1,291 tok/s  198 ms  MFU 25.0%  0.51 GiB  ETA 0:16

What does not fit into the terminal is left out, from the last of `Part`'s order on, so that it stays one line.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

PAUSE = 0.5
"""Seconds between two redraws, at least."""
MARKS = "▁▂▃▄▅▆▇█"
SPARK, BAR = 20, 16
"""Columns of the sparkline, and of the bar."""


class Part(NamedTuple):
    """rank: the highest is left out first where there is no room; fancy: not for terminals of ASCII alone"""

    text: str
    rank: int
    style: str = ""
    fancy: bool = False


class LiveLine:
    """One line at the end of a terminal, while it is entered. Shows nothing where `console` is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self._drawn = console, -math.inf
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()  # draws what was given last

    def show(self, parts: Sequence[Part]) -> None:
        """Draws them now, or with a later one."""
        if self._live is None:
            return
        plain = self._console.options.ascii_only
        now = time.monotonic()
        due = now - self._drawn >= PAUSE
        self._live.update(
            fitted([part for part in parts if not (plain and part.fancy)], self._console.width), refresh=due
        )
        if due:
            self._drawn = now


def fitted(parts: Sequence[Part], width: int) -> Text:
    """The parts in order, as many as fit into `width` columns."""
    kept = list(parts)
    while len(kept) > 1 and sum(len(part.text) for part in kept) + 2 * (len(kept) - 1) > width - 1:
        kept.remove(max(kept, key=lambda part: part.rank))
    text = Text("  ").join([Text(part.text, style=part.style) for part in kept])
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def bar(done: int, whole: int) -> str:
    halves = round(2 * BAR * done / max(1, whole))
    return ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(BAR)


def sparkline(values: Sequence[float]) -> str:
    """The later half of `values`, those that are finite, as means over as many parts as there are columns."""
    found = [value for value in values[len(values) // 2 :] if math.isfinite(value)]
    count = min(SPARK, len(found))
    edges = [len(found) * k // count for k in range(count + 1)] if count else []
    means = [sum(found[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(MARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(MARKS[round((value - low) * scale)] for value in means)
