"""The layout of a picture of a timeline: rows in inches, boxes in seconds, colours and words. Nothing is drawn here.

of one stage        streams as lanes, slots below them; strips above compute say which microbatch and which stack it is
                    at, where there are several. Colour is the layer: light for weights, dark for gradients
of a pipeline       stage under stage: what compute does, in boxes of one call each, and thin rows of what it sends.
                    Colour is the kind of call, light to dark over the segments of a stage; numbers are microbatches
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
from yafsdp_fn.timeline.spans import Held, Span, Spans, grad_slots, weight_slots
from yafsdp_fn.timeline.text import because, idle, reasons, shown

# ---- Colours. All weights are of one lightness, and all gradients of another, darker one, so that forward and backward
# can be told apart at every layer. The steps of a ramp look equally far apart (they are of OKLCH).

Colour = tuple[float, float, float]
"""A colour of sRGB, in [0, 1]."""
# (light, dark): weights, gradients
LAYERS = ("bac7ff 9ed0ff 88d8f0 85ddd8 96dcbb b3d8a0", "8291e5 519ee1 00aacc 00b0ab 3cb082 76a958")  # first to last
OTHERS = ("f4b5d7 fdb4b9 faba9d ebc38c", "ce77aa da767f d77d54 c58c30")  # units outside of stacks
CALLS = {"forward": "a9d4ff 6c95c9", "backward": "a7e2b2 69a275", "inputs": "87e4de 44a49e", "weights": "f0cb8d af8c4f"}


def colour(code: str) -> Colour:
    """The colour of six hexadecimal digits."""
    red, green, blue = (int(code[at : at + 2], 16) / 255 for at in (0, 2, 4))
    return red, green, blue


def on_ramp(codes: str, part: float) -> Colour:
    """The colour at a part of the way from the first of some to the last."""
    steps = [colour(code) for code in codes.split()]
    at = min(max(part, 0.0), 1.0) * (len(steps) - 1)
    low = min(int(at), len(steps) - 2)
    red, green, blue = (a + (b - a) * (at - low) for a, b in zip(steps[low], steps[low + 1], strict=True))
    return red, green, blue


GREY = colour("c7c7c7")  # what belongs to no unit
WHITE = colour("ffffff")
STRIP_COLOUR = colour("d9dce1")
INSIDE = colour("4b3f72")  # collectives in a compute
INSIDE_PART = 0.3  # of its height
OTHERWISE = colour("e5e7eb")  # idle for another reason
IDLE = {
    "gather": colour("fbe1dc"),
    "reduce": colour("fbeccb"),
    "all-reduce": colour("fbeccb"),
    "offload": colour("dfe6f5"),
    "fetch": colour("dfe6f5"),
    "receive": colour("ecebe4"),
    "fill": colour("f4f4f2"),
    "drain": colour("f4f4f2"),
}
THIN = {"gather": ("gather",), "reduce": ("reduce", "replicate"), "message": ("send", "receive")}  # row -> streams
THIN_COLOURS = {"gather": colour("b9a7d6"), "reduce": colour("d9b98a"), "message": colour("6b7280")}


class Palette:
    """The colours and the names of one model's units. stacks: name -> its layers; others: units outside of stacks; both
    as they are visited.

    Colours jump from one stack to the next, by half of what a stack has.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        visited = dict.fromkeys([*(unit for visit in trace.visits for unit in visit.units), *range(len(trace.units))])
        units = [trace.units[unit] for unit in visited]
        self.others = [unit for unit in units if unit.stack is None]
        names = dict.fromkeys(unit.stack for unit in units if unit.stack is not None)
        self.stacks = {name: [unit for unit in trace.units if unit.stack == name] for name in names}
        self._place = {unit.id: k / max(1, len(self.others) - 1) for k, unit in enumerate(self.others)}
        share = 1 / max(1.0, 1.5 * len(names) - 0.5)
        for number, layers in enumerate(self.stacks.values()):
            for k, unit in enumerate(layers):
                self._place[unit.id] = share * (1.5 * number + k / max(1, len(layers) - 1))

    def of(self, unit: int, dark: bool) -> Colour:
        ramps = OTHERS if self.trace.units[unit].stack is None else LAYERS
        return on_ramp(ramps[dark], self._place[unit])

    def label(self, unit: int) -> tuple[str, int | None]:
        """The name of a unit in a box, and the number if it is a layer's."""
        found = self.trace.units[unit]
        return (found.name.rpartition(".")[2], None) if found.stack is None else (str(found.layer), found.layer)

    def leading(self, units: Sequence[int]) -> int:
        """The unit that an op of several is shown as: the first that is a layer."""
        return next((unit for unit in units if self.trace.units[unit].stack is not None), units[0])


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
    colour: Colour
    text: str = ""
    number: int | None = None
    short: str = ""
    dark: bool = False
    op: int | None = None


class Row(NamedTuple):
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
    colours: tuple[Colour, ...]
    style: str = ""


class Layout(NamedTuple):
    """The picture of one timeline. words: below its title; wanted: inches of the fullest row

    path: `row, spans` of the critical path, those that follow each other in one row together
    """

    timeline: Spans
    words: str
    height: float
    wanted: float
    rows: tuple[Row, ...]
    path: tuple[tuple[Row, tuple[Span, ...]], ...]
    legend: tuple[Sample, ...]


def _path(spans: Iterator[Span], row: Callable[[Span], Row]) -> tuple[tuple[Row, tuple[Span, ...]], ...]:
    return tuple((at, tuple(run)) for at, run in itertools.groupby(spans, row))


def _inside(spans: Spans, row: Row) -> Row:
    """The collectives of blocks, at the foot of a row of computes."""
    bars = tuple(Bar("inside", each.start, each.end, INSIDE, each.name) for each in spans.inside)
    low = INSIDE_PART * row.height
    return Row("", row.top + row.height - low, low, bars, stage=row.stage)


# ---- The layout of one stage.

COMPUTE, STREAM, STRIP, GAP = 0.40, 0.28, 0.13, 0.07  # heights
SLOT, BLOCK, MANY_SLOTS = 0.15, 1.25, 8  # of one slot; of all slots of a kind where they are more than so many
PER_OP = 0.085  # wanted width of an op of the fullest lane
SEEN = 0.002  # part of the step: what is shorter is not explained
REASONS = {
    "gather": "idle: waits for a gather (its layer in italics)",
    "reduce": "idle: waits for a reduction",
    "all-reduce": "idle: waits for a reduction",
    "offload": "idle: waits for a copy to the host, or from it",
    "fetch": "idle: waits for a copy to the host, or from it",
}


def of_stage(timeline: Spans) -> Layout:
    """Lanes of streams, and rows of slots below them."""
    palette = Palette(timeline.trace)
    kept = {(s.op.visit, s.microbatch) for s in timeline.spans if isinstance(s.op, Forward) and s.op.keep}
    rows: list[Row] = []
    lanes: dict[str, Row] = {}
    top = 0.0
    for stream in timeline.streams:
        bars = tuple(_op(span, palette, kept) for span in timeline.on(stream))
        if stream == "compute":
            for name, strip in _strips(timeline, palette):
                rows.append(Row(name, top, STRIP, strip))
                top += STRIP + 0.02
            bars = (*_gaps(timeline, palette), *bars)
        lanes[stream] = Row(stream, top, COMPUTE if stream == "compute" else STREAM, bars, large=True)
        rows.append(lanes[stream])
        if stream == "compute":
            rows.append(_inside(timeline, lanes[stream]))
        top += lanes[stream].height + GAP
    for name, held, dark in (("slot", weight_slots(timeline), False), ("grad slot", grad_slots(timeline), True)):
        if held:
            rows += _slots(name, top + GAP, held, palette, dark)
            top = rows[-1].top + rows[-1].height + GAP
    busy = f"compute busy {timeline.compute_s / (timeline.seconds or 1.0):.0%}"
    why = ", ".join(f"{shown(seconds)} {because(name)}" for name, seconds in reasons(timeline).most_common(3))
    words = f"step {shown(timeline.seconds)}, {busy}" + f"; idle {why}" * bool(why)
    wanted = PER_OP * max((len(timeline.on(stream)) for stream in lanes), default=0)
    path = _path(iter(timeline.critical_path()), lambda span: lanes[span.stream])
    return Layout(timeline, words, top, wanted, tuple(rows), path, tuple(_legend(timeline, palette, rows)))


def _op(span: Span, palette: Palette, kept: set[tuple[int, int | None]]) -> Bar:
    """The box of an op, and what is written in it: the layer of the first of its units that is one. kept: visits and
    microbatches whose graph is"""
    op, units = span.op, palette.trace.units_of(span.op)
    plain = Bar("op", span.start, span.end, GREY, type(op).__name__.lower(), op=span.number)
    if isinstance(op, Send | Receive):
        return plain._replace(text=str(op.microbatch))
    if not units or (not hasattr(op, "visit") and (len(units) > 2 or isinstance(op, Norm))):
        return plain
    unit = palette.leading(units)
    text, number = palette.label(unit)
    dark = isinstance(op, Backward | Reduce | AllReduce | Fetch)
    if not dark and not isinstance(op, Gather | Forward | Offload):
        return plain._replace(text=text)
    again = isinstance(op, Backward) and (op.visit, op.microbatch) not in kept
    named = plain._replace(colour=palette.of(unit, dark), text=text, number=number, dark=dark)
    return named._replace(kind="again") if again else named


def _gaps(timeline: Spans, palette: Palette) -> Iterator[Bar]:
    """Yields the gaps of compute, with what they waited for."""
    at = {span.number: span for span in timeline.spans}
    for gap in timeline.idle():
        short = _op(at[gap.cause], palette, set()).text if gap.waited and gap.cause is not None else ""
        text = f"{gap.why} {short}" if short else because(gap.why)
        yield Bar("idle", gap.start, gap.end, IDLE.get(gap.why, OTHERWISE), text, short=short)


def _strips(timeline: Spans, palette: Palette) -> Iterator[tuple[str, tuple[Bar, ...]]]:
    """Yields which of several microbatches compute is at, and in which of several stacks."""

    def stack(span: Span) -> str | None:
        units = timeline.trace.units_of(span.op)
        return timeline.trace.units[palette.leading(units)].stack if units else None

    computes = [span for span in timeline.spans if isinstance(span.op, Forward | Backward)]
    places: dict[str, Callable[[Span], object]] = {"microbatch": lambda span: span.microbatch, "stack": stack}
    for name, place in places.items():
        runs = [(str(at), list(run)) for at, run in itertools.groupby(computes, place) if at is not None]
        if len({at for at, _ in runs}) > 1:
            yield (
                name,
                tuple(
                    Bar("strip", run[0].start, run[-1].end, STRIP_COLOUR, at, short=at.rpartition(".")[2])
                    for at, run in runs
                ),
            )


def _slots(name: str, top: float, held: Sequence[Held], palette: Palette, dark: bool) -> list[Row]:
    """A row per slot that is used; thin ones under one name where there are many."""
    numbers = sorted({each.slot for each in held})
    many = len(numbers) > MANY_SLOTS
    height, gap = (BLOCK / len(numbers), 0.0) if many else (SLOT, 0.03)
    rows = [Row(f"{len(numbers)} {name}s", top, BLOCK)] if many else []
    for k, slot in enumerate(numbers):
        own = [each for each in held if each.slot == slot]
        bars = [
            Bar("slot", each.start, each.end, palette.of(each.unit, dark), *palette.label(each.unit), dark=dark)
            for each in own
        ]
        bars += [Bar("filling", each.start, each.ready, WHITE) for each in own if each.ready > each.start]
        rows.append(Row("" if many else f"{name} {slot}", top + k * (height + gap), height, tuple(bars)))
    return rows


def _legend(timeline: Spans, palette: Palette, rows: Sequence[Row]) -> Iterator[Sample]:
    """Yields what is to be explained."""
    middles = [on_ramp(ramp, 0.5) for ramp in LAYERS]
    bars = [bar for row in rows for bar in row.bars]
    kinds = {bar.kind for bar in bars}
    for number, (name, units) in enumerate(palette.stacks.items()):
        which = f"{units[0].layer} to {units[-1].layer}" + f" of {name}" * (len(palette.stacks) > 1)
        light = tuple(palette.of(unit.id, dark=False) for unit in units)
        yield Sample("forward and weights, layers " * (not number) + which, light)
    if palette.stacks:
        every = (palette.of(unit.id, dark=True) for units in palette.stacks.values() for unit in units)
        yield Sample("backward and gradients", tuple(every))
    for unit in palette.others[:4]:
        yield Sample(unit.name, tuple(palette.of(unit.id, dark) for dark in (False, True)))
    if "again" in kinds:
        yield Sample("recomputes its forward first", (middles[True],), "hatched")
    if "inside" in kinds:
        yield Sample("collectives in a block", (INSIDE,))
    at = {span.number: span for span in timeline.spans}
    grey = [bar for bar in bars if bar.colour == GREY and bar.end - bar.start > SEEN * timeline.seconds]
    if grey:
        yield Sample(
            ", ".join(sorted({type(at[bar.op].op).__name__.lower() for bar in grey if bar.op is not None})), (GREY,)
        )
    for gap in timeline.idle():
        yield Sample(REASONS.get(gap.why, "idle otherwise"), (IDLE.get(gap.why, OTHERWISE),))
    if "slot" in kinds:
        red, green, blue = (0.5 + 0.5 * part for part in middles[False])
        yield Sample("slot being filled", ((red, green, blue),))


# ---- The layout of a pipeline.

TALL, THIN_ROW, BETWEEN = 0.27, 0.05, 0.1  # heights of a row of computes and of a thin one; between two stages
PER_CALL = 0.17  # wanted width of a call of the fullest stage
KINDS = {"forward": "forward", "backward": "backward", "inputs": "gradients of inputs", "weights": "of weights"}
WAITS = {
    "receive": "idle: receive",
    "gather": "idle: gather",
    "reduce": "idle: reduction",
    "all-reduce": "idle: reduction",
}


class Call(NamedTuple):
    """A stretch of compute without a break, in one call: a forward, a backward, or half of one.

    segment: its number among those of the stage, None for norm and update, which are no call; first: its first op
    """

    start: float
    end: float
    kind: str
    microbatch: int
    segment: int | None
    first: int


def of_stages(timeline: Spans, squeezed: float = 1.0) -> Layout:
    """Stage under stage; without stages a row alone. squeezed: part of the full height of a stage, where many are"""
    split = timeline.trace.split
    segments = 1 if split is None else max(map(split.homes.count, split.homes))
    used = {span.stream for span in timeline.spans if span.seconds}
    thin = [name for name, streams in THIN.items() if used & set(streams)]
    pitch = TALL * squeezed + THIN_ROW * len(thin) + BETWEEN * squeezed
    calls = [list(_calls(timeline, stage)) for stage in range(timeline.stage_count)]
    computes, rows = list[Row](), list[Row]()
    for stage, part in enumerate(timeline.parts):
        gaps = [gap for gap in timeline.idle_of(stage) if gap.why != "overhead"]
        bars = [Bar("idle", gap.start, gap.end, IDLE.get(gap.why, OTHERWISE)) for gap in gaps]
        bars += [_call(call, segments, timeline.trace.microbatches) for call in calls[stage]]
        name = f"stage {stage}" if timeline.stage_count > 1 else "compute"
        aside = f"{part.compute_s / (timeline.seconds or 1.0):.0%}"
        row = Row(name, stage * pitch, TALL * squeezed, tuple(bars), True, aside, stage)
        computes.append(row)
        rows += [row, _inside(part, row)]
        for number, kind in enumerate(thin):
            spans = [span for stream in THIN[kind] for span in part.on(stream) if span.seconds]
            thin_bars = tuple(Bar("thin", s.start, s.end, THIN_COLOURS[kind], op=s.number) for s in spans)
            top = stage * pitch + TALL * squeezed + THIN_ROW * number + 0.01
            rows.append(Row("", top, THIN_ROW - 0.01, thin_bars, stage=stage))
    several = timeline.stage_count > 1
    lost = f"{'bubble' if several else 'compute idle'} {timeline.bubble:.1%}" + ", over all stages" * several
    words = f"step {shown(timeline.seconds)}, {lost}: {idle(timeline)}"
    path = (span for span in timeline.critical_path() if span.stream == "compute")
    legend = tuple(_legend_of_stages(timeline, rows, {call.kind for row in calls for call in row}, segments, thin))
    wanted = PER_CALL * max(map(len, calls))
    height = pitch * timeline.stage_count
    return Layout(timeline, words, height, wanted, tuple(rows), _path(path, lambda span: computes[span.stage]), legend)


def _call(call: Call, segments: int, microbatches: int) -> Bar:
    if call.segment is None:
        return Bar("op", call.start, call.end, GREY)
    text = str(call.microbatch) if microbatches > 1 else ""
    return Bar("op", call.start, call.end, shade(call.kind, call.segment, segments), text, op=call.first)


def shade(kind: str, segment: int, count: int) -> Colour:
    """The colour of a call, darker from the first segment of a stage to the last."""
    return on_ramp(CALLS[kind], segment / (count - 1) if count > 1 else 0.3)


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
        spans = list(run)
        breaks = [k for k in range(1, len(spans)) if spans[k].start > spans[k - 1].end]
        for begin, end in itertools.pairwise([0, *breaks, len(spans)]):
            yield Call(spans[begin].start, spans[end - 1].end, *what, spans[begin].number)


def _legend_of_stages(
    timeline: Spans, rows: Sequence[Row], kinds: set[str], segments: int, thin: Sequence[str]
) -> Iterator[Sample]:
    over = f", {segments} segments" * (segments > 1)
    for kind in [kind for kind in CALLS if kind in kinds]:
        yield Sample(KINDS[kind] + over, tuple(shade(kind, number, segments) for number in range(segments)))
        over = ""
    if "update" in kinds:
        yield Sample("norm, update", (GREY,))
    waits = [gap.why for stage in range(timeline.stage_count) for gap in timeline.idle_of(stage)]
    for why, words in WAITS.items():
        if why in waits:
            yield Sample(words, (IDLE[why],))
    if any(bar.kind == "inside" for row in rows for bar in row.bars):
        yield Sample("collectives in a block", (INSIDE,))
    for name in thin:
        yield Sample("reductions" if name == "reduce" else f"{name}s", (THIN_COLOURS[name],))
