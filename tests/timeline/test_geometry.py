"""What is where in a picture: labels clear of each other, stacks and microbatches told apart."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from tests.planner.pipelines import NO_LINKS, chain, pipeline
from tests.schedules.traces import layers, model, on, trace_of, unit
from tests.timeline.test_draw import MESH, PLAIN, drawn, simulated
from yafsdp_fn.planner import simulate
from yafsdp_fn.schedules import Trace, one_f_one_b, zero1, zero3
from yafsdp_fn.timeline import Span, Timeline, stages_draw
from yafsdp_fn.timeline.draw import labels
from yafsdp_fn.timeline.geometry import PLAIN as GREY
from yafsdp_fn.timeline.geometry import Bar, Layout, Palette
from yafsdp_fn.timeline.paint import CLEAR, LEFT, TEXT, wide


@pytest.mark.parametrize(("count", "flops"), [(8, 1), (8, 4), (20, 1), (20, 4), (80, 4)])
def test_labels_of_a_lane_are_clear_of_each_other(count: int, flops: int) -> None:
    """Those of idle time, too, which stand between those of computes."""
    timeline = simulated(count, flops=flops)
    layout = Layout(timeline, 7.85, 2.0 * timeline.seconds)  # thin: it has half of the axis
    for stream in timeline.streams:
        found = labels(layout, layout.bars(stream), 7.0)
        found += labels(layout, layout.idle() if stream == "compute" else [], 7.0, found)
        found.sort(key=lambda label: label.middle)
        assert len(found) >= 3
        edges = [(label.middle - label.half, label.middle + label.half) for label in found]
        for (_, end), (start, _) in itertools.pairwise(edges):
            assert start - end >= 0.999 * CLEAR


def test_a_slot_that_holds_odd_layers_is_numbered_like_one_that_holds_even_ones() -> None:
    layout = Layout(simulated(2), 7.85, 100.0)
    held = [[Bar(k, k + 1.0, "grey", str(2 * k + odd), 2 * k + odd) for k in range(20)] for odd in (0, 1)]
    even, odd = ([label.text for label in labels(layout, bars, 7.0)] for bars in held)
    assert even == ["0", "10", "20", "30"] and odd == ["1", "11", "21", "31"]


@pytest.mark.parametrize("microbatches", [16, 64])
def test_numbers_of_calls_are_clear_of_each_other(microbatches: int) -> None:
    """In every row of a pipeline whose calls are hardly as wide as their numbers."""
    program = pipeline(chain(4, microbatches), 4, one_f_one_b(zero1()))
    figure = stages_draw._figure([simulate(program, NO_LINKS)], ())
    axes, inches = figure.axes[0], figure.get_figwidth() - LEFT - stages_draw.RIGHT
    rows: dict[float, list[tuple[float, float]]] = {}
    for text in axes.texts:
        if text.get_text().isdigit():
            x, y = text.get_position()
            middle, half = x / axes.get_xlim()[1] * inches, wide(text.get_text(), TEXT) / 2
            rows.setdefault(y, []).append((middle - half, middle + half))
    assert len(rows) == 4 and min(map(len, rows.values())) >= 8
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
    hues = [Palette(model(8, stacks=2)).of(number, dark=True) for number in range(1, 17)]
    steps = [math.dist(one, two) for one, two in itertools.pairwise(hues)]
    assert max(steps) == steps[7], "hues jump from the last layer of a stack to the first of the next"
    found = drawn(simulate(zero3()(trace), PLAIN), tmp_path)
    words = ["forward and weights, layers 0 to 2 of b", "0 to 2 of a", "backward and gradients"]
    assert [text for text in found if "layers" in text or " of " in text or text == words[-1]] == words


def test_strips_say_which_microbatch_and_which_stack() -> None:
    timeline = simulate(zero3()(in_another_order()), PLAIN)
    layout = Layout(timeline, 7.85, timeline.seconds)
    (microbatch, numbers), (stack, names) = layout.strips
    assert (microbatch.name, [bar.text for bar in numbers]) == ("microbatch", ["0", "1"])
    assert (stack.name, [bar.text for bar in names]) == ("stack", ["b", "a", "a", "b"] * 2)
    for number, bar in enumerate(numbers):
        spans = [span for span in timeline.spans if span.microbatch == number]
        assert (bar.start, bar.end) == (spans[0].start, spans[-1].end)
    assert microbatch.top + microbatch.height < stack.top < layout.lanes["compute"].top
    assert Layout(simulated(3), 7.85, 10.0).strips == []


def test_a_visit_without_units_is_drawn_in_grey() -> None:
    trace = trace_of([unit(0, "a"), unit(1, "b")], [[0], [], [1]], microbatches=2)
    program = zero3()(trace._replace(mesh=MESH))
    spans = tuple(Span(number, op, op.stream, number, number + 1.0) for number, op in enumerate(program.ops))
    layout = Layout(Timeline(program.trace, spans, float(len(spans)), ""), 7.85, 100.0)
    found = [
        bar
        for span, bar in zip(layout.timeline.on("compute"), layout.bars("compute"), strict=True)
        if span.op.visit == 1
    ]
    assert [(bar.text, bar.colour) for bar in found] == 2 * [("forward", GREY), ("backward", GREY)]
