"""Runs of LLM Foundry: the rows, the step of each, the fit, the committed predictions, and the command."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published import foundry, foundry_fit, main, steps
from benchmarks.published.errors import by_groups
from benchmarks.published.foundry import KINDS, MEASURED, TABLE
from benchmarks.published.foundry_fit import Lines
from benchmarks.published.runs import Run, table
from benchmarks.published.steps import Predicted, predict
from yafsdp_fn.lab.peers import AS_RUN, Copy
from yafsdp_fn.planner import Plan, simulate
from yafsdp_fn.planner.cluster import A100
from yafsdp_fn.schedules import Gather

SMALL = foundry.run("125m", "a100_80gb", 16, 512, 128, 2)
REGISTERED = TABLE.with_name("llm_foundry_registered.csv")


def rows_of(file: Path) -> list[Run]:
    found, refused = table(file, foundry.read)
    assert not refused
    return found


def test_the_models_have_as_many_parameters_as_the_rows_say() -> None:
    runs = rows_of(TABLE)  # which compares each with its NumParams
    assert len(runs) == 149 and {run.gpus for run in runs} == {8}
    assert {kind: sum(run.gpu == kind for run in runs) for kind in KINDS} == {
        "a100_40gb": 46,
        "a100_80gb": 59,
        "h100_80gb": 44,
    }


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("30019254272", "30019254273"), r"line 2: NumParams is 30019254273, the model built here has 30019254272"),
        (("30b,8192,8,h100", "30b,8192,12,h100"), r"line 2: 12 GPUs do not fill nodes of 8"),
        (("30b,8192,8,h100_80gb", "30b,8192,8,h100"), r"line 2: GPU is 'h100'; did you mean h100_80gb or "),
        (("FULL_SHARD", "NO_SHARD"), r"line 2: Sharding Strategy is 'NO_SHARD'; .*known: FULL_SHARD, SHARD_GRAD_OP"),
        ((",1384,", ",fast,"), r"line 2: .* is 'fast', expected a positive number"),
        (("GradAccum", "Accum"), r"line 2: no column 'GradAccum'"),
        (("H100 80GB BF16\n", "H100 80GB BF16,more\n"), r"line 2: more fields than columns"),
        (("Model,", "Model;"), r"line 2: no column 'Model'"),
    ],
)
def test_what_is_not_modelled_is_refused(
    change: tuple[str, str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("".join(TABLE.read_text().splitlines(keepends=True)[:2]).replace(*change, 1))
    runs, refused = table(file, foundry.read)
    assert not runs and re.match(f"rows.csv, {error}", refused[0])
    assert main(["--rows", str(file)]) == 2 and "rows.csv" in capsys.readouterr().err


def test_a_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(TABLE.read_bytes().replace(b"H100", b"\xe9", 1))
    with pytest.raises(ValueError, match=r"rows\.csv: 'utf-8' codec can't decode"):
        table(file, foundry.read)


def test_a_step_of_many_micro_batches_is_as_a_full_simulation_says() -> None:
    run = SMALL._replace(accumulation=5)
    whole = simulate(steps.program(run, 5), foundry.cluster(run.gpu)).seconds
    assert predict(run).seconds == pytest.approx(whole, rel=1e-9)


def test_recomputation_fp8_and_traffic_cost_what_they_should() -> None:
    plain, again, fp8 = (
        predict(run).tokens_per_s for run in (SMALL, SMALL._replace(recompute="all"), SMALL._replace(fp8=True))
    )
    assert 0.65 * plain < again < 0.9 * plain
    assert plain < fp8 < 2 * plain
    program = steps.program(SMALL, 1)
    moved = sum(op.nbytes for op in program.ops if isinstance(op, Copy) and op.stream == "compute")
    elements = sum(program.trace.units[unit].numel for visit in program.trace.visits for unit in visit.trained)
    assert moved == pytest.approx((4 + steps.TRAFFIC) * elements, rel=1e-3)  # of each backward


def test_weights_that_stay_are_gathered_once_a_micro_batch() -> None:
    head, line, *_ = TABLE.read_text().splitlines()
    fields = line.replace("FULL_SHARD", foundry.KEPT).split(",")
    read = foundry.read(dict(zip(head.split(","), fields, strict=True)), "line 2")
    assert read.kept and str(read).endswith(", SHARD_GRAD_OP")
    kept, freed = (steps.program(SMALL._replace(kept=kept), 2) for kept in (True, False))
    assert kept.count(Gather) == 2 * len(kept.trace.units) < freed.count(Gather)
    assert predict(SMALL._replace(kept=True)).tokens_per_s > predict(SMALL).tokens_per_s


def test_a_plan_says_how_much_of_it_nothing_explains() -> None:
    program = steps.program(SMALL, 1)
    doubtful, plain = (str(Plan.of(program, cluster)) for cluster in (AS_RUN, A100))
    assert re.search(r"bound by compute and, for \d+% of the step, by an overhead that nothing explains", doubtful)
    assert "bound by compute; " in plain


def made(rows: int = 30) -> tuple[Lines, np.ndarray]:
    """Rows that were made by figures, one of them disturbed by half."""
    truth = 1 / np.array([2e14, 1e14, 1e12])
    parts = np.random.default_rng(0).uniform(0.1, 1.0, (rows, 3))
    measured = parts.sum(1) * np.where(np.arange(rows) == 3, 1.5, 1.0)
    return Lines(np.zeros(rows), parts / truth / measured[:, None]), truth


def test_the_fit_finds_what_made_the_times_whatever_one_row_says() -> None:
    lines, truth = made()
    assert foundry_fit.fit(lines, 2.5 * truth) == pytest.approx(truth, rel=1e-3)


def test_what_is_left_out_does_not_count() -> None:
    """Times of its own model do not change what is predicted of a row, and those of others do."""
    lines, truth = made()
    runs = [SMALL._replace(name=("a", "b")[n % 2]) for n in range(30)]
    slower = np.array([3.0, 1.0] * 15)  # times of "a"

    def of_times(times: np.ndarray) -> np.ndarray:
        of = Lines(lines.base, lines.slopes / times[:, None])
        return times / (1 + foundry_fit.left_out(runs, of, truth, lambda run: run.name) / 100)

    before, after = of_times(np.ones(30)), of_times(slower)
    assert after[0::2] == pytest.approx(before[0::2], rel=1e-6)
    assert after[1::2] == pytest.approx(3 * before[1::2], rel=1e-2)


def test_the_command_predicts_rows_with_and_without_a_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *lines = TABLE.read_text().splitlines()
    line = next(line for line in lines if line.startswith("125m,512,8,a100_80gb"))
    unknown = line.replace(",8,a100_80gb", ",64,a100_80gb").replace("165681", "")
    file = tmp_path / "rows.csv"
    other_way = line.replace("FULL_SHARD", "NO_SHARD")
    file.write_text("\n".join([head, other_way, line, unknown]), encoding="utf-8-sig")  # as spreadsheets save it
    assert main(["--rows", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, other = found["rows"]
    assert one["error"] == pytest.approx(100 * (one["tokens_per_s_per_gpu"] / 165681 - 1), abs=0.01)
    assert abs(one["error"]) < 8 and one["fits"]
    assert other["measured_s"] is None and other["error"] is None and other["tokens_per_s_per_gpu"] > 1e5
    spreads = found["spreads"]
    assert spreads["gpu"]["a100_80gb"] == spreads["gpus"]["8"] == spreads["all"]["all"]
    assert spreads["all"]["all"]["rows"] == 1
    assert len(found["not predicted"]) == 1 and "line 2: Sharding Strategy" in found["not predicted"][0]
    assert main(["--rows", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "median" in shown and "not predicted: " in shown


def test_errors_are_summed_up_by_kind_and_number_of_gpus() -> None:
    runs = [SMALL._replace(gpus=gpus) for gpus in (16, 16, 128)]
    errors = [(Predicted(run, 1.0, 1), error) for run, error in zip(runs, (-10.0, 20.0, -1.0), strict=True)]
    found = by_groups(errors)
    assert list(found["gpus"]) == ["512", "64"]
    assert found["gpus"]["64"] == {"rows": 2, "median": 15.0, "p90": 19.0, "largest": 20.0, "bias": 5.0}
    assert found["all"]["all"]["median"] == 10.0


def test_registered_predictions_are_what_the_committed_figures_say() -> None:
    with REGISTERED.open(newline="") as file:
        lines = list(csv.DictReader(file))
    runs = rows_of(REGISTERED)
    assert not any(line[MEASURED] for line in lines) and {run.gpus for run in runs} == set(foundry_fit.GPUS)
    assert {(run.name, run.gpu) for run in runs} >= {(run.name, run.gpu) for run in rows_of(TABLE)}
    checked = [at for at, run in enumerate(runs) if run.name == "125m" and run.seq_len == 512]
    assert len(checked) >= 12
    for at in checked:
        if runs[at].micro_batch == SMALL.micro_batch:
            found = predict(runs[at]).tokens_per_s
            assert found == pytest.approx(float(lines[at][foundry_fit.PREDICTED]), abs=0.06)


def test_json_goes_with_rows_or_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--json"])
    assert ended.value.code == 2 and "--json goes with --rows, --fit" in capsys.readouterr().err
