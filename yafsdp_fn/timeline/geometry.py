"""What is where in the picture of a timeline: lanes and rows in inches, boxes in seconds. Nothing is drawn here."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from yafsdp_fn.schedules.further_ops import AllReduce, Fetch, Offload, Receive, Send
from yafsdp_fn.schedules.ops import Backward, Forward, Gather, Norm, Reduce
from yafsdp_fn.timeline.colours import PLAIN, Palette
from yafsdp_fn.timeline.slot_contents import Held, grad_slots, weight_slots
from yafsdp_fn.timeline.spans import Span, Spans
from yafsdp_fn.timeline.text import because, gaps

COMPUTE, STREAM, STRIP, GAP = 0.40, 0.28, 0.13, 0.07  # heights
SLOT, BLOCK, MANY_SLOTS = 0.15, 1.25, 8  # of one slot; of all slots of a kind where they are more than so many
IDLE = {"gather": "#fbe1dc", "reduce": "#fbeccb", "all-reduce": "#fbeccb", "offload": "#dfe6f5", "fetch": "#dfe6f5"}
OTHERWISE = "#e5e7eb"  # idle for another reason
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

    def __init__(self, timeline: Spans, across: float, seconds: float) -> None:
        self.timeline, self.across, self.seconds = timeline, across, seconds or 1.0
        self.palette = Palette(timeline.trace)
        self.lanes: dict[str, Lane] = {}
        self.strips: list[tuple[Lane, list[Bar]]] = []
        self.rows: list[tuple[dict[int, Lane], list[Held], bool]] = []
        self.named: list[Lane] = []
        self.height = 0.0  # of what is there so far
        for stream in timeline.streams:
            if stream == "compute":
                self._add_strips()
            height = COMPUTE if stream == "compute" else STREAM
            self.lanes[stream] = Lane(stream, self.height, height)
            self.height += height + GAP
        self._add_rows("slot", weight_slots(timeline), dark=False)
        self._add_rows("grad slot", grad_slots(timeline), dark=True)
        kept = {(s.op.visit, s.microbatch) for s in timeline.spans if isinstance(s.op, Forward) and s.op.keep}
        backwards = {s.number: (s.op.visit, s.microbatch) for s in timeline.spans if isinstance(s.op, Backward)}
        self.recomputing = {number for number, at in backwards.items() if at not in kept}

    def _add_strips(self) -> None:
        """Strips above compute that say which of several microbatches it is at, and in which of several stacks."""
        computes = [span for span in self.timeline.spans if isinstance(span.op, Forward | Backward)]
        for name, place in {"microbatch": lambda span: span.microbatch, "stack": self._stack}.items():
            runs = [(str(at), list(run)) for at, run in itertools.groupby(computes, place) if at is not None]
            if len({at for at, _ in runs}) > 1:
                ends = [(run[0].start, run[-1].end, at) for at, run in runs]
                bars = [Bar(start, end, STRIP_COLOUR, at, short=at.rpartition(".")[2]) for start, end, at in ends]
                self.strips.append((Lane(name, self.height, STRIP), bars))
                self.height += STRIP + 0.02

    def _stack(self, span: Span) -> str | None:
        units = self.timeline.trace.units_of(span.op)
        return self.timeline.trace.units[self._leading(units)].stack

    def _add_rows(self, name: str, held: list[Held], dark: bool) -> None:
        """A row per slot that is used; thin ones under one name where there are many."""
        if not held:
            return
        numbers, top = sorted({each.slot for each in held}), self.height + GAP
        many = len(numbers) > MANY_SLOTS
        height, gap = (BLOCK / len(numbers), 0.0) if many else (SLOT, 0.03)
        rows = {slot: Lane("", top + k * (height + gap), height) for k, slot in enumerate(numbers)}
        if many:
            self.named.append(Lane(f"{len(numbers)} {name}s", top, BLOCK))
        else:
            self.named += [row._replace(name=f"{name} {slot}") for slot, row in rows.items()]
        self.rows.append((rows, held, dark))
        self.height = top + (height + gap) * len(numbers) + GAP

    def inches(self, seconds: float) -> float:
        return seconds / self.seconds * self.across

    def bar(self, span: Span) -> Bar:
        """The box of an op, and what is written in it: the layer of the first of its units that is one."""
        op = span.op
        if isinstance(op, Send | Receive):
            return Bar(span.start, span.end, PLAIN, str(op.microbatch))
        units = self.timeline.trace.units_of(op)
        if not hasattr(op, "visit") and (not 1 <= len(units) <= 2 or isinstance(op, Norm)):
            return Bar(span.start, span.end, PLAIN, type(op).__name__.lower())
        unit = self._leading(units)
        text, number = self.label(unit)
        dark = isinstance(op, Backward | Reduce | AllReduce | Fetch)
        if not dark and not isinstance(op, Gather | Forward | Offload):
            return Bar(span.start, span.end, PLAIN, text)
        colour = self.palette.of(unit, dark)
        return Bar(span.start, span.end, colour, text, number, dark, span.number in self.recomputing)

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
            found.append(Bar(gap.start, gap.end, IDLE.get(gap.why, OTHERWISE), text, short=short))
        return found
