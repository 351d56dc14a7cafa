"""What is where in the picture of a timeline: lanes and rows in inches, boxes in seconds. Nothing is drawn here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from yafsdp_fn.schedules.ops import AllReduce, Backward, Fetch, Forward, Gather, Norm, Offload, Reduce, units_of
from yafsdp_fn.timeline.colours import PLAIN, Palette
from yafsdp_fn.timeline.slots import Held, grad_slots, weight_slots
from yafsdp_fn.timeline.text import because, gaps
from yafsdp_fn.timeline.timeline import Span, Timeline

COMPUTE, STREAM, STRIP, GAP = 0.40, 0.28, 0.13, 0.07  # heights
SLOT, BLOCK, MANY_SLOTS = 0.15, 1.25, 8  # of one slot; of all slots of a kind where they are more than so many
IDLE = {
    "gather": "#fbe1dc",
    "reduce": "#fbeccb",
    "all-reduce": "#fbeccb",
    "offload": "#dfe6f5",
    "fetch": "#dfe6f5",
    "host": "#e5e7eb",
    "end": "#e5e7eb",
    "overhead": "#e5e7eb",
}

STRIP_COLOUR = "#d9dce1"


class Lane(NamedTuple):
    """A row of the picture. top: distance from the upper edge of its panel"""

    name: str
    top: float
    height: float


class Bar(NamedTuple):
    """A box in a lane, in seconds.

    number: of the layer that `text` is, None where it is something else; short: instead of a `text` that does not fit
    """

    start: float
    end: float
    colour: Any
    text: str = ""
    number: int | None = None
    dark: bool = False
    hatched: bool = False
    short: str = ""


class Layout:
    """One timeline in `across` inches of `seconds`, which two timelines may share.

    lanes: by stream; rows: `(slot -> lane, what the slots hold, whether they are gradients)` for each kind of slot
    strips: above compute, `(lane, what compute was at)`
    named: lanes of slots, as they are named at the side; recomputing: numbers of backwards without a kept graph
    """

    def __init__(self, timeline: Timeline, across: float, seconds: float) -> None:
        self.timeline, self.across, self.seconds = timeline, across, seconds or 1.0
        self.palette = Palette(timeline.trace)
        self.lanes: dict[str, Lane] = {}
        self.named: list[Lane] = []
        top = 0.0
        self.strips: list[tuple[Lane, list[Bar]]] = []
        for stream in timeline.streams:
            if stream == "compute":
                top = self._add_strips(top)
            height = COMPUTE if stream == "compute" else STREAM
            self.lanes[stream] = Lane(stream, top, height)
            top += height + GAP
        self.rows: list[tuple[dict[int, Lane], list[Held], bool]] = []
        for name, held, dark in (("slot", weight_slots(timeline), False), ("grad slot", grad_slots(timeline), True)):
            if held:
                top += GAP
                top = self._add_rows(name, held, dark, top)
        self.height = top
        kept = {(s.op.visit, s.microbatch) for s in timeline.spans if isinstance(s.op, Forward) and s.op.keep}
        self.recomputing = {
            s.number for s in timeline.spans if isinstance(s.op, Backward) and (s.op.visit, s.microbatch) not in kept
        }

    def _add_strips(self, top: float) -> float:
        """Strips above compute that say which of several microbatches it is at, and in which of several stacks."""
        units, visits = self.timeline.trace.units, self.timeline.trace.visits
        computes = [(span, span.op.visit) for span in self.timeline.spans if isinstance(span.op, Forward | Backward)]
        microbatches = [(span, span.microbatch) for span, _ in computes]
        stacks = [(span, units[self._leading(visits[visit].units)].stack) for span, visit in computes]
        for name, found in (("microbatch", microbatches), ("stack", stacks)):
            if len({what for _, what in found} - {None}) < 2:
                continue
            runs = [(what, [span for span, _ in run]) for what, run in itertools.groupby(found, lambda pair: pair[1])]
            bars = [
                Bar(run[0].start, run[-1].end, STRIP_COLOUR, str(what), short=str(what).rpartition(".")[2])
                for what, run in runs
                if what is not None
            ]
            self.strips.append((Lane(name, top, STRIP), bars))
            top += STRIP + 0.02
        return top

    def _add_rows(self, name: str, held: list[Held], dark: bool, top: float) -> float:
        """A row per slot; thin ones under one name where there are many."""
        numbers = sorted({each.slot for each in held})
        many = len(numbers) > MANY_SLOTS
        height = BLOCK / len(numbers) if many else SLOT
        gap = 0.0 if many else 0.03
        rows = {slot: Lane("", top + k * (height + gap), height) for k, slot in enumerate(numbers)}
        if many:
            self.named.append(Lane(f"{len(numbers)} {name}s", top, BLOCK))
        else:
            self.named += [row._replace(name=f"{name} {slot}") for slot, row in rows.items()]
        self.rows.append((rows, held, dark))
        return top + (height + gap) * len(numbers) + GAP

    def inches(self, seconds: float) -> float:
        return seconds / self.seconds * self.across

    def bar(self, span: Span) -> Bar:
        """The box of an op, and what is written in it: the layer of the first of its units that is one."""
        op = span.op
        units = units_of(op, self.timeline.trace)
        few = hasattr(op, "visit") or (1 <= len(units) <= 2 and not isinstance(op, Norm))
        if not few:
            return Bar(span.start, span.end, PLAIN, type(op).__name__.lower())
        unit = self._leading(units)
        dark = isinstance(op, Backward | Reduce | AllReduce | Fetch)
        if not isinstance(op, Gather | Forward | Backward | Reduce | AllReduce | Offload | Fetch):
            return Bar(span.start, span.end, PLAIN, self.label(unit)[0])
        colour = self.palette.of(unit, dark)
        return Bar(span.start, span.end, colour, *self.label(unit), dark, span.number in self.recomputing)

    def _leading(self, units: Sequence[int]) -> int:
        """The unit that an op of several is shown as: the first that is a layer."""
        return next((unit for unit in units if self.timeline.trace.units[unit].stack is not None), units[0])

    def label(self, unit: int) -> tuple[str, int | None]:
        """What a unit is called in a box, and the number if it is a layer's."""
        found = self.timeline.trace.units[unit]
        return (found.name.rpartition(".")[2], None) if found.stack is None else (str(found.layer), found.layer)

    def bars(self, stream: str) -> list[Bar]:
        return [self.bar(span) for span in self.timeline.on(stream)]

    def plain(self) -> list[Span]:
        """What is grey, as it is of no layer, or neither weights nor gradients; as far as it can be seen."""
        seen = [span for span in self.timeline.spans if self.inches(span.seconds) > 0.02]
        return [span for span in seen if self.bar(span).colour == PLAIN]

    def idle(self) -> list[Bar]:
        """Gaps of compute, with what they waited for."""
        found = []
        for gap in gaps(self.timeline):
            short = "" if gap.cause is None else self.bar(gap.cause).text
            text = f"{gap.why} {short}" if short else because(gap.why)
            found.append(Bar(gap.start, gap.end, IDLE.get(gap.why, IDLE["host"]), text, short=short))
        return found
