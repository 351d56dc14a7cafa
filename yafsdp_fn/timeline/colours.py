"""Colours of a timeline: a ramp of hues over the layers of each stack, hues of their own for units outside of stacks.

All weights are of one lightness and all gradients of another, darker one, so that forward and backward can be told
apart at every layer. Hues are OKLCH's, in which equal lightness looks equal.
"""

import math

from yafsdp_fn.schedules.trace import Trace

Colour = tuple[float, float, float]
LIGHT, DARK = (0.84, 0.085), (0.68, 0.125)  # lightness and chroma: forward and weights; backward and gradients
FIRST, LAST = 275.0, 135.0  # hues of the first and the last layer, in degrees: blue to green
OTHERS = (345.0, 435.0)  # pink to amber: of units outside of stacks
PLAIN: Colour = (0.78, 0.78, 0.78)  # of what belongs to no unit


def oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """sRGB in [0, 1]; what cannot be shown is clipped. hue: in degrees"""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )
    shown = (min(1.0, max(0.0, x)) for x in linear)
    red, green, blue = (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055 for x in shown)
    return red, green, blue


class Palette:
    """The colours of one model. stacks: name -> its layers; others: units outside of stacks; both as they are visited.

    Hues jump from one stack to the next, by half of what a stack has.
    """

    def __init__(self, trace: Trace) -> None:
        visited = dict.fromkeys([*(unit for visit in trace.visits for unit in visit.units), *range(len(trace.units))])
        units = [trace.units[unit] for unit in visited]
        self.others = [unit for unit in units if unit.stack is None]
        names = dict.fromkeys(unit.stack for unit in units if unit.stack is not None)
        self.stacks = {name: [unit for unit in trace.units if unit.stack == name] for name in names}
        self._hue = {unit.id: _between(*OTHERS, k, len(self.others)) for k, unit in enumerate(self.others)}
        share = (LAST - FIRST) / max(1.0, 1.5 * len(names) - 0.5)
        for number, layers in enumerate(self.stacks.values()):
            first = FIRST + 1.5 * share * number
            self._hue |= {unit.id: _between(first, first + share, k, len(layers)) for k, unit in enumerate(layers)}

    def of(self, unit: int, dark: bool) -> Colour:
        return oklch(*(DARK if dark else LIGHT), self._hue[unit])

    def middle(self, dark: bool) -> Colour:
        """Of a layer between the first and the last."""
        return oklch(*(DARK if dark else LIGHT), (FIRST + LAST) / 2)


def _between(first: float, last: float, k: int, count: int) -> float:
    return first + (last - first) * k / max(1, count - 1)
