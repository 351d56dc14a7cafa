"""Schedules beside each other: figures are those of plans and timelines, in one unit; other steps are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from models import llama
from tests.harness import failing
from tests.harness.abstract import step_of
from tests.harness.pool import on_ranks
from yafsdp_fn.planner import Plan, compare, simulate
from yafsdp_fn.planner.compare import ScheduleFigures
from yafsdp_fn.schedules import Program, Send, Trace, assign, chained_order, cut, one_f_one_b, zero2, zero3

SMALL = llama.Config(vocab=256, embed=128, ffn=352, layers=4, heads=4, kv_heads=4, head_dim=32, max_length=64)
PARTS = 4


def traced(ranks: int, rows: int, config: llama.Config = SMALL) -> Trace:
    return ya.planner.trace(*step_of(config, rows), ranks=ranks, microbatches=rows, tx=ya.optim.adamw(1e-3))


FLAT = traced(4, 2)
"""Eight rows: two microbatches on four ranks."""


def staged(microbatches: int = PARTS) -> Program:
    """The same rows, on two stages of two ranks."""
    moved = FLAT.on((("stage", 2), ("shard", 2)))
    moved = moved._replace(microbatches=microbatches, order=chained_order(moved.visits, microbatches))
    return one_f_one_b()(cut(moved, assign(moved, 2)))


PROGRAMS = {"zero3": zero3()(FLAT), "zero2": zero2()(FLAT), "1F1B": staged()}
FOUND = compare(PROGRAMS, "a100-80g", tokens=512)


def test_figures_are_those_of_plans() -> None:
    for name, row in FOUND.rows.items():
        plan = Plan.of(PROGRAMS[name], "a100-80g")
        assert (row.step_s, row.bound_s, row.bound) == (plan.step_s, plan.work.seconds, plan.bound)
        assert (row.peak_bytes, row.fits) == (plan.memory.peak_bytes, True)
        assert row.tokens_per_s == 512 / plan.step_s
        assert row.idle == plan.timeline.bubble
        assert row.compute_s == pytest.approx(sum(p.compute_s for p in plan.timeline.by_stage) / row.stages)
    rows = FOUND.rows
    assert [(row.stages, row.ranks, row.microbatches) for row in rows.values()] == [(1, 4, 2), (1, 4, 2), (2, 4, 4)]
    assert rows["zero3"].sent_bytes == PROGRAMS["zero3"].wire_bytes().total() > rows["zero2"].sent_bytes


def test_a_pipeline_sends_what_its_stage_with_most_sends_messages_too() -> None:
    each = [part.wire_bytes() for part in PROGRAMS["1F1B"].by_stage]
    for part, sent in zip(PROGRAMS["1F1B"].by_stage, each, strict=True):
        flow = part.trace.split and part.trace.split.flows[0]
        assert flow
        assert sum(isinstance(op, Send) for op in part.ops) == PARTS
        assert sent["message"] == PARTS * (flow.nbytes if part.trace.stage == 0 else flow.grad_bytes) > 0
    assert FOUND.rows["1F1B"].sent_bytes == max(sent.total() for sent in each)


def test_the_table_has_one_unit_a_column_and_its_heading_names_it() -> None:
    head, *rows = FOUND.table
    assert [cells[0] for cells in rows] == list(PROGRAMS)
    units = dict(zip(head, zip(*rows, strict=True), strict=True))
    ((scale, time),) = [(s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if f"step, {u}" in units]
    for name, step, sent, rate in zip(
        PROGRAMS, *(units[of] for of in (f"step, {time}", "sent, MiB", "tokens/s")), strict=True
    ):
        row = FOUND.rows[name]
        assert float(step.replace(",", "")) == pytest.approx(row.step_s / scale, abs=0.06)
        assert float(sent) == pytest.approx(row.sent_bytes / 2**20, abs=0.006)
        assert row.tokens_per_s
        assert float(rate.replace(",", "")) == pytest.approx(row.tokens_per_s, abs=0.6)
    assert units["ranks"] == ("4", "4", "2 x 2")
    lines = str(FOUND).splitlines()
    assert lines[1].split() == [time, time, time, time, "%", "MiB", "MiB"]
    assert lines[-1] == "512 tokens a step"
    assert len({len(line) for line in (lines[0], *lines[2:-1])}) == 1


def test_ranked_by_time_with_what_does_not_fit_behind() -> None:
    rows = FOUND.rows
    assert list(FOUND.ranked().rows) == sorted(rows, key=lambda name: rows[name].step_s)
    assert rows["zero2"].step_s < rows["zero3"].step_s
    assert rows["zero2"].peak_bytes > rows["zero3"].peak_bytes
    tight = compare(PROGRAMS, "a100-80g", memory=rows["zero3"].peak_bytes)
    behind = [name for name in tight.ranked().rows if rows[name].peak_bytes > rows["zero3"].peak_bytes]
    assert list(tight.ranked().rows)[-len(behind) :] == behind
    assert "zero2" in behind
    assert re.search(r"does not fit into 0\.0 GiB: .*zero2", str(tight))


def test_a_picture_has_every_schedule_and_a_row_for_each_stage(tmp_path: Path) -> None:
    FOUND.save(tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert all(f">{name}<" in text for name in PROGRAMS)
    assert text.count(">compute<") == 2
    assert text.count(">stage 1<") == 1
    assert text.count("time since the step began") == 1
    assert "<img " in FOUND._repr_html_()
    with pytest.raises(ValueError, match="ends in one of"):
        FOUND.save(tmp_path / "x.gif")


def test_what_is_no_schedule_is_refused_by_name() -> None:
    wrong: dict[str, Any] = {
        "'b' is a function, no Program, Plan or Timeline: call it on a trace": {"b": zero3()},
        "'b' is a str, no Program, Plan or Timeline$": {"b": "zero3"},
        "expected programs, plans or timelines by name": {},
        "expected programs, plans or timelines by name, such": {1: PROGRAMS["zero3"]},
        "are for programs, which it simulates; plans and timelines": {"b": Plan.of(PROGRAMS["zero3"], "a100-80g")},
    }
    for words, given in wrong.items():
        with pytest.raises(TypeError, match=words):
            compare(given, "a100-80g")
    with pytest.raises(ValueError, match="tokens=-1: expected the tokens of a step"):
        compare(PROGRAMS, "a100-80g", tokens=-1)
    with pytest.raises(TypeError, match="'b' is a program; name the cluster"):
        compare({"b": PROGRAMS["zero3"]})
    plans = {
        name: Plan.of(PROGRAMS[name], "a100-80g")._replace(tokens=n) for name, n in (("zero3", 512), ("zero2", 256))
    }
    with pytest.raises(ValueError, match="the same batch: zero3 512 tokens, zero2 256 tokens"):
        compare(plans)
    with pytest.raises(ValueError, match=r"^compare: 'b': the trace has no costs"):
        compare({"b": PROGRAMS["zero3"].with_trace(FLAT._replace(precision=()))}, "a100-80g")


def test_one_model_over_tensor_is_one_step() -> None:
    from models.parts.axes import Axes

    trace = ya.planner.trace(
        *step_of(SMALL, axes=Axes(tensor=True)),
        mesh=(("shard", 2), ("tensor", 2)),
        microbatches=2,
        tx=ya.optim.adamw(1e-3),
    )
    found = compare({"plain": PROGRAMS["zero3"], "over tensor": zero3()(trace)}, "a100-80g")
    assert found.rows["over tensor"].ranks == 4
    assert "sent: without the collectives of blocks over tensor" in found.notes
    assert not any(note.startswith("sent: ") for note in FOUND.notes)


# ---- two timelines of one program


def test_timelines_of_one_program_are_compared_by_resource() -> None:
    one, two = (simulate(PROGRAMS["zero3"], cluster) for cluster in ("a100-80g", "h100-80g"))
    found = compare({"a100": one, "h100": two})
    (note,) = found.notes
    assert note.startswith(f"a100 over h100: step {one.seconds / two.seconds - 1:+.1%}, gather ")
    assert f"compute {one.compute_s / two.compute_s - 1:+.1%}" in note
    without = two._replace(spans=two.spans[1:])
    assert len(compare({"a": one, "b": without}).notes) == 1  # a gather that one of them lacks
    assert compare({"a": one, "b": simulate(PROGRAMS["zero2"], "a100-80g")}).notes == []
    assert FOUND.rows["zero3"] == ScheduleFigures.of(one, FOUND.plans["zero3"], 512)


@on_ranks(2)
def test_measured_beside_predicted_on_two_ranks(mesh: Any) -> None:
    """What a rank has measured, beside a prediction. The measured trace is one that was learnt, without costs."""
    steps = failing.Steps(failing.loss, mesh=mesh)
    program = steps.step.lower(steps.now, steps.batch)
    steps.take()
    with ya.timeline.record() as recording:
        steps.take()
    found = ya.planner.compare({"predicted": program, "measured": recording.timeline()}, "local")
    row = found.rows["measured"]
    assert row.bound is None
    assert row.peak_bytes is None
    assert row.sent_bytes == program.wire_bytes().total()
    assert row.step_s == recording.timeline().seconds
    assert found.rows["predicted"].peak_bytes
    assert re.search(r"^measured +2 .* - ", str(found), re.M)
    assert found.notes[0].startswith("predicted over measured: step ")
