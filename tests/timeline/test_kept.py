"""Timelines as JSON: the same again, or a refusal that says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

import yafsdp_fn as ya
from models import llama
from tests.harness.abstract import step_of
from tests.harness.damage import put
from yafsdp_fn.schedules import zero3
from yafsdp_fn.timeline import Timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    config = llama.Config(vocab=256, embed=16, ffn=24, layers=2, heads=2, kv_heads=1, head_dim=8, max_length=64)
    trace = ya.planner.trace(*step_of(config, 1, 8), ranks=8, tx=ya.optim.adamw(1e-3))
    return ya.planner.simulate(zero3()(trace), "a100-80g")


def test_a_timeline_comes_back_as_it_was(timeline: Timeline) -> None:
    again = Timeline.from_json(timeline.to_json())
    assert again == timeline
    assert type(again) is Timeline
    assert str(again) == str(timeline)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (("seconds", "long"), "timeline.seconds: expected a finite number, got 'long'"),
        (("seconds", -1), r"timeline.seconds: expected 0 to 1e\+300, got -1"),
        (("seconds", 10**400), "timeline.seconds: expected a finite number, got 1000"),
        (("title", 3), "timeline.title: expected a string"),
        (("title", "\ud800"), "timeline.title: expected a string without half a surrogate pair"),
        (("spans", 1, [1, "gather", 0.0, 0.0, None, [[0, 0, "\ud800"]]]), "a string without half a surrogate"),
        (("more", 3), "timeline: there is no 'more'; expected title, seconds, overhead, spans"),
        (("spans", []), "spans: expected a list of"),
        (("spans", 1, [1, "gather", 0.0]), r"timeline.spans\[1\]: no end"),
        (("spans", 1, 0, 0), r"spans\[1\]: expected an op's number that is not there yet, got 0"),
        (("spans", 1, 1, "reduce"), r"spans\[1\]: gather runs on gather, got 'reduce'"),
        (("spans", 1, 3, 1e9), r"spans\[1\]: it lasts from .* to 1000000000.0 s, in what lasts from 0.0 to"),
        (("spans", 1, 4, 7), r"spans\[1\]: its cause is no earlier op: 7"),
        (
            ("program", "stages", 0, 0, ["fly"]),
            r"stages\[0\]\[0\]: expected a list that begins with an op's name",
        ),
        (("program", "stages", 0, 0, 1, [99]), "op 0 .*rule 'form': the trace has units"),
        (("program", "trace", "visits", 0, 3), r"trace.visits\[0\]"),
    ],
)
def test_what_is_no_timeline_is_refused(timeline: Timeline, path: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=f"not a timeline in JSON: .*{says}"):
        Timeline.from_json(put(timeline.to_json(), *path))


def test_text_that_is_cut_short_is_refused(timeline: Timeline) -> None:
    with pytest.raises(ValueError, match="not a timeline in JSON: "):
        Timeline.from_json(timeline.to_json()[:-20])


def test_a_peers_copies_cannot_be_kept(timeline: Timeline) -> None:
    spans = (timeline.spans[0]._replace(op="a copy"), *timeline.spans[1:])
    with pytest.raises(ValueError, match="is no op of a program: it cannot be kept"):
        timeline._replace(spans=spans).to_json()
