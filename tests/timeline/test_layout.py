"""What is where in a picture: labels that are clear of each other."""

from __future__ import annotations

import itertools

import pytest

from tests.timeline.test_draw import simulated
from yafsdp_fn.timeline.labels import CLEAR, labels
from yafsdp_fn.timeline.layout import Bar, Layout


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
