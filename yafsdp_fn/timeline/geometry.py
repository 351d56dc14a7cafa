"""The geometry of pictures of timelines, of one stage or of a pipeline: lanes and rows in inches, boxes in seconds,
colours. Nothing is drawn here."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from yafsdp_fn.program.ops import (
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Receive,
    Reduce,
    Send,
    kind_of,
)
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.timeline.spans import Held, Idle, Span, Spans, grad_slots, weight_slots
from yafsdp_fn.timeline.text import because

# ---- Colours of a timeline: a ramp of hues over the layers of each stack, hues of their own for units outside of
# stacks.
#
# All weights are of one lightness and all gradients of another, darker one, so that forward and backward can be told
# apart at every layer. Hues are OKLCH's, in which equal lightness looks equal.

Colour = tuple[float, float, float]
LIGHT, DARK = (0.84, 0.085), (0.68, 0.125)  # lightness and chroma: forward and weights; backward and gradients
FIRST, LAST = 275.0, 135.0  # hues of the first and the last layer, in degrees: blue to green
OTHERS = (345.0, 435.0)  # pink to amber: of units outside of stacks
PLAIN: Colour = (0.78, 0.78, 0.78)  # of what belongs to no unit


def oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """The sRGB, in [0, 1], of a colour of OKLCH; what cannot be shown is clipped. hue: in degrees"""
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
        """The colour of a layer between the first and the last."""
        return oklch(*(DARK if dark else LIGHT), (FIRST + LAST) / 2)


def _between(first: float, last: float, k: int, count: int) -> float:
    return first + (last - first) * k / max(1, count - 1)


# ---- What is where in the picture of one stage: lanes of streams, and rows of slots below them.

COMPUTE, STREAM, STRIP, GAP = 0.40, 0.28, 0.13, 0.07  # heights
SLOT, BLOCK, MANY_SLOTS = 0.15, 1.25, 8  # of one slot; of all slots of a kind where they are more than so many
IDLE = {"gather": "#fbe1dc", "reduce": "#fbeccb", "all-reduce": "#fbeccb", "offload": "#dfe6f5", "fetch": "#dfe6f5"}
OTHERWISE = "#e5e7eb"  # idle for another reason
STRIP_COLOUR = "#d9dce1"
INSIDE, INSIDE_PART = "#4b3f72", 0.3  # collectives in a compute: their colour, and their part of its height


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
        return self.timeline.trace.units[self._leading(units)].stack if units else None

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
        if not units or (not hasattr(op, "visit") and (len(units) > 2 or isinstance(op, Norm))):
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
        """The name of a unit in a box, and the number if it is a layer's."""
        found = self.timeline.trace.units[unit]
        return (found.name.rpartition(".")[2], None) if found.stack is None else (str(found.layer), found.layer)

    def bars(self, stream: str) -> list[Bar]:
        return [self.bar(span) for span in self.timeline.on(stream)]

    def inside(self) -> list[Bar]:
        """The collectives of blocks, in the lane of computes."""
        return [Bar(each.start, each.end, INSIDE) for each in self.timeline.inside]

    def plain(self) -> list[Span]:
        """The spans in grey, of no layer, or neither weights nor gradients; as far as they can be seen."""
        seen = [span for span in self.timeline.spans if self.inches(span.seconds) > 0.02]
        return [span for span in seen if self.bar(span).colour == PLAIN]

    def idle(self) -> list[Bar]:
        """Gaps of compute, with what they waited for."""
        at = {span.number: span for span in self.timeline.spans}
        found = []
        for gap in self.timeline.idle():
            short = self.bar(at[gap.cause]).text if gap.waited and gap.cause is not None else ""
            text = f"{gap.why} {short}" if short else because(gap.why)
            found.append(Bar(gap.start, gap.end, IDLE.get(gap.why, OTHERWISE), text, short=short))
        return found


# ---- What is where in the picture of a pipeline: for each stage a row of its computes, and below it thin rows of what
# it communicates.

HUES = {"forward": 255.0, "backward": 150.0, "inputs": 190.0, "weights": 80.0}
THIN = {"gather": ("gather",), "reduce": ("reduce", "replicate"), "message": ("send", "receive")}  # row -> streams
THIN_COLOURS = {"gather": "#b9a7d6", "reduce": "#d9b98a", "message": "#6b7280"}
TINTS = IDLE | {"receive": "#ecebe4", "fill": "#f4f4f2", "drain": "#f4f4f2"}
TALL, ROW, BETWEEN = 0.27, 0.05, 0.1  # heights of a row of computes and of a thin one; between two stages


class Call(NamedTuple):
    """A stretch of compute without a break, in one call: a forward, a backward, or half of one.

    segment: its number among those of the stage, None for norm and update, which are no call
    first: number of its first op
    """

    start: float
    end: float
    kind: str
    microbatch: int
    segment: int | None
    first: int


class StagesLayout:
    """A pipeline, stage under stage. squeezed: part of the full height that a stage has, where there are many

    calls: by stage, in order; thin: names of the rows below each stage
    tall, pitch, height: of a row of computes, of a stage and of all of them
    segments: of the stage that has most
    """

    def __init__(self, timeline: Spans, squeezed: float = 1.0) -> None:
        self.timeline = timeline
        self.calls = [list(_calls(timeline, stage)) for stage in range(timeline.stage_count)]
        used = {span.stream for span in timeline.spans if span.seconds}
        self.thin = [name for name, streams in THIN.items() if used & set(streams)]
        self.tall = TALL * squeezed
        self.pitch = self.tall + ROW * len(self.thin) + BETWEEN * squeezed
        self.height = self.pitch * timeline.stage_count
        split = timeline.trace.split
        self.segments = 1 if split is None else max(map(split.homes.count, split.homes))

    def computes(self, stage: int) -> Lane:
        return Lane(f"stage {stage}", stage * self.pitch, self.tall)

    def rows(self, stage: int) -> Iterator[tuple[Lane, list[Span], str]]:
        """Yields the thin rows of a stage: each with the spans in it, and their colour."""
        for number, name in enumerate(self.thin):
            spans = [span for stream in THIN[name] for span in self.timeline.parts[stage].on(stream) if span.seconds]
            top = stage * self.pitch + self.tall + ROW * number + 0.01
            yield Lane(name, top, ROW - 0.01), spans, THIN_COLOURS[name]

    def colour(self, what: Call | Idle) -> Colour | str:
        """The colour of a call, or of a gap by what it waited for."""
        if isinstance(what, Idle):
            return TINTS.get(what.why, OTHERWISE)
        return PLAIN if what.segment is None else shade(what.kind, what.segment, self.segments)


def shade(kind: str, segment: int, count: int) -> Colour:
    """The colour of a call: a hue for each kind, darker from the first segment of a stage to the last."""
    return oklch(0.86 - 0.2 * segment / max(1, count - 1) if count > 1 else 0.8, 0.09, HUES[kind])


def _calls(timeline: Spans, stage: int) -> Iterator[Call]:
    """Yields the calls that compute does on `stage`, in order."""
    split, home = timeline.trace.split, timeline.trace.stage
    segments = () if split is None else split.of(stage if home is None else home)

    def of(span: Span) -> tuple[str, int, int | None]:
        if not isinstance(span.op, Forward | Backward):
            return "update", 0, None
        segment = 0 if split is None else segments.index(split.segment(span.op.visit))
        return kind_of(span.op), span.op.microbatch, segment

    for what, run in itertools.groupby(timeline.parts[stage].on("compute"), of):
        for spans in _unbroken(run):
            yield Call(spans[0].start, spans[-1].end, *what, spans[0].number)


def _unbroken(spans: Iterator[Span]) -> Iterator[list[Span]]:
    out: list[Span] = []
    for span in spans:
        if out and span.start > out[-1].end:
            yield out
            out = []
        out.append(span)
    yield out
