"""`python -m train plan`: the JSON alone on stdout, a table for people, the picture, and errors that help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import yafsdp_fn as ya
from benchmarks.published import yafsdp
from train.plan import command, main, step
from train.plan.command import OTHERS
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import CLUSTERS

Capsys = pytest.CaptureFixture[str]
SMALL = ["--model", "llama3.2-1b", "--gpus", "16", "--seq-len", "512"]


@pytest.fixture(autouse=True, scope="module")
def traced_once() -> Iterator[None]:
    """Commands of this module share the traces of equal steps."""
    made = dict[Any, Any]()
    trace = step.traced

    def traced(options: step.Options, config: Any, mesh: Any, *how: Any, **over: Any) -> Any:
        sizes = options.seq_len, options.batch, options.microbatches, options.reduce
        key = repr((sizes, config, mesh, how, over))
        if key not in made:
            made[key] = trace(options, config, mesh, *how, **over)
        return made[key]

    with patch.object(step, "traced", traced), patch.object(command, "traced", traced):
        yield


def shown(capsys: Capsys, *arguments: str) -> str:
    """What is printed, without a picture."""
    assert main([*SMALL, *arguments, "--timeline", "None"]) == 0
    return capsys.readouterr().out


def planned(capsys: Capsys, *arguments: str) -> dict[str, Any]:
    return json.loads(shown(capsys, *arguments, "--json"))


def test_json_is_alone_on_stdout(capsys: Capsys, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    events = tmp_path / "step.json"
    assert main([*SMALL, "--json", "--timeline", str(picture), "--perfetto", str(events)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert {"step_s", "fsdp_step_s", "compute_s", "comm_s", "peak_bytes", "min_ckpt_layers"} <= set(found)
    assert found["step_s"] >= max(found["compute_s"], found["comm_s"]) > 0
    assert found["peak_bytes"] == sum(found["memory"].values()) <= found["budget_bytes"]
    assert found["fits"]
    assert picture.read_text().startswith("<?xml")
    assert json.loads(events.read_text())["traceEvents"]
    assert str(picture) in err
    assert str(events) in err


def test_a_laptop_has_ranks_and_no_gpus(capsys: Capsys) -> None:
    few = ["--model", "debug", "--gpus", "1", "--seq-len", "64"]
    out = shown(capsys, *few, "--cluster", "local")
    assert "on 1 rank (local)" in out
    assert " a rank\n" in out.replace("  ", "")
    assert "GPU" not in out
    assert "on 1 GPU (a100-80g)" in shown(capsys, *few)


def test_what_a_plan_answers_to(capsys: Capsys) -> None:
    base = planned(capsys)
    again = planned(capsys, "--ckpt-layers", "16")
    assert again["compute_s"] > base["compute_s"]
    assert again["peak_bytes"] < base["peak_bytes"]
    assert planned(capsys, "--seq-len", "1024")["compute_s"] > 1.7 * base["compute_s"]
    assert planned(capsys, "--reduce", "bf16")["comm_s"] < 0.8 * base["comm_s"]
    assert planned(capsys, "--cluster", "h100-80g")["step_s"] < base["step_s"]
    assert planned(capsys, "--schedule", "zero2")["comm_s"] < base["comm_s"]
    assert dict(planned(capsys, "--schedule", "hsdp")["mesh"]) == {"replicate": 2, "shard": 8}
    assert planned(capsys, "--batch", "2", "--microbatches", "2")["comm_s"] > base["comm_s"]
    assert base["saved"]["fsdp2"] == pytest.approx(1 - base["step_s"] / base["fsdp2_step_s"])
    assert base["step_s"] == base["zero3_step_s"]


def test_what_nothing_explains_is_in_published_runs_alone(capsys: Capsys) -> None:
    base = planned(capsys)
    as_run = planned(capsys, "--schedule", "yafsdp")
    elsewhere = planned(capsys, "--schedule", "yafsdp", "--cluster", "h100-80g")
    unexplained = 18 * 6e-3  # embedding, norm (with the head tied to the first), 16 layers
    assert base["overhead_s"] == 0.0
    assert as_run["overhead_s"] == pytest.approx(unexplained)
    assert base["unexplained_s"] == pytest.approx({"fsdp": unexplained, "fsdp2": 0, "yafsdp": unexplained, "zero3": 0})
    assert not any(elsewhere["unexplained_s"].values())
    assert elsewhere["overhead_s"] == 0.0
    assert base["cluster"] == "a100-80g"
    assert "as in YaFSDP's runs" in as_run["cluster"]
    assert {as_run["step_s"], as_run["yafsdp_step_s"]} == {base["yafsdp_step_s"]}
    for plan, own in ((base, 0.0), (as_run, unexplained)):  # what is saved leaves it out on both sides
        part = 1 - (plan["step_s"] - own) / (plan["fsdp_step_s"] - unexplained)
        assert plan["saved"]["fsdp"] == pytest.approx(part)


def test_rows_of_the_published_table_come_out_as_fitted(capsys: Capsys) -> None:
    row = next(row for row in yafsdp.rows() if row.ckpt_layers == 10)
    shape = ["--model", row.model, "--gpus", str(row.gpus), "--seq-len", str(row.seq_len)]
    found = planned(capsys, *shape, "--ckpt-layers", "10")
    remat = ya.schedules.remat.first(10)
    assert found["min_ckpt_layers"] == 11  # of zero3
    for peer in ("yafsdp", "fsdp"):
        assert found[f"{peer}_step_s"] == pytest.approx(
            yafsdp.predict(row, getattr(peers, peer)(remat=remat)), rel=2e-3
        )


def test_small_models_have_no_part_that_nothing_explains(capsys: Capsys) -> None:
    assert all(cluster.overhead(100) == 0.0 for cluster in CLUSTERS.values())
    time, others = shown(capsys, "--model", "gpt2-xl", "--gpus", "8", "--seq-len", "1024").split("others, ")
    assert "overhead 0 s" in time
    assert "unit_overhead" not in time
    assert "nothing explains" not in time
    assert "YaFSDP as fitted, 0.30 s unexplained" in others
    assert '"saved" leaves out' in others


def test_over_axes_inside_of_layers(capsys: Capsys) -> None:
    base = planned(capsys)
    over = planned(capsys, "--mesh.tensor", "2", "--mesh.sequence")
    assert over["mesh"] == {"shard": 8, "tensor": 2}
    assert over["schedule"].startswith("tensor 2, zero3")
    assert over["tokens_per_step"] == base["tokens_per_step"] // 2
    assert over["memory"]["activations"] < 0.6 * base["memory"]["activations"]
    assert over["saved"]["fsdp2"] == pytest.approx(1 - 2 * over["step_s"] / over["fsdp2_step_s"])
    both = planned(capsys, "--mesh.context", "2", "--mesh.tensor", "2", "--schedule", "hsdp")
    assert both["mesh"] == {"replicate": 2, "shard": 2, "context": 2, "tensor": 2}
    assert both["tokens_per_step"] == base["tokens_per_step"] // 4
    assert "512 tokens for context 2 ranks" in " ".join(shown(capsys, "--mesh.context", "2").split())


def test_as_few_layers_recompute_as_fit(capsys: Capsys) -> None:
    roomy = planned(capsys)
    assert roomy["min_ckpt_layers"] == 0
    tight = planned(capsys, "--memory-gib", f"{roomy['peak_bytes'] / 2**30 - 0.3}")
    fewest = tight["min_ckpt_layers"]
    assert 0 < fewest < 16
    assert f"{fewest} of 16 layers recomputed" in tight["schedule"]
    assert tight["fits"]
    fewer = planned(capsys, "--memory-gib", f"{tight['budget_bytes'] / 2**30}", "--ckpt-layers", str(fewest - 1))
    assert not fewer["fits"]


def test_what_does_not_fit_is_shown_and_is_an_error(capsys: Capsys) -> None:
    assert main([*SMALL, "--memory-gib", "1", "--json", "--timeline", "None"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not found["fits"]
    assert found["min_ckpt_layers"] is None
    assert "Largest: " in found["why_not"]
    assert found["why_not"] in " ".join(err.split())
    assert planned(capsys)["why_not"] is None


@pytest.mark.nightly
def test_for_people(capsys: Capsys, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    assert main([*SMALL, "--search", "--synthesize", "1", "--timeline", str(picture)]) == 0
    out = capsys.readouterr().out
    drawn = picture.read_text()
    for line in ("best builder", "written: ", "no program takes less than", " moves"):  # and the picture
        assert line in out
        assert line in drawn
        assert out.count(" moves") == 1
    for words in ("llama3.2-1b", "bound by", "FSDP2", "saved", "gradient slots", "fewest layers", "shorter than zero3"):
        assert words in out
    assert "searched for the same 8,192 tokens a step" in out


def test_every_time_has_tokens_beside_it(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = planned(capsys, "--batch", "2", "--microbatches", "2")
    assert found["tokens_per_step"] == 16 * 2 * 512
    out = shown(capsys, "--batch", "2", "--microbatches", "2")
    assert "16,384 a step" in out
    assert f"{found['tokens_per_second']:,.0f} tokens/s" in out
    for other, named in OTHERS.items():
        seconds = found[f"{other}_step_s"]
        row = next(line for line in out.splitlines() if line.startswith(f" {named}"))
        assert f"{seconds:.3f} {16384 / seconds:,.0f} " in " ".join(row.split())


SEVERAL = ["fsdp2", "zero3", "hsdp", "one_f_one_b-stages2-zero1", "interleaved-stages2"]


def test_several_schedules_beside_each_other(capsys: Capsys, tmp_path: Path) -> None:
    how = [*SMALL, "--batch", "2", "--microbatches", "2", "--ckpt-layers", "0", "--schedules", *SEVERAL]
    picture = tmp_path / "all.svg"
    events = tmp_path / "all.json"
    assert main([*how, "--timeline", str(picture), "--perfetto", str(events)]) == 0
    out = capsys.readouterr().out
    found = planned(capsys, *how)
    rows = found["schedules"]
    assert set(rows) == set(SEVERAL)
    assert found["tokens_per_step"] == 16 * 2 * 512
    assert [row["step_s"] for row in rows.values()] == sorted(row["step_s"] for row in rows.values())
    alone = planned(capsys, *how[: how.index("--schedules")], "--schedule", "hsdp")
    assert rows["hsdp"]["step_s"] == alone["step_s"]
    assert rows["hsdp"]["peak_bytes"] == alone["peak_bytes"]
    staged = rows["one_f_one_b-stages2-zero1"]
    assert (staged["stages"], staged["ranks"], staged["microbatches"]) == (2, 16, 4)
    assert staged["tokens_per_s"] == 16 * 2 * 512 / staged["step_s"]
    for name, row in rows.items():
        (line,) = (line.split() for line in out.splitlines() if line.startswith(f"{name} "))
        assert line[-1] == f"{row['tokens_per_s']:,.0f}"
    drawn = picture.read_text()
    assert all(f">{name}<" in drawn for name in SEVERAL)
    assert drawn.count(">stage 1<") == 2
    assert len({event["pid"] for event in json.loads(events.read_text())["traceEvents"]}) == 7


def test_each_of_several_recomputes_what_it_must(capsys: Capsys) -> None:
    how = ["--schedules", "zero3", "zero2", "one_f_one_b-stages2"]
    peaks = {name: row["peak_bytes"] for name, row in planned(capsys, *how)["schedules"].items()}
    limit = max(peaks.values()) / 2**30 - 0.1
    tight = planned(capsys, *how, "--memory-gib", f"{limit}")["schedules"]
    assert all(row["fits"] for row in tight.values())
    assert any(name.endswith(" recomputed") for name in tight)
    assert main([*SMALL, *how, "--memory-gib", "1", "--timeline", "None"]) == 2
    assert "Largest: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "llama2-70"], "did you mean llama2-70b"),
        (["--cluster", "a100"], "did you mean a100-80g"),
        (["--gpus", "60"], "take 56 or 64"),
        (["--schedule", "zero4"], "no builder 'zero4'"),
        (["--schedule", "zero3-remat"], "instead of -remat, --ckpt-layers 16"),
        (["--schedule", "zero3-chunk2", "--ckpt-layers", "2"], "recomputed anyway"),
        (["--ckpt-layers", "17"], "has 16 layers"),
        (["--search", "--ckpt-layers", "2"], "give none of them"),
        (["--synthesize", "5"], "--synthesize 5.0 begins with what --search finds: add --search"),
        (["--search", "--synthesize", "-1"], "--synthesize -1.0: expected seconds"),
        (["--search", "--schedule", "yafsdp"], "give none of them"),
        (["--search", "--mesh.tensor", "2"], "give none of them"),
        (["--schedule", "yafsdp", "--mesh.tensor", "2"], "no axes inside of layers"),
        (["--mesh.sequence"], "mesh.sequence is of the ranks of mesh.tensor: give two or more"),
        (["--mesh.context", "3"], "context=3): the job has 16 ranks, not a multiple of 3"),
        (["--mesh.context", "2", "--seq-len", "510"], "--seq-len 510: not a multiple of 4"),
        (["--mesh.tensor", "16"], "8 do not divide among 16 ranks of tensor"),
        (["--replicate", "2"], "--replicate is for --schedule hsdp"),
        (["--seq-len", "0"], "--seq-len 0"),
        (["--model", ""], "--model: expected a model; known: "),
        (["--microbatches", "2"], "--batch 1 does not divide into --microbatches 2"),
        (["--schedule", "gpipe-stages2-zero1"], "for a pipeline, --schedules gpipe-stages2-zero1"),
        (["--schedule", "hsdp", "--replicate", "0"], "--replicate 0"),
        (["--memory-gib", "inf"], "--memory-gib inf"),
        (["--memory-gib", "-1"], "--memory-gib -1"),
        (
            ["--memory-gib", "500"],
            "--memory-gib 500.0: expected a number above 0, and at most the 81 that a GPU of a100",
        ),
        (["--gpus", "10000000"], "--gpus 10000000: expected at most 131,072"),
        (["--model", "llama2-7b", "--seq-len", "100000"], "at most 4,096, the positions that llama2-7b was made for"),
        (["--microbatches", "4000000"], "--microbatches 4000000: expected at most 512"),
        (["--schedules", "zero3", "--search"], "leave --search and --schedule out"),
        (["--schedules", "zero4"], "--schedules zero4: there is no builder 'zero4'"),
        (["--schedules", "zero3", "hsdp", "zero3"], "--schedules zero3 hsdp zero3: zero3 is there twice"),
        (["--schedules", "fsdp2-wrap"], "fsdp2 does not take -wrap here; it takes each of -prefetchK, -remat, -defer"),
        (["--schedules", "zero3-remat"], "instead of -remat, --ckpt-layers"),
        (["--schedules", "zero3-chunk2"], "chunks are other microbatches"),
        (["--schedules", "gpipe"], "gpipe: expected two or more stages, as gpipe-stages4-zero1"),
        (["--schedules", "gpipe-stages3"], "gpipe-stages3: 16 GPUs are not a multiple of 3 stages"),
        (["--schedules", "gpipe-stages2-zero9"], "there is no builder 'zero9'"),
        (["--schedules", "zero3", "--replicate", "2"], "--replicate is for --schedule hsdp"),
        (["--memory-gib", "1", "--search"], "Largest: "),
    ],
)
def test_errors(capsys: Capsys, arguments: list[str], says: str) -> None:
    try:
        status = main([*SMALL, *arguments, "--timeline", "None"])
    except SystemExit as ended:  # tyro's own way out
        status = ended.code
    out, err = capsys.readouterr()
    assert status == 2
    assert says in " ".join((out + err).replace("│", " ").split())
