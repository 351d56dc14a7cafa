"""A picture of a pipeline: its stages under one another on one time axis; of several timelines, one below the other.

stage          what compute does, in boxes of one call each: forward, backward, or halves of a backward; light to
               dark over the segments of the stage; numbers are microbatches. Without stages a row alone
below it       thin rows of gathers, of reductions, and of messages between stages
tinted         idle time of compute, by what it waited for
outlined       the critical path, from stage to stage
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from yafsdp_fn.timeline import paint
from yafsdp_fn.timeline.geometry import HUES, INSIDE, INSIDE_PART, PLAIN, THIN_COLOURS, TINTS, Call, StagesLayout, shade
from yafsdp_fn.timeline.paint import CLEAR, INK, NARROW, OUTLINE, SOFT, TEXT, WIDE, Panel, Sample, box, ramp, wide
from yafsdp_fn.timeline.spans import Spans
from yafsdp_fn.timeline.text import idle, shown

WORDS = {"forward": "forward", "backward": "backward", "inputs": "gradients of inputs", "weights": "of weights"}
IDLES = {"idle: receive": {"receive"}, "idle: gather": {"gather"}, "idle: reduction": {"reduce", "all-reduce"}}
HEADER, RIGHT = 0.5, 0.55
PER_CALL = 0.17  # wanted width of a call of the fullest stage
MOST = 16  # stages of full height


def save(timelines: Sequence[Spans], path: str | Path | io.BytesIO, words: Sequence[str] = ()) -> None:
    """Draws `timelines` to a file, under one another, and lines of text below. Raises ValueError for one without ops,
    or another suffix."""
    paint.write(lambda: _figure(timelines, words), path, timelines)


def _figure(timelines: Sequence[Spans], words: Sequence[str]) -> Any:
    squeezed = min(1.0, MOST / sum(each.stage_count for each in timelines))
    layouts = [StagesLayout(each, squeezed) for each in timelines]
    across = paint.across(max(len(row) for each in layouts for row in each.calls) * PER_CALL, RIGHT)
    figure, axes = paint.sheet(across, RIGHT, HEADER, [each.height for each in layouts], _samples(layouts), words)
    for each, on in zip(layouts, axes, strict=True):
        panel = Panel(on, max(one.seconds for one in timelines), across)
        _draw(each, panel, last=on is axes[-1])
    return figure


def _draw(layout: StagesLayout, panel: Panel, *, last: bool) -> None:
    timeline = layout.timeline
    several, where = timeline.stage_count > 1, ", over all stages" * (timeline.stage_count > 1)
    lost = f"{'bubble' if several else 'compute idle'} {timeline.bubble:.1%}"
    text = f"step {shown(timeline.seconds)}, {lost}{where}: {idle(timeline)}"
    panel.frame(layout.height, timeline.title, text, last=last)
    for stage in range(timeline.stage_count):
        _stage(layout, panel, stage)
    path = (span for span in timeline.critical_path() if span.stream == "compute")
    panel.outline(path, lambda span: layout.computes(span.stage)[1:])


def _stage(layout: StagesLayout, panel: Panel, stage: int) -> None:
    timeline, own, calls = layout.timeline, layout.timeline.parts[stage], layout.calls[stage]
    name, top, tall = layout.computes(stage)
    middle = top + tall / 2
    busy, style = f"{own.compute_s / (timeline.seconds or 1.0):.0%}", dict[str, Any](va="center", fontsize=TEXT)
    name = name if timeline.stage_count > 1 else "compute"
    panel.beside(name, middle, (-5, 0), ha="right", color=INK, **style)
    panel.beside(busy, middle, (5, 0), x=1, ha="left", color=SOFT, **style)
    gaps = [gap for gap in timeline.idle_of(stage) if gap.why != "overhead"]
    panel.boxes(top, tall, [(gap.start, gap.end, layout.colour(gap)) for gap in gaps], edge=0.0)
    panel.boxes(top, tall, [(call.start, call.end, layout.colour(call)) for call in calls])
    inside, low = [(each.start, each.end, INSIDE) for each in own.inside], INSIDE_PART * tall
    panel.boxes(top + tall - low, low, inside, edge=0.0)
    if 72 * tall > TEXT and timeline.trace.microbatches > 1:
        for call in _numbered(calls, panel):
            panel.label(str(call.microbatch), call.start, call.end, middle)
    for lane, spans, colour in layout.rows(stage):
        panel.boxes(lane.top, lane.height, [(span.start, span.end, colour) for span in spans], edge=0.0)


def _numbered(calls: Sequence[Call], panel: Panel) -> Iterator[Call]:
    """Yields those whose number has room in their box, clear of the number before."""
    until = -CLEAR
    for call in calls:
        size, middle = wide(str(call.microbatch), TEXT), panel.inches(call.start + call.end) / 2
        room = panel.inches(call.end - call.start) - 0.02
        if call.segment is not None and size <= room and middle - size / 2 >= until + CLEAR:
            until = middle + size / 2
            yield call


def _samples(layouts: Sequence[StagesLayout]) -> list[Sample]:
    """Returns what is to be explained: words with their swatches."""
    kinds = {call.kind for each in layouts for row in each.calls for call in row}
    count = max(each.segments for each in layouts)
    found: list[Sample] = []
    for kind in [kind for kind in HUES if kind in kinds]:
        over = f", {count} segments" * (count > 1 and not found)
        colours = [shade(kind, number, count) for number in range(count)]
        found.append((WORDS[kind] + over, WIDE if count > 1 else NARROW, ramp(colours)))
    if "update" in kinds:
        found.append(("norm, update", NARROW, box(facecolor=PLAIN)))
    waits = {gap.why for each in layouts for stage in range(len(each.calls)) for gap in each.timeline.idle_of(stage)}
    for words, whys in IDLES.items():
        if waits & whys:
            found.append((words, NARROW, box(facecolor=TINTS[min(whys)])))
    if any(each.timeline.inside for each in layouts):
        found.append(("collectives in a block", NARROW, box(facecolor=INSIDE)))
    for name, colour in THIN_COLOURS.items():
        if any(name in each.thin for each in layouts):
            found.append((f"{name}s" if name != "reduce" else "reductions", NARROW, box(facecolor=colour)))
    found.append(("critical path", NARROW, box(**OUTLINE)))
    return found
