"""Published runs over tensor, context and stages: what the presets say of them, row by row."""

from __future__ import annotations

import json

import pytest

from benchmarks.published import main, over_axes
from benchmarks.published.over_axes import Row, rate, rows
from benchmarks.published.steps import KINDS, program, seconds
from yafsdp_fn.planner import simulate

FAR = {
    ("Llama 3", 430),
    ("Llama 3", 400),
    *(("torchtitan", rate) for rate in (3890, 1071, 548, 829, 876, 47, 31, 16, 185)),
}
"""(run, what was measured) of the rows that are predicted more than 10% away: docs/accuracy.md says why."""


def far(row: Row) -> bool:
    return (row.run.source, row.measured) in FAR


def test_the_table_is_of_runs_over_axes() -> None:
    table = rows()
    sources = [row.run.source for row in table]
    assert {name: sources.count(name) for name in sources} == {"Llama 3": 3, "PTD-P": 6, "torchtitan": 19}
    for run, *_ in table:
        assert run.gpus % (run.tensor * run.context * run.stages * run.replicas) == 0, run
    assert sum(map(far, table)) == 11


DAILY = [
    row for row in rows() if row.run.source == "torchtitan" and row.run.inside == {"tensor": 8} and not row.run.order
]


@pytest.mark.parametrize(
    "row",
    [row if row in DAILY else pytest.param(row, marks=pytest.mark.nightly) for row in rows()],
    ids=lambda row: str(row.run),
)
def test_rows_are_predicted_within_ten_percent(row: Row) -> None:
    error = 100 * (row.predicted / row.measured - 1)
    assert (abs(error) > 10) == far(row), error
    assert abs(error) < 80


def test_further_microbatches_take_as_long_as_those_before() -> None:
    base = next(row.run for row in rows() if row.run.name == "llama3.1-8b" and row.run.gpus == 128)
    run = base._replace(stages=2, order="one_f_one_b", context=1, micro_batch=1, accumulation=7, tensor=2)
    direct = simulate(program(run, 7), KINDS[run.gpu]).seconds
    assert seconds(run, KINDS[run.gpu]) == pytest.approx(direct, rel=2e-3)
    assert rate(run, "tokens/s", 2.0) == 7 * run.seq_len / 2 / 2 / 2.0


def test_what_a_row_says_is_in_its_step() -> None:
    """Full recomputation, narrow products, and a ring without balance each change the step as they should."""
    base = next(row.run for row in rows() if row.run.context == 2 and row.run.stages == 1)
    where = KINDS[base.gpu]
    assert seconds(base._replace(recompute="none"), where) < seconds(base, where)
    assert seconds(base._replace(fp8=False), where) > 1.05 * seconds(base, where)
    even, uneven = (seconds(base._replace(uneven=which), where) for which in (False, True))
    assert even < uneven < 1.5 * even


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = DAILY[0], next(row for row in rows() if row.run.context == 2 and row.run.stages == 1)
    monkeypatch.setattr(over_axes, "rows", lambda: [one, other])
    assert main(["--axes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert str(one.run) in lines[0] and "uneven over context" in lines[1] and "within 10%" in lines[2]
    assert main(["--axes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["measured"] for each in found] == [one.measured, other.measured]
    assert found[0]["error"] == pytest.approx(100 * (found[0]["predicted"] / one.measured - 1))
