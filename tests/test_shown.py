"""What a notebook shows of programs, timelines, plans, comparisons and refusals."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree

import pytest

import yafsdp_fn as ya
from tests.harness import failing
from tests.harness.pool import Pools
from tests.test_printed import PIPELINE, PROGRAM
from yafsdp_fn.schedules import Program, one_f_one_b, verify, zero3


def text_of(html: str) -> str:
    """What is read of a page."""
    return "".join(ElementTree.fromstring(f"<p>{html}</p>").itertext())


@pytest.mark.parametrize("program", [PROGRAM, PIPELINE])
def test_a_program_is_shown_as_it_is_printed(program: Program) -> None:
    assert text_of(program._repr_html_()) == str(program)


def test_a_refusal_marks_the_two_ops() -> None:
    with pytest.raises(ya.errors.Refused) as refused:
        verify(PROGRAM.with_ops([*PROGRAM.ops[:5], *PROGRAM.ops[6:]]))
    html = refused.value._repr_html_()
    assert text_of(html) == str(refused.value)
    marked = re.findall(r'<span style="color: (#\w+)[^>]*>(.*?)</span>', html)
    assert [words.split("&lt;- ")[1] for _, words in marked].count("refused") == 1
    assert len({colour for colour, _ in marked}) == len(marked) <= 2


@pytest.mark.parametrize("stages", [1, 2])
def test_a_timeline_is_drawn_and_a_plan_is_words_and_its_picture(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = zero3() if stages == 1 else one_f_one_b()
    where = {"tx": failing.TX, "ranks": 8 * stages, "cluster": "a100-80g", "stages": stages}
    plan = ya.planner.plan(failing.loss, failing.params(), failing.batch(), schedule=schedule, microbatches=2, **where)
    svg = plan.timeline._repr_svg_()
    assert svg is not None
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert plan.timeline.title in svg
    words, picture = plan._repr_html_().split("<img ")
    assert text_of(words) == str(plan)
    (data,) = re.findall(r"base64,([^\"]+)", picture)
    assert base64.b64decode(data).decode() == svg
    monkeypatch.setattr("yafsdp_fn.timeline.timeline.find_spec", lambda name: None)  # without matplotlib
    assert plan.timeline._repr_svg_() is None
    assert plan._repr_html_() == words


def recorded(mesh: object) -> tuple[str, str, str]:
    steps = failing.Steps(failing.loss, 1, mesh)
    with ya.timeline.record() as recording:
        steps.take()
    program = steps.step.program(steps.now)
    timeline = recording.timeline()
    compared = ya.planner.compare({"one": timeline, "other": timeline})
    assert text_of(compared._repr_html_().split("<img ")[0]) == str(compared)
    return program._repr_html_(), str(program), timeline.to_json()


def test_on_two_ranks_each_shows_the_same_program_and_its_own_times(pools: Pools) -> None:
    (html, text, timeline), other = pools[2].run(recorded)
    assert text_of(html) == text
    assert (html, text) == other[:2]
    assert "measured" in (ya.timeline.Timeline.from_json(timeline)._repr_svg_() or "")
