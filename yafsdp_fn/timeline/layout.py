"""The layout of a picture of a timeline: rows in inches, boxes in seconds, colours and words. Nothing is drawn here.

of one stage        streams as lanes, slots below them; strips above compute say which microbatch and which stack it is
                    at, where there are several. Colour is the layer: light for weights, dark for gradients
of a pipeline       stage under stage: what compute does, in boxes of one call each, and thin rows of what it sends.
                    Colour is the kind of call, light to dark over the segments of a stage; numbers are microbatches
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

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
from yafsdp_fn.program.trace import Trace, UnitSpec
from yafsdp_fn.timeline.spans import Held, Idle, Span, Spans, grad_slots, weight_slots
from yafsdp_fn.timeline.text import because, longest, shown

T = TypeVar("T")

# ---- A layout: rows of boxes.


class Bar(NamedTuple):
    """A box in a row, in seconds.

    kind: "op", "again" (a backward that recomputes its forward), "idle", "strip", "slot", "filling", "inside", "thin"
    text: in it, where there is room; number: of the layer that `text` is, None where it is something else
    short: instead of a `text` that has no room; dark: of gradients; op: the op's number, None where it is none
    """

    kind: str
    start: float
    end: float
    colour: str
    text: str = ""
    number: int | None = None
    short: str = ""
    dark: bool = False
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
    """Words of the legend with their colours. of: the kind of boxes that it explains, where that is not their colour"""

    words: str
    colours: tuple[str, ...]
    of: str = ""


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
FILLING = "#c3edf2"  # in the legend: a slot between two layers, paler
INSIDE = "#4b3f72"  # collectives in a compute
OTHERWISE = "#e5e7eb"  # idle for another reason
IDLE = {  # why compute is idle -> the colour
    "gather": "#fbe1dc",
    "reduce": "#fbeccb",
    "all-reduce": "#fbeccb",
    "offload": "#dfe6f5",
    "fetch": "#dfe6f5",
    "receive": "#ecebe4",
    "fill": "#f4f4f2",
    "drain": "#f4f4f2",
}
THIN = {  # row -> its streams, and its colour
    "gathers": (("gather",), "#b9a7d6"),
    "reductions": (("reduce", "replicate"), "#d9b98a"),
    "messages": (("send", "receive"), "#6b7280"),
}


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
        visited = [unit for visit in trace.visits for unit in visit.units]
        for number in dict.fromkeys([*visited, *range(len(trace.units))]):
            unit = trace.units[number]
            (self.others if unit.stack is None else self.stacks.setdefault(unit.stack, [])).append(unit)
        for layers in self.stacks.values():
            layers.sort(key=attrgetter("id"))  # a stage visits some of them
        self._place = {**_places([self.others]), **_places([*self.stacks.values()])}

    def of(self, unit: int, dark: bool) -> str:
        ramps = OTHERS if self.trace.units[unit].stack is None else LAYERS
        return on_ramp(ramps[dark], self._place[unit])

    def ramp(self, units: Iterable[UnitSpec], dark: bool) -> tuple[str, ...]:
        return tuple(self.of(unit.id, dark) for unit in units)

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
        return Bar(kind, start, end, self.of(unit.id, dark), text, number, dark=dark)

    def box(self, span: Span) -> Bar:
        """Returns the box of an op, and what is written in it."""
        op = span.op
        plain = Bar("op", span.start, span.end, GREY, type(op).__name__.lower(), op=span.number)
        if isinstance(op, Send | Receive):
            return plain._replace(short=str(op.microbatch))
        unit = self.leading(op)
        if unit is None or isinstance(op, Norm) or len(getattr(op, "units", ())) > 2:
            return plain
        named = self.bar("op", span.start, span.end, unit, isinstance(op, OF_GRADIENTS))
        if isinstance(op, OF_WEIGHTS + OF_GRADIENTS):
            return named._replace(op=span.number)
        return plain._replace(short=named.text)


# ---- What both layouts have.

SEEN = 0.002  # part of the step: what is grey and shorter is not explained
SAMPLES = (  # behind a layout's own, in every legend
    Sample("recomputes its forward first", (on_ramp(LAYERS[True], 0.5),), "again"),
    Sample("collectives in a block", (INSIDE,)),
    Sample("slot being filled", (FILLING,), "filling"),
    *(Sample(words, (colour,)) for words, (_, colour) in THIN.items()),
)


def _layout(timeline: Spans, words: str, wanted: float, rows: list[BoxRow], own: Iterable[Sample]) -> Layout:
    """Adds the collectives of blocks, the critical path, and the legend of what is in some row. own: samples of a
    layout"""
    height = rows[-1].top + rows[-1].height + GAP
    lanes = {(row.stage, row.stream): row for row in rows if row.stream}
    rows += [_inside(timeline.by_stage[row.stage], row) for row in lanes.values() if row.stream == "compute"]
    along = [span for span in timeline.critical_path() if (span.stage, span.stream) in lanes]
    path = tuple(_runs((lanes[span.stage, span.stream], span) for span in along))
    bars = [bar for row in rows for bar in row.bars]
    seen = SEEN * timeline.seconds
    grey = {bar.text for bar in bars if bar.colour == GREY and bar.end - bar.start > seen}
    samples = [*own, *SAMPLES]
    if grey:
        samples.append(Sample(", ".join(sorted(grey)), (GREY,)))
    for why, seconds in timeline.bubbles().items():
        if seconds > seen:
            samples.append(Sample(f"idle: {because(why)}", (IDLE.get(why, OTHERWISE),)))
    found = {bar.kind for bar in bars} | {bar.colour for bar in bars}
    legend = tuple(sample for sample in samples if found & ({sample.of} if sample.of else {*sample.colours}))
    return Layout(timeline, words, height, wanted, tuple(rows), path, legend)


def _runs(placed: Iterable[tuple[T, Span]]) -> Iterator[tuple[T, float, float]]:
    """Yields where spans are, from when to when, those together that follow each other in one place."""
    for at, run in itertools.groupby(placed, itemgetter(0)):
        spans = [span for _, span in run]
        yield at, spans[0].start, spans[-1].end


def _inside(spans: Spans, row: BoxRow) -> BoxRow:
    """Returns the collectives of blocks, at the foot of a row of computes."""
    bars = tuple(Bar("inside", each.start, each.end, INSIDE, each.name) for each in spans.inside)
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
    top, most = 0.0, 0
    for stream in timeline.streams:
        boxes = [palette.box(span) for span in timeline.on(stream)]
        most = max(most, len(boxes))
        height = STREAM
        if stream == "compute":
            for name, strip in _strips(timeline, palette):
                rows.append(BoxRow(name, top, STRIP, strip))
                top += STRIP + 0.02
            idle = [_gap(gap, timeline, palette) for gap in timeline.idle()]
            boxes = [*_recomputing(timeline, boxes), *idle]  # labels of gaps come second
            height = COMPUTE
        rows.append(BoxRow(stream, top, height, tuple(boxes), stream))
        top += height + GAP
    for name, held, dark in (("slot", weight_slots(timeline), False), ("grad slot", grad_slots(timeline), True)):
        if held:
            rows += _slots(name, top + GAP, held, palette, dark)
            top = rows[-1].top + rows[-1].height + GAP
    words = f"step {shown(timeline.seconds)}, compute busy {timeline.compute_s / (timeline.seconds or 1.0):.0%}"
    return _layout(timeline, f"{words}; idle {longest(timeline.bubbles())}", PER_OP * most, rows, _units(palette))


def _recomputing(timeline: Spans, boxes: Iterable[Bar]) -> Iterator[Bar]:
    """Yields the boxes of computes, of which some backwards recompute their forwards."""
    kept = set()
    for box in boxes:
        op = timeline.by_number[box.op].op
        if isinstance(op, Forward) and op.keep:
            kept.add((op.visit, op.microbatch))
        again = isinstance(op, Backward) and (op.visit, op.microbatch) not in kept
        yield box._replace(kind="again") if again and box.number is not None else box


def _gap(gap: Idle, timeline: Spans, palette: Palette) -> Bar:
    """Returns the box of a gap of compute, with what it waited for."""
    plain = Bar("idle", gap.start, gap.end, IDLE.get(gap.why, OTHERWISE), because(gap.why))
    cause = timeline.by_number.get(gap.cause)
    if cause is None or not gap.waited:
        return plain
    box = palette.box(cause)
    name = box.short or box.text
    return plain._replace(text=f"{gap.why} {name}", short=name)


def _strips(timeline: Spans, palette: Palette) -> Iterator[tuple[str, tuple[Bar, ...]]]:
    """Yields which of several microbatches compute is at, and in which of several stacks."""
    computes = [span for span in timeline.on("compute") if isinstance(span.op, Forward | Backward)]
    microbatches = [str(span.microbatch) for span in computes]
    stacks = [getattr(palette.leading(span.op), "stack", None) or "" for span in computes]
    for name, of in (("microbatch", microbatches), ("stack", stacks)):
        bars = []
        for text, start, end in _runs(zip(of, computes, strict=True)):
            bars.append(Bar("strip", start, end, STRIP_COLOUR, text, short=text.rpartition(".")[2]))
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
        bars += [Bar("filling", each.start, each.ready, WHITE) for each in own]
        yield BoxRow("" if many else f"{name} {slot}", top, height, tuple(bars))
        top += height + gap


def _units(palette: Palette) -> Iterator[Sample]:
    """Yields the samples of units: a ramp for each stack."""
    for name, units in palette.stacks.items():
        words = f"forward and weights, layers {units[0].layer} to {units[-1].layer}"
        yield Sample(words + f" of {name}" * (len(palette.stacks) > 1), palette.ramp(units, dark=False))
    layers = itertools.chain.from_iterable(palette.stacks.values())
    yield Sample("backward and gradients", palette.ramp(layers, dark=True))
    for unit in palette.others[:4]:
        yield Sample(unit.name, (palette.of(unit.id, dark=False), palette.of(unit.id, dark=True)))


# ---- The layout of a pipeline.

TALL, THIN_ROW, BETWEEN = 0.27, 0.05, 0.1  # heights of a row of computes and of a thin one; between two stages
PER_CALL = 0.17  # wanted width of a call of the fullest stage


def of_stages(timeline: Spans, squeezed: float = 1.0) -> Layout:
    """Stage under stage; without stages a row alone. squeezed: part of the full height of a stage, where many are"""
    used = {span.stream for span in timeline.spans if span.seconds}
    thin = [(streams, colour) for streams, colour in THIN.values() if used & set(streams)]
    several, tall = timeline.stage_count > 1, TALL * squeezed
    ramps = _ramps(timeline.trace)
    rows: list[BoxRow] = []
    top, most = 0.0, 0
    for stage, part in enumerate(timeline.by_stage):
        calls = _calls(part, ramps)
        most = max(most, len(calls))
        idle = [Bar("idle", gap.start, gap.end, IDLE.get(gap.why, OTHERWISE)) for gap in part.idle()]
        aside = f"{part.compute_s / (timeline.seconds or 1.0):.0%}"
        name = f"stage {stage}" if several else "compute"
        rows.append(BoxRow(name, top, tall, (*calls, *idle), "compute", stage, aside))
        top += tall
        for streams, colour in thin:
            spans = [span for span in part.spans if span.stream in streams]
            bars = tuple(Bar("thin", span.start, span.end, colour, op=span.number) for span in spans)
            rows.append(BoxRow("", top + 0.01, THIN_ROW - 0.01, bars, stage=stage))
            top += THIN_ROW
        top += BETWEEN * squeezed
    lost = f"bubble {timeline.bubble:.1%}, over all stages" if several else f"compute idle {timeline.bubble:.1%}"
    words = f"step {shown(timeline.seconds)}, {lost}: {longest(timeline.bubbles())}"
    samples = [Sample(name, ramps[kind]) for kind, (name, _) in CALLS.items()]
    return _layout(timeline, words, PER_CALL * most, rows, samples)


Ramps = dict[str, tuple[str, ...]]
"""Kind of call -> its colours, darker from the first segment of a stage to the last."""


def _ramps(trace: Trace) -> Ramps:
    homes = () if trace.split is None else trace.split.homes
    segments = max(map(homes.count, homes), default=1)
    places = [0.3] if segments == 1 else [segment / (segments - 1) for segment in range(segments)]
    return {kind: tuple(on_ramp(ramp, place) for place in places) for kind, (_, ramp) in CALLS.items()}


def _calls(part: Spans, ramps: Ramps) -> list[Bar]:
    """Returns the boxes of compute: each a stretch without a break in one call. Norms and updates are in no call."""
    split = part.trace.split
    found: list[Bar] = []
    for span in part.on("compute"):
        op = span.op
        box = Bar("op", span.start, span.end, GREY, type(op).__name__.lower())
        if isinstance(op, Forward | Backward):
            segment = 0 if split is None else split.of(part.trace.stage or 0).index(split.segment(op.visit))
            text = str(op.microbatch) if part.trace.microbatches > 1 else ""
            box = box._replace(colour=ramps[kind_of(op)][segment], text=text, op=span.number)
        before = found[-1] if found else box
        if (before.colour, before.text) == (box.colour, box.text) and box.start <= before.end:
            found[-1:] = [before._replace(end=box.end)]
        else:
            found.append(box)
    return found
