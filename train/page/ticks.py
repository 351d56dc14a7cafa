"""Where an axis has its ticks, and numbers as people read them."""

from __future__ import annotations

import math
from typing import NamedTuple


class Axis(NamedTuple):
    """low, high: what it spans; ticks: values on it; log: whether its steps are factors"""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Where `value` lies, from 0 at the low end to 1."""
        low, high, value = (math.log(x) for x in (self.low, self.high, value)) if self.log else (*self[:2], value)
        return min(1.0, max(0.0, (value - low) / (high - low)))


def axis(values: list[float], *, log: bool = False, count: int = 5) -> Axis:
    """An axis that holds all `values`, with some `count` round ticks. log: of positive values"""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        every = -(-(last - first) // count)
        ticks = [m * 10.0**k for k in range(first, last + 1, every) for m in ((1, 2, 5) if last - first <= 2 else (1,))]
        inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        return (
            Axis(low, high, tuple(inside), log=True)
            if len(inside) > 1
            else Axis(ticks[0], ticks[-1], tuple(ticks), True)
        )
    if high - low <= 1e-9 * max(abs(high), abs(low), 1e-30):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    step = _round((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [float(f"{k * step:.12g}") for k in range(first, last + 1)]
    return Axis(min(ticks[0], low), max(ticks[-1], high), tuple(ticks))


def steps_axis(last: float) -> Axis:
    """From 0 to `last` itself, which need not be round."""
    last = max(last, 1)
    step = max(1.0, _round(last / 5))
    return Axis(0, last, tuple(k * step for k in range(int(last / step) + 1)))


def _round(step: float) -> float:
    """1, 2 or 5 times a power of ten, nearest from above."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


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
