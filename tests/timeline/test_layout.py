"""What is where in a picture: labels clear of each other, stacks and microbatches told apart."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from tests.planner.pipelines import NO_LINKS, chain, pipeline
from tests.program.traces import layers, model, on, trace_of, unit
from tests.timeline.test_draw import MESH, PLAIN, drawn, simulated
from yafsdp_fn.planner import simulate
from yafsdp_fn.schedules import Trace, one_f_one_b, zero1, zero3
from yafsdp_fn.timeline import Span, Timeline, paint
from yafsdp_fn.timeline.layout import GREY, Bar, BoxRow, Layout, Palette, of_stage
from yafsdp_fn.timeline.paint import ASIDE, CLEAR, LEFT, RIGHT, TEXT, Panel, labels, wide


def lane(layout: Layout, name: str) -> BoxRow:
    (found,) = (row for row in layout.rows if row.name == name)
    return found


def panel(timeline: Timeline, seconds: float) -> Panel:
    return Panel(None, of_stage(timeline), seconds, 7.85)


@pytest.mark.parametrize(("count", "flops"), [(8, 1), (8, 4), (20, 1), (20, 4), (80, 4)])
def test_labels_of_a_lane_are_clear_of_each_other(count: int, flops: int) -> None:
    """Those of idle time, too, which stand between those of computes."""
    timeline = simulated(count, flops=flops)
    on = panel(timeline, 2.0 * timeline.seconds)  # thin: it has half of the axis
    for stream in timeline.streams:
        found = sorted(labels(lane(on.layout, stream).bars, 7.0, on), key=lambda label: label.middle)
        assert len(found) >= 3
        edges = [(label.middle - label.half, label.middle + label.half) for label in found]
        for (_, end), (start, _) in itertools.pairwise(edges):
            assert start - end >= 0.999 * CLEAR


def test_a_slot_that_holds_odd_layers_is_numbered_like_one_that_holds_even_ones() -> None:
    on = panel(simulated(2), 100.0)
    held = [
        [Bar("slot", k, k + 1.0, GREY, text=str(2 * k + odd), number=2 * k + odd) for k in range(20)] for odd in (0, 1)
    ]
    even, odd = ([label.text for label in labels(bars, 7.0, on)] for bars in held)
    assert even == ["0", "10", "20", "30"]
    assert odd == ["5", "15", "25", "35"]


@pytest.mark.parametrize("microbatches", [16, 64])
def test_numbers_of_calls_are_clear_of_each_other(microbatches: int) -> None:
    """In every row of a pipeline whose calls are hardly as wide as their numbers."""
    program = pipeline(chain(4, microbatches), 4, one_f_one_b(zero1()))
    figure = paint.sheet(paint.layouts([simulate(program, NO_LINKS)]))
    axes = figure.axes[0]
    inches = figure.get_figwidth() - LEFT - RIGHT - ASIDE
    rows: dict[float, list[tuple[float, float]]] = {}
    for text in axes.texts:
        if text.get_text().isdigit():
            x, y = text.get_position()
            middle = x / axes.get_xlim()[1] * inches
            half = wide(text.get_text(), TEXT) / 2
            rows.setdefault(y, []).append((middle - half, middle + half))
    assert len(rows) == 4
    assert min(map(len, rows.values())) >= 8
    for edges in rows.values():
        for (_, end), (start, _) in itertools.pairwise(edges):
            assert start - end >= 0.999 * CLEAR


# ---- several stacks, several microbatches


def in_another_order() -> Trace:
    """Stack a is before b in the tree, and visited after it; so is the head, and the embedding."""
    head, a, b, embed = unit(0, "head"), layers("a", 3, 1), layers("b", 3, 4), unit(7, "embed")
    trace = on(trace_of([head, *a, *b, embed], [[7], [4], [5], [6], [1], [2], [3], [0]], microbatches=2), MESH)
    return trace._replace(
        visits=tuple(visit._replace(cost=visit.cost._replace(flops=4, bwd_flops=8)) for visit in trace.visits)
    )


def test_stacks_are_told_apart_in_the_order_of_their_visits(tmp_path: Path) -> None:
    trace = in_another_order()
    palette = Palette(trace)
    assert {name: [each.id for each in units] for name, units in palette.stacks.items()} == {
        "b": [4, 5, 6],
        "a": [1, 2, 3],
    }
    assert [each.name for each in palette.others] == ["embed", "head"]
    hues = [to_rgb(Palette(model(8, stacks=2)).of(number, dark=True)) for number in range(1, 17)]
    steps = [math.dist(one, two) for one, two in itertools.pairwise(hues)]
    assert max(steps) == steps[7], "hues jump from the last layer of a stack to the first of the next"
    found = drawn(simulate(zero3()(trace), PLAIN), tmp_path)
    words = [
        f"{what} of {name}"
        for what in ("forward and weights, layers 0 to 2", "backward and gradients")
        for name in "ba"
    ]
    assert sorted(text for text in found if " of " in text) == sorted(words)


def test_strips_say_which_microbatch_and_which_stack() -> None:
    timeline = simulate(zero3()(in_another_order()), PLAIN)
    layout = of_stage(timeline)
    microbatch = lane(layout, "microbatch")
    stack = lane(layout, "stack")
    assert [bar.text for bar in microbatch.bars] == ["0", "1"]
    assert [bar.text for bar in stack.bars] == ["b", "a", "a", "b"] * 2
    for number, bar in enumerate(microbatch.bars):
        spans = [span for span in timeline.spans if span.microbatch == number]
        assert (bar.start, bar.end) == (spans[0].start, spans[-1].end)
    assert microbatch.top + microbatch.height < stack.top < lane(layout, "compute").top
    assert not {"microbatch", "stack"} & {row.name for row in of_stage(simulated(3)).rows}


def test_a_visit_without_units_is_drawn_in_grey() -> None:
    trace = trace_of([unit(0, "a"), unit(1, "b")], [[0], [], [1]], microbatches=2)
    program = zero3()(trace._replace(mesh=MESH))
    spans = tuple(Span(number, op, op.stream, number, number + 1.0) for number, op in enumerate(program.ops))
    layout = of_stage(Timeline(program.trace, spans, float(len(spans)), ""))
    numbers = {span.number for span in layout.timeline.on("compute") if getattr(span.op, "visit", None) == 1}
    found = [bar for bar in lane(layout, "compute").bars if bar.op in numbers]
    assert [(bar.text, bar.colour) for bar in found] == 2 * [("forward", GREY), ("backward", GREY)]
