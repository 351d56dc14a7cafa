"""Timelines as JSON: the same again, or a refusal that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import yafsdp_fn as ya
from models import llama
from tests.harness.abstract import step_of


@pytest.fixture(scope="module")
def timeline() -> ya.timeline.Timeline:
    config = llama.Config(vocab=256, embed=16, ffn=24, layers=2, heads=2, kv_heads=1, head_dim=8, max_length=64)
    trace = ya.planner.trace(*step_of(config, 1, 8), ranks=8, tx=ya.optim.adamw(1e-3))
    return ya.planner.simulate(ya.schedules.zero3()(trace), "a100-80g")


def test_a_timeline_comes_back_as_it_was(timeline: ya.timeline.Timeline) -> None:
    again = ya.timeline.Timeline.from_json(timeline.to_json())
    assert again == timeline and type(again) is ya.timeline.Timeline
    assert str(again) == str(timeline)


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("seconds", value="long"), "timeline.seconds: expected a finite number, got 'long'"),
        (put("seconds", value=-1), r"timeline.seconds: expected 0 to 1e\+300, got -1"),
        (put("seconds", value=10**400), "timeline.seconds: expected a finite number, got 1000"),
        (put("title", value=3), "timeline.title: expected a string"),
        (put("title", value="\ud800"), "timeline.title: expected a string without half a surrogate pair"),
        (put("spans", 1, value=[1, "gather", 0.0, 0.0, None, [[0, 0, "\ud800"]]]), "a string without half a surrogate"),
        (put("more", value=3), "timeline: there is no 'more'; expected title, seconds, overhead, spans"),
        (put("spans", value=[]), "spans: expected a list of"),
        (put("spans", 1, value=[1, "gather", 0.0]), r"timeline.spans\[1\]: no end"),
        (put("spans", 1, 0, value=0), r"spans\[1\]: expected an op's number that is not there yet, got 0"),
        (put("spans", 1, 1, value="reduce"), r"spans\[1\]: gather runs on gather, got 'reduce'"),
        (put("spans", 1, 3, value=1e9), r"spans\[1\]: it lasts from .* to 1000000000.0 s, in what lasts from 0.0 to"),
        (put("spans", 1, 4, value=7), r"spans\[1\]: its cause is no earlier op: 7"),
        (
            put("program", "stages", 0, 0, value=["fly"]),
            r"stages\[0\]\[0\]: expected a list that begins with an op's name",
        ),
        (put("program", "stages", 0, 0, 1, value=[99]), "op 0 .*rule 'form': the trace has units"),
        (put("program", "trace", "visits", 0, value=3), r"trace.visits\[0\]"),
    ],
)
def test_what_is_no_timeline_is_refused(
    timeline: ya.timeline.Timeline, change: Callable[[Any], None], says: str
) -> None:
    data = json.loads(timeline.to_json())
    change(data)
    with pytest.raises(ValueError, match=f"not a timeline in JSON: .*{says}"):
        ya.timeline.Timeline.from_json(json.dumps(data))


def test_text_that_is_cut_short_is_refused(timeline: ya.timeline.Timeline) -> None:
    with pytest.raises(ValueError, match="not a timeline in JSON: "):
        ya.timeline.Timeline.from_json(timeline.to_json()[:-20])


def test_a_peers_copies_cannot_be_kept(timeline: ya.timeline.Timeline) -> None:
    spans = (timeline.spans[0]._replace(op="a copy"), *timeline.spans[1:])
    with pytest.raises(ValueError, match="is no op of a program: it cannot be kept"):
        timeline._replace(spans=spans).to_json()
