"""The layout of a picture of a timeline: rows in inches, boxes in seconds, colours and words. Nothing is drawn here.

of one stage        streams as lanes, slots below them; strips above compute say which microbatch and which stack it is
                    at, where there are several. Colour is the layer: light for weights, dark for gradients
of a pipeline       stage under stage: what compute does, in boxes of one call each, and thin rows of what it sends.
                    Colour is the kind of call, light to dark over the segments of a stage; numbers are microbatches
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from yafsdp_fn.program.ops import (
    AllReduce,
    Backward,
    ComputeOp,
    Fetch,
    Forward,
    Gather,
    MessageOp,
    Norm,
    Offload,
    Reduce,
    kind_of,
    name_of,
)
from yafsdp_fn.program.trace import Trace, UnitSpec
from yafsdp_fn.schedules.build import visited
from yafsdp_fn.timeline.spans import Held, Idle, Span, Spans, grad_slots, kind, sums, weight_slots
from yafsdp_fn.timeline.text import because, longest, share, shown

T = TypeVar("T")

# ---- A layout: rows of boxes.


class Bar(NamedTuple):
    """A box in a row, in seconds.

    kind: "op", "again" (a backward that recomputes its forward), "idle", "strip", "slot", "filling", "inside", "thin"
    words: of the legend; text: in it, where there is room; number: of the layer that `text` is, None where it is
    something else; short: instead of a `text` that has no room; op: the op's number, None where it is none
    """

    kind: str
    start: float
    end: float
    colour: str
    words: str = ""
    text: str = ""
    number: int | None = None
    short: str = ""
    op: int | None = None


class BoxRow(NamedTuple):
    """Boxes on one line. top: from the upper edge; name, aside: to the left and to the right of it

    stream: whose ops it shows, "" of what is beside them
    """

    name: str
    top: float
    height: float
    bars: tuple[Bar, ...] = ()
    stream: str = ""
    stage: int = 0
    aside: str = ""


class Sample(NamedTuple):
    """Words of the legend with the colours of their boxes, and the kind of these."""

    words: str
    colours: tuple[str, ...]
    kind: str


class Layout(NamedTuple):
    """The picture of one timeline. words: below its title; wanted: inches of the fullest row

    path: `row, start, end` of the critical path, spans that follow each other in one row together
    """

    timeline: Spans
    words: str
    height: float
    wanted: float
    rows: tuple[BoxRow, ...]
    path: tuple[tuple[BoxRow, float, float], ...]
    legend: tuple[Sample, ...]


# ---- Colours, as `#rrggbb`. All weights are of one lightness, and all gradients of another, darker one, so that
# forward and backward can be told apart at every layer. The steps of a ramp look equally far apart (they are of OKLCH).

# (light, dark): weights, gradients
LAYERS = ("bac7ff 9ed0ff 88d8f0 85ddd8 96dcbb b3d8a0", "8291e5 519ee1 00aacc 00b0ab 3cb082 76a958")  # first to last
OTHERS = ("f4b5d7 fdb4b9 faba9d ebc38c", "ce77aa da767f d77d54 c58c30")  # units outside of stacks
CALLS = {  # kind -> words of the legend, and the ramp over the segments of a stage
    "forward": ("forward", "a9d4ff 6c95c9"),
    "backward": ("backward", "a7e2b2 69a275"),
    "inputs": ("gradients of inputs", "87e4de 44a49e"),
    "weights": ("of weights", "f0cb8d af8c4f"),
}

GREY = "#c7c7c7"  # what belongs to no unit
WHITE = "#ffffff"
STRIP_COLOUR = "#d9dce1"
INSIDE = "#4b3f72"  # collectives in a compute
OTHERWISE = "#e5e7eb"  # idle for another reason
IDLE = {  # why compute is idle -> the colour
    "gather": "#fbe1dc",
    "reduce": "#fbeccb",
    "all-reduce": "#fbeccb",
    "offload": "#dfe6f5",
    "fetch": "#dfe6f5",
    "receive": "#ecebe4",
}
THIN = (  # rows below a stage: words, colour, and streams
    ("gathers", "#b9a7d6", {"gather"}),
    ("reductions", "#d9b98a", {"reduce", "replicate"}),
    ("messages", "#6b7280", {"send", "receive"}),
)


def on_ramp(codes: str, part: float) -> str:
    """Returns the colour at a part of the way from the first of some to the last."""
    steps = [bytes.fromhex(code) for code in codes.split()]
    at = part * (len(steps) - 1)
    low = min(int(at), len(steps) - 2)
    pairs = zip(steps[low], steps[low + 1], strict=True)
    mixed = bytes(round(a + (b - a) * (at - low)) for a, b in pairs)
    return f"#{mixed.hex()}"


OF_WEIGHTS = (Gather, Forward, Offload)
OF_GRADIENTS = (Backward, Reduce, AllReduce, Fetch)
"""The kinds of ops that have a layer's colour."""


def _places(groups: Sequence[Sequence[UnitSpec]]) -> dict[int, float]:
    """Unit -> its place on a ramp. From one group to the next it jumps by half of what a group has."""
    found = {}
    for number, group in enumerate(groups):
        for k, unit in enumerate(group):
            at = 1.5 * number + k / max(1, len(group) - 1)
            found[unit.id] = at / (1.5 * len(groups) - 0.5)
    return found


class Palette:
    """The colours and the names of one model's units. stacks: name -> its layers; others: units outside of stacks; both
    in the order in which they are visited first."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.others: list[UnitSpec] = []
        self.stacks: dict[str, list[UnitSpec]] = {}
        for number in dict.fromkeys([*visited(trace), *range(len(trace.units))]):
            unit = trace.units[number]
            if unit.stack is None:
                self.others.append(unit)
            else:
                self.stacks.setdefault(unit.stack, []).append(unit)
        for layers in self.stacks.values():
            layers.sort(key=attrgetter("id"))  # a stage visits some of them
        self._place = {**_places([self.others]), **_places([*self.stacks.values()])}
        self._words = {unit.id: (unit.name, unit.name) for unit in self.others[:4]}
        for name, layers in self.stacks.items():
            of = f" of {name}" * (len(self.stacks) > 1)
            words = f"forward and weights, layers {layers[0].layer} to {layers[-1].layer}{of}"
            self._words |= {unit.id: (words, "backward and gradients" + of) for unit in layers}

    def of(self, unit: int, dark: bool) -> str:
        ramps = OTHERS if self.trace.units[unit].stack is None else LAYERS
        return on_ramp(ramps[dark], self._place[unit])

    def leading(self, op: Any) -> UnitSpec | None:
        """Returns the unit that an op is shown as: the first of its units that is a layer, or the first; None without
        any."""
        units = [self.trace.units[unit] for unit in self.trace.units_of(op)]
        layers = [unit for unit in units if unit.stack is not None]
        return next(iter(layers or units), None)

    def bar(self, kind: str, start: float, end: float, unit: UnitSpec, dark: bool) -> Bar:
        """Returns a box that shows a unit."""
        text = unit.name.rpartition(".")[2] if unit.stack is None else str(unit.layer)
        number = None if unit.stack is None else unit.layer
        words = self._words.get(unit.id, ("", ""))[dark]
        return Bar(kind, start, end, self.of(unit.id, dark), words, text, number)

    def box(self, span: Span) -> Bar:
        """Returns the box of an op, and what is written in it."""
        op = span.op
        plain = _grey(span)
        if isinstance(op, MessageOp):
            return plain._replace(short=str(op.microbatch))
        unit = self.leading(op)
        if unit is None or isinstance(op, Norm) or len(getattr(op, "units", ())) > 2:
            return plain
        named = self.bar("op", span.start, span.end, unit, isinstance(op, OF_GRADIENTS))
        if isinstance(op, OF_WEIGHTS + OF_GRADIENTS):
            return named._replace(op=span.number)
        return plain._replace(short=named.text)


def _grey(span: Span) -> Bar:
    """Returns the box of an op that is of no one unit."""
    name = name_of(span.op)
    return Bar("op", span.start, span.end, GREY, name, name, op=span.number)


# ---- What both layouts have.

SEEN = 0.002  # part of the step: what takes less of it is not explained


def _layout(timeline: Spans, words: str, per_op: float, rows: list[BoxRow]) -> Layout:
    """Adds the collectives of blocks, the critical path, and the legend. per_op: wanted inches, of the fullest row"""
    height = max((row.top + row.height for row in rows), default=0.0) + GAP
    lanes = {(row.stage, row.stream): row for row in rows if row.stream}
    most = 0
    for row in lanes.values():
        most = max(most, sum(bar.kind != "idle" for bar in row.bars))
        if row.stream == "compute":
            rows.append(_inside(timeline.by_stage[row.stage], row))
    along = [span for span in timeline.critical_path() if (span.stage, span.stream) in lanes]
    path = _runs((lanes[span.stage, span.stream], span) for span in along)
    words = f"step {shown(timeline.seconds)}, {words}; idle {longest(timeline.bubbles())}"
    legend = tuple(_legend(timeline, rows))
    return Layout(timeline, words, height, per_op * most, tuple(rows), tuple(path), legend)


def _legend(timeline: Spans, rows: Iterable[BoxRow]) -> Iterator[Sample]:
    """Yields the words of boxes, with all their colours: of layers in order, then of others."""
    bars = [bar for row in rows for bar in row.bars if bar.words]
    bars.sort(key=lambda bar: math.inf if bar.number is None else bar.number)
    seconds = sums((bar.words, bar.end - bar.start) for bar in bars)
    for words, total in seconds.items():
        if total > SEEN * timeline.seconds:
            named = [bar for bar in bars if bar.words == words]
            yield Sample(words, tuple(dict.fromkeys(bar.colour for bar in named)), named[0].kind)


def _runs(placed: Iterable[tuple[T, Span]]) -> Iterator[tuple[T, float, float]]:
    """Yields where spans are, from when to when, those together that follow each other in one place."""
    for at, run in itertools.groupby(placed, itemgetter(0)):
        spans = [span for _, span in run]
        yield at, spans[0].start, spans[-1].end


def _inside(spans: Spans, row: BoxRow) -> BoxRow:
    """Returns the collectives of blocks, at the foot of a row of computes."""
    bars = tuple(
        Bar("inside", each.start, each.end, INSIDE, "collectives in a block", each.name) for each in spans.inside
    )
    low = 0.3 * row.height
    return BoxRow("", row.top + row.height - low, low, bars, stage=row.stage)


# ---- The layout of one stage.

COMPUTE, STREAM, STRIP, GAP = 0.40, 0.28, 0.13, 0.07  # heights
SLOT, BLOCK, MANY_SLOTS = 0.15, 1.25, 8  # of one slot; of all slots of a kind where they are more than so many
PER_OP = 0.085  # wanted width of an op of the fullest lane


def of_stage(timeline: Spans) -> Layout:
    """Lanes of streams, and rows of slots below them."""
    palette = Palette(timeline.trace)
    rows: list[BoxRow] = []
    top = 0.0
    for stream in timeline.streams:
        if stream == "compute":
            for name, strip in _strips(timeline, palette):
                rows.append(BoxRow(name, top, STRIP, strip))
                top += STRIP + 0.02
            height = COMPUTE
            boxes = _computes(timeline, palette)
        else:
            height = STREAM
            boxes = map(palette.box, timeline.on(stream))
        rows.append(BoxRow(stream, top, height, tuple(boxes), stream))
        top += height + GAP
    for name, held, dark in (("slot", weight_slots(timeline), False), ("grad slot", grad_slots(timeline), True)):
        if held:
            rows += _slots(name, top + GAP, held, palette, dark)
            top = rows[-1].top + rows[-1].height + GAP
    return _layout(timeline, f"compute busy {share(timeline)}", PER_OP, rows)


def _computes(timeline: Spans, palette: Palette) -> Iterator[Bar]:
    """Yields the boxes of computes, of which some backwards recompute their forwards; then those of gaps, whose labels
    come second."""
    kept = set()
    for span in timeline.on("compute"):
        op = span.op
        box = palette.box(span)
        if isinstance(op, Forward) and op.keep:
            kept.add((op.visit, op.microbatch))
        elif isinstance(op, Backward) and (op.visit, op.microbatch) not in kept and box.number is not None:
            box = box._replace(kind="again", words="recomputes its forward first")
        yield box
    for gap in timeline.idle():
        box = _idle(gap)
        cause = timeline.by_number.get(gap.cause)
        if cause is not None and gap.why == kind(cause):
            other = palette.box(cause)
            name = other.short or other.text
            box = box._replace(text=f"{gap.why} {name}", short=name)
        yield box


def _idle(gap: Idle) -> Bar:
    why = because(gap.why)
    return Bar("idle", gap.start, gap.end, IDLE.get(gap.why, OTHERWISE), f"idle: {why}", why)


def _strips(timeline: Spans, palette: Palette) -> Iterator[tuple[str, tuple[Bar, ...]]]:
    """Yields which of several microbatches compute is at, and in which of several stacks."""
    computes = [span for span in timeline.on("compute") if isinstance(span.op, ComputeOp)]
    microbatches = [str(span.microbatch) for span in computes]
    stacks = [getattr(palette.leading(span.op), "stack", None) or "" for span in computes]
    for name, of in (("microbatch", microbatches), ("stack", stacks)):
        bars = []
        for text, start, end in _runs(zip(of, computes, strict=True)):
            bars.append(Bar("strip", start, end, STRIP_COLOUR, text=text, short=text.rpartition(".")[2]))
        if len({*of} - {""}) > 1:
            yield name, tuple(bar for bar in bars if bar.text)


def _slots(name: str, top: float, held: Sequence[Held], palette: Palette, dark: bool) -> Iterator[BoxRow]:
    """Yields a row per slot that is used; thin ones under one name where there are many."""
    numbers = sorted({each.slot for each in held})
    many = len(numbers) > MANY_SLOTS
    height, gap = (BLOCK / len(numbers), 0.0) if many else (SLOT, 0.03)
    if many:
        yield BoxRow(f"{len(numbers)} {name}s", top, BLOCK)
    for slot in numbers:
        own = [each for each in held if each.slot == slot]
        units = palette.trace.units
        bars = [palette.bar("slot", each.start, each.end, units[each.unit], dark) for each in own]
        bars += [Bar("filling", each.start, each.ready, WHITE, "slot being filled") for each in own]
        yield BoxRow("" if many else f"{name} {slot}", top, height, tuple(bars))
        top += height + gap


# ---- The layout of a pipeline.

TALL, THIN_ROW, BETWEEN = 0.27, 0.05, 0.1  # heights of a row of computes and of a thin one; between two stages
PER_CALL = 0.17  # wanted width of a call of the fullest stage
UNUSED = ("fill", "drain", "overhead")  # idle, and no wait: the row is empty there


def of_stages(timeline: Spans) -> Layout:
    """Stage under stage; without stages a row alone."""
    several = timeline.stage_count > 1
    rows: list[BoxRow] = []
    top = 0.0
    for stage, part in enumerate(timeline.by_stage):
        idle = [_idle(gap)._replace(text="") for gap in part.idle() if gap.why not in UNUSED]
        name = f"stage {stage}" if several else "compute"
        rows.append(BoxRow(name, top, TALL, (*_calls(part), *idle), "compute", stage, share(part)))
        top += TALL
        for words, colour, streams in THIN[: 2 + several]:
            spans = [span for span in part.spans if span.stream in streams]
            bars = tuple(Bar("thin", span.start, span.end, colour, words, op=span.number) for span in spans)
            rows.append(BoxRow("", top + 0.01, THIN_ROW - 0.01, bars, stage=stage))
            top += THIN_ROW
        top += BETWEEN
    return _layout(timeline, f"bubble {timeline.bubble:.1%}", PER_CALL, rows)


def _calls(part: Spans) -> list[Bar]:
    """Returns the boxes of compute: each a stretch without a break in one call. Norms and updates are in no call."""
    split = part.trace.cut
    segments = max(map(split.homes.count, split.homes))
    found: list[Bar] = []
    for span in part.on("compute"):
        op = span.op
        box = _grey(span)
        if isinstance(op, ComputeOp):
            # colours tell apart the segments of a stage
            segment = split.of(part.trace.stage or 0).index(split.segment(op.visit))
            place = segment / (segments - 1) if segments > 1 else 0.3
            words, ramp = CALLS[kind_of(op)]
            text = str(op.microbatch) if part.trace.microbatches > 1 else ""
            box = box._replace(colour=on_ramp(ramp, place), words=words, text=text)
        if found and (found[-1].colour, found[-1].text) == (box.colour, box.text) and box.start <= found[-1].end:
            box = found.pop()._replace(end=box.end)
        found.append(box)
    return found
