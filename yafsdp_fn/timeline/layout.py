"""The layout of a picture of a timeline: rows in inches, boxes in seconds, colours and words. Nothing is drawn here.

of one stage        streams as lanes, slots below them; strips above compute say which microbatch and which stack it is
                    at, where there are several. Colour is the layer: light for weights, dark for gradients
of a pipeline       stage under stage: what compute does, in boxes of one call each, and thin rows of what it sends.
                    Colour is the kind of call, light to dark over the segments of a stage; numbers are microbatches
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
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
from yafsdp_fn.timeline.spans import Held, Span, Spans, grad_slots, weight_slots
from yafsdp_fn.timeline.text import because, idle, longest, reasons, shown

T = TypeVar("T")

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
    at = min(max(part, 0.0), 1.0) * (len(steps) - 1)
    low = min(int(at), len(steps) - 2)
    pairs = zip(steps[low], steps[low + 1], strict=True)
    mixed = (a / 255 + (b / 255 - a / 255) * (at - low) for a, b in pairs)
    return "#" + "".join(f"{round(255 * light):02x}" for light in mixed)


OF_WEIGHTS = (Gather, Forward, Offload)
OF_GRADIENTS = (Backward, Reduce, AllReduce, Fetch)
"""The kinds of ops that have a layer's colour."""


class Palette:
    """The colours and the names of one model's units. stacks: name -> its layers; others: units outside of stacks; both
    as they are visited.

    Colours jump from one stack to the next, by half of what a stack has.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        visited = [unit for visit in trace.visits for unit in visit.units]
        units = [trace.units[unit] for unit in dict.fromkeys([*visited, *range(len(trace.units))])]
        self.others = [unit for unit in units if unit.stack is None]
        names = dict.fromkeys(unit.stack for unit in units if unit.stack is not None)
        self.stacks = {name: [unit for unit in trace.units if unit.stack == name] for name in names}
        share = 1 / max(1.0, 1.5 * len(names) - 0.5)
        groups = [(1.5 * share * number, share, layers) for number, layers in enumerate(self.stacks.values())]
        self._place: dict[int, float] = {}  # unit -> its place on a ramp
        for low, width, group in [(0.0, 1.0, self.others), *groups]:
            for k, unit in enumerate(group):
                self._place[unit.id] = low + width * k / max(1, len(group) - 1)

    def of(self, unit: int, dark: bool) -> str:
        ramps = OTHERS if self.trace.units[unit].stack is None else LAYERS
        return on_ramp(ramps[dark], self._place[unit])

    def leading(self, op: Any) -> UnitSpec | None:
        """Returns the unit that an op is shown as: the first of its units that is a layer, or the first; None without
        any."""
        if isinstance(op, Send | Receive):
            return None
        units = [self.trace.units[unit] for unit in self.trace.units_of(op)]
        layers = [unit for unit in units if unit.stack is not None]
        return next(iter(layers or units), None)

    def bar(self, kind: str, start: float, end: float, unit: UnitSpec, dark: bool) -> "Bar":
        """Returns a box that shows a unit."""
        text = unit.name.rpartition(".")[2] if unit.stack is None else str(unit.layer)
        number = None if unit.stack is None else unit.layer
        return Bar(kind, start, end, self.of(unit.id, dark), text, number, dark=dark)

    def box(self, span: Span) -> "Bar":
        """Returns the box of an op, and what is written in it."""
        op, unit = span.op, self.leading(span.op)
        plain = Bar("op", span.start, span.end, GREY, type(op).__name__.lower(), op=span.number)
        if isinstance(op, Send | Receive):
            return plain._replace(text=str(op.microbatch))
        if unit is None or isinstance(op, Norm) or len(getattr(op, "units", ())) > 2:
            return plain
        named = self.bar("op", span.start, span.end, unit, isinstance(op, OF_GRADIENTS))
        if isinstance(op, OF_WEIGHTS + OF_GRADIENTS):
            return named._replace(op=span.number)
        return plain._replace(text=named.text)


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
    """Boxes on one line. top: from the upper edge; name, aside: to the left and to the right of it; large: the name"""

    name: str
    top: float
    height: float
    bars: tuple[Bar, ...] = ()
    large: bool = False
    aside: str = ""
    stage: int = 0


class Sample(NamedTuple):
    """Words of the legend with their colours. style: "hatched", "outlined" """

    words: str
    colours: tuple[str, ...]
    style: str = ""


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
SEEN = 0.002  # part of the step: what is shorter is not explained
OF_HOST = "idle: waits for a copy to the host, or from it"
REASONS = {
    "gather": "idle: waits for a gather (its layer in italics)",
    "reduce": "idle: waits for a reduction",
    "all-reduce": "idle: waits for a reduction",
    "offload": OF_HOST,
    "fetch": OF_HOST,
}


def of_stage(timeline: Spans) -> Layout:
    """Lanes of streams, and rows of slots below them."""
    palette = Palette(timeline.trace)
    rows: list[BoxRow] = []
    lanes: dict[str, BoxRow] = {}
    top = 0.0
    for stream in timeline.streams:
        if stream == "compute":
            for name, strip in _strips(timeline, palette):
                rows.append(BoxRow(name, top, STRIP, strip))
                top += STRIP + 0.02
            bars = (*_gaps(timeline, palette), *_computes(timeline, palette))
            lane = BoxRow(stream, top, COMPUTE, bars, large=True)
            rows += [lane, _inside(timeline, lane)]
        else:
            lane = BoxRow(stream, top, STREAM, tuple(map(palette.box, timeline.on(stream))), large=True)
            rows.append(lane)
        lanes[stream] = lane
        top += lane.height + GAP
    for name, held, dark in (("slot", weight_slots(timeline), False), ("grad slot", grad_slots(timeline), True)):
        if held:
            rows += _slots(name, top + GAP, held, palette, dark)
            top = rows[-1].top + rows[-1].height + GAP
    words = f"step {shown(timeline.seconds)}, compute busy {timeline.compute_s / (timeline.seconds or 1.0):.0%}"
    if waits := reasons(timeline):
        words += f"; idle {longest(waits)}"
    most = max(Counter(span.stream for span in timeline.spans).values(), default=0)
    path = tuple(_runs((lanes[span.stream], span) for span in timeline.critical_path()))
    legend = tuple(_legend(timeline, palette, [bar for row in rows for bar in row.bars]))
    return Layout(timeline, words, top, PER_OP * most, tuple(rows), path, legend)


def _computes(timeline: Spans, palette: Palette) -> Iterator[Bar]:
    """Yields the boxes of computes, of which some backwards recompute their forwards."""
    computes = timeline.on("compute")
    forwards = [span.op for span in computes if isinstance(span.op, Forward)]
    kept = {(op.visit, op.microbatch) for op in forwards if op.keep}
    for span in computes:
        op, box = span.op, palette.box(span)
        again = isinstance(op, Backward) and (op.visit, op.microbatch) not in kept
        yield box._replace(kind="again") if again and box.number is not None else box


def _gaps(timeline: Spans, palette: Palette) -> Iterator[Bar]:
    """Yields the gaps of compute, with what they waited for."""
    for gap in timeline.idle():
        cause = timeline.by_number.get(gap.cause)
        short = palette.box(cause).text if gap.waited and cause is not None else ""
        text = f"{gap.why} {short}" if short else because(gap.why)
        yield Bar("idle", gap.start, gap.end, IDLE.get(gap.why, OTHERWISE), text, short=short)


def _strips(timeline: Spans, palette: Palette) -> Iterator[tuple[str, tuple[Bar, ...]]]:
    """Yields which of several microbatches compute is at, and in which of several stacks."""
    computes = [span for span in timeline.spans if isinstance(span.op, Forward | Backward)]
    leading = [palette.leading(span.op) for span in computes]
    places: dict[str, list[Any]] = {
        "microbatch": [span.microbatch for span in computes],
        "stack": [unit and unit.stack for unit in leading],
    }
    for name, of in places.items():
        if len({*of} - {None}) < 2:
            continue
        bars = []
        for at, start, end in _runs(zip(of, computes, strict=True)):
            if at is not None:
                bars.append(Bar("strip", start, end, STRIP_COLOUR, str(at), short=str(at).rpartition(".")[2]))
        yield name, tuple(bars)


def _slots(name: str, top: float, held: Sequence[Held], palette: Palette, dark: bool) -> Iterator[BoxRow]:
    """Yields a row per slot that is used; thin ones under one name where there are many."""
    numbers = sorted({each.slot for each in held})
    many = len(numbers) > MANY_SLOTS
    height, gap = (BLOCK / len(numbers), 0.0) if many else (SLOT, 0.03)
    if many:
        yield BoxRow(f"{len(numbers)} {name}s", top, BLOCK)
    for k, slot in enumerate(numbers):
        own = [each for each in held if each.slot == slot]
        units = palette.trace.units
        bars = [palette.bar("slot", each.start, each.end, units[each.unit], dark) for each in own]
        bars += [Bar("filling", each.start, each.ready, WHITE) for each in own if each.ready > each.start]
        yield BoxRow("" if many else f"{name} {slot}", top + k * (height + gap), height, tuple(bars))


def _legend(timeline: Spans, palette: Palette, bars: Sequence[Bar]) -> Iterator[Sample]:
    """Yields what is to be explained."""
    kinds = {bar.kind for bar in bars}
    first = "forward and weights, layers "
    for name, units in palette.stacks.items():
        which = f"{units[0].layer} to {units[-1].layer}" + f" of {name}" * (len(palette.stacks) > 1)
        yield Sample(first + which, tuple(palette.of(unit.id, dark=False) for unit in units))
        first = ""
    if palette.stacks:
        layers = itertools.chain.from_iterable(palette.stacks.values())
        yield Sample("backward and gradients", tuple(palette.of(unit.id, dark=True) for unit in layers))
    for unit in palette.others[:4]:
        yield Sample(unit.name, (palette.of(unit.id, dark=False), palette.of(unit.id, dark=True)))
    if "again" in kinds:
        yield Sample("recomputes its forward first", (on_ramp(LAYERS[True], 0.5),), "hatched")
    if "inside" in kinds:
        yield Sample("collectives in a block", (INSIDE,))
    seen = [bar.op for bar in bars if bar.colour == GREY and bar.end - bar.start > SEEN * timeline.seconds]
    if seen:
        grey = {type(timeline.by_number[number].op).__name__.lower() for number in seen}
        yield Sample(", ".join(sorted(grey)), (GREY,))
    for gap in timeline.idle():
        yield Sample(REASONS.get(gap.why, "idle otherwise"), (IDLE.get(gap.why, OTHERWISE),))
    if "slot" in kinds:
        yield Sample("slot being filled", (FILLING,))


# ---- The layout of a pipeline.

TALL, THIN_ROW, BETWEEN = 0.27, 0.05, 0.1  # heights of a row of computes and of a thin one; between two stages
PER_CALL = 0.17  # wanted width of a call of the fullest stage
WAITS = {"receive": "receive", "gather": "gather", "reduce": "reduction"}


def of_stages(timeline: Spans, squeezed: float = 1.0) -> Layout:
    """Stage under stage; without stages a row alone. squeezed: part of the full height of a stage, where many are"""
    used = {span.stream for span in timeline.spans if span.seconds}
    thin = [name for name, (streams, _) in THIN.items() if used & set(streams)]
    several, tall = timeline.stage_count > 1, TALL * squeezed
    pitch = tall + THIN_ROW * len(thin) + BETWEEN * squeezed
    computes: list[BoxRow] = []
    rows: list[BoxRow] = []
    most = 0
    for stage, part in enumerate(timeline.by_stage):
        gaps = [gap for gap in timeline.idle_of(stage) if gap.why != "overhead"]
        waits = [Bar("idle", gap.start, gap.end, IDLE.get(gap.why, OTHERWISE)) for gap in gaps]
        calls = _calls(part)
        most = max(most, len(calls))
        aside = f"{part.compute_s / (timeline.seconds or 1.0):.0%}"
        name, top = f"stage {stage}" if several else "compute", stage * pitch
        computes.append(BoxRow(name, top, tall, (*waits, *calls), True, aside, stage))
        rows += [computes[-1], _inside(part, computes[-1])]
        for number, kind in enumerate(thin):
            streams, colour = THIN[kind]
            spans = [span for stream in streams for span in part.on(stream) if span.seconds]
            bars = tuple(Bar("thin", span.start, span.end, colour, op=span.number) for span in spans)
            rows.append(BoxRow("", top + tall + THIN_ROW * number + 0.01, THIN_ROW - 0.01, bars, stage=stage))
    lost = f"bubble {timeline.bubble:.1%}, over all stages" if several else f"compute idle {timeline.bubble:.1%}"
    words = f"step {shown(timeline.seconds)}, {lost}: {idle(timeline)}"
    on_path = [span for span in timeline.critical_path() if span.stream == "compute"]
    path = tuple(_runs((computes[span.stage], span) for span in on_path))
    legend = _legend_of_stages(rows, _segments(timeline.trace))
    return Layout(timeline, words, pitch * timeline.stage_count, PER_CALL * most, tuple(rows), path, legend)


def shade(kind: str, segment: int, count: int) -> str:
    """Returns the colour of a call, darker from the first segment of a stage to the last."""
    return on_ramp(CALLS[kind][1], segment / (count - 1) if count > 1 else 0.3)


def _segments(trace: Trace) -> int:
    """Returns the most segments that a stage has."""
    return 1 if trace.split is None else max(map(trace.split.homes.count, trace.split.homes))


def _calls(part: Spans) -> list[Bar]:
    """Returns the boxes of compute: each a stretch without a break in one call. Norms and updates are in no call."""
    split, count = part.trace.split, _segments(part.trace)
    found: list[Bar] = []
    for span in part.on("compute"):
        op, box = span.op, Bar("op", span.start, span.end, GREY)
        if isinstance(op, Forward | Backward):
            segment = 0 if split is None else split.of(part.trace.stage or 0).index(split.segment(op.visit))
            text = str(op.microbatch) if part.trace.microbatches > 1 else ""
            box = box._replace(colour=shade(kind_of(op), segment, count), text=text, op=span.number)
        before = found[-1] if found else None
        if before and (before.colour, before.text) == (box.colour, box.text) and box.start <= before.end:
            found[-1] = before._replace(end=box.end)
        else:
            found.append(box)
    return found


def _legend_of_stages(rows: Sequence[BoxRow], segments: int) -> tuple[Sample, ...]:
    """Explains the colours that are in some row."""
    samples = []
    for kind, (words, _) in CALLS.items():
        several = f", {segments} segments" * (segments > 1 and kind == "forward")
        samples.append(Sample(words + several, tuple(shade(kind, number, segments) for number in range(segments))))
    samples.append(Sample("norm, update", (GREY,)))
    samples += [Sample(f"idle: {words}", (IDLE[why],)) for why, words in WAITS.items()]
    samples.append(Sample("collectives in a block", (INSIDE,)))
    samples += [Sample(words, (colour,)) for words, (_, colour) in THIN.items()]
    used = {bar.colour for row in rows for bar in row.bars}
    return tuple(sample for sample in samples if used & set(sample.colours))
