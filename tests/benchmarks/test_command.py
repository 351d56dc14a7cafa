"""The command as a user runs it: real rank processes, a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.command import main
from benchmarks.options import Bench
from benchmarks.steps import planned
from tests.harness.gpu import on_gpu

TINY = ["--config", "tiny", "--steps", "2", "--warmup", "2"]


def run_json(capfd: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*TINY, *argv, "--json"]) == 0, capfd.readouterr().err
    return json.loads(capfd.readouterr().out)  # JSON alone on stdout, or this raises


@pytest.mark.nightly
def test_json_on_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    found = run_json(capfd, "--peers", "fsdp2", "--microbatches", "2")
    assert list(found["contenders"]) == ["zero3", "torch-fsdp2"]
    assert found["first"] == "zero3"
    assert list(found["over_first"]) == ["torch-fsdp2"]
    zero3 = found["contenders"]["zero3"]
    ratio = found["over_first"]["torch-fsdp2"]
    over = found["over_peers"]["zero3"]["torch-fsdp2"]
    assert set(ratio) == {"median", "p10", "p90"}
    assert 0 < ratio["p10"] <= ratio["median"] <= ratio["p90"]
    assert over["time"]["p90"] * 1.001 > 1 / ratio["median"] > 1 / ratio["p90"] * 0.999, "the other way round"
    for key in ("peak_memory_bytes", "peak_tensor_bytes"):
        assert over[key] == pytest.approx(zero3[key] / found["contenders"]["torch-fsdp2"][key], rel=1e-4)
    assert over["time_goal"] is None and over["peak_memory_goal"] is None, "there are none for this model"
    for name, contender in found["contenders"].items():
        assert set(contender["step_ms"]) == set(contender["cpu_ms"]) == {"median", "p10", "p90"}, name
        assert contender["tokens_per_s"] == pytest.approx(2 * 2 * 8 / contender["step_ms"]["median"] * 1e3, rel=1e-4)
        assert contender["peak_memory_bytes"] > contender["peak_tensor_bytes"] > 0
        assert contender["weight_size_allocations"] == 0, "nothing of this model is that large"
    layers, units, parts = 3, 5, 2
    zero3, fsdp2 = found["contenders"].values()
    gathers = 2 + parts * max(layers, 2 * layers - 2) - 2 * (parts - 1)
    reductions = parts * units
    assert zero3["program"]["ops"]["Gather"] == gathers
    assert zero3["program"]["ops"]["Reduce"] == reductions
    sums = 1  # of what the step reports
    assert zero3["collectives"]["send"]["count"] == gathers + reductions + sums, "each is one message to the only peer"
    assert zero3["sent_bytes"] == sum(zero3["program"]["wire_bytes"].values()) > 0
    assert found["unlike_program"] == []
    assert fsdp2["collectives"]["reduce_scatter"]["count"] == parts * (layers + 1)
    assert found["malloc"] == {}
    assert found["command"].startswith("python -m benchmarks --config tiny")
    assert {"cpu", "cores", "memory_bytes"} <= set(found["machine"])
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.nightly
def test_features_take_turns_with_another_malloc(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two sets of rank processes, and contenders whose features differ; the command compares their losses."""
    ours = ["zero3-update", "zero3-nolinear-noexchange-nofused", "zero3-tuned"]
    file = tmp_path / "new" / "result.json"
    argv = ["--schedules", *ours, "--peers", "fsdp2-tuned", "--no-counts", "--save", str(file)]
    found = run_json(capfd, *argv)
    assert list(found["contenders"]) == [*ours, "torch-fsdp2-tuned"]
    assert len({found["contenders"][name]["last_loss"] for name in ours}) == 1
    assert found["malloc"]["MALLOC_MMAP_MAX_"] == "0"
    assert json.loads(file.read_text()) == found


def test_schedules_on_meshes_of_their_own_and_no_peers(capfd: pytest.CaptureFixture[str]) -> None:
    """Four ranks, as the groups differ: the programs are those of the mesh, and memory as planned."""
    argv = ["--ranks", "4", "--schedules", "hsdp-update", "hpz-defer", "--microbatches", "2", "--peers", "--no-counts"]
    found = run_json(capfd, *argv)
    assert list(found["contenders"]) == ["hsdp-update", "hpz-defer"]
    assert list(found["over_first"]) == ["hpz-defer"]
    hsdp, hpz = (contender["program"] for contender in found["contenders"].values())
    assert set(hsdp["wire_bytes"]) == {"gather", "reduce", "all-reduce"}
    assert hsdp["ops"]["Update"] > 0
    assert set(hpz["wire_bytes"]) == {"gather", "gather in node", "reduce"}
    assert hpz["ops"]["Reduce"] == 5
    bench = Bench(config="tiny", ranks=4, schedules=("hsdp-update", "hpz-defer"), peers=(), microbatches=2)
    for name, program in (("hsdp-update", hsdp), ("hpz-defer", hpz)):
        plan = planned(bench, name)
        assert plan.master + plan.optimizer + plan.grad_shards == pytest.approx(program["shard_bytes"], rel=0.01), name
        assert plan.weight_slots + plan.grad_slots + plan.secondary == program["slot_bytes"], name


@pytest.mark.nightly
def test_depth_first_against_layer_major(capfd: pytest.CaptureFixture[str]) -> None:
    """The same rows, losses that the command finds equal, and the collectives of one microbatch."""
    argv = ["--microbatches", "4", "--batch", "4", "--schedules", "zero3", "zero3-chunk4", "--peers", "--no-counts"]
    found = run_json(capfd, *argv)
    assert found["tokens_per_step"] == 2 * 4 * 8
    layers = 3
    units = 5
    depth, major = (contender["program"]["ops"] for contender in found["contenders"].values())
    assert depth["Reduce"] == 4 * units
    assert major["Reduce"] == units
    assert depth["Gather"] > major["Gather"] == 2 + 2 * layers - 2
    assert depth["Forward"] == 4 * major["Forward"]


def test_table_at_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--ranks", "1", "--peers", "plain", "--no-counts"]) == 0
    out = capfd.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    assert rows[0][:4] == ["per step", "step ms", "p10 - p90", "over zero3"]
    assert [row[0] for row in rows[2:4]] == ["zero3", "torch-plain"]
    assert rows[2][3] == "1"
    assert float(rows[3][3]) > 0
    assert [row[:2] for row in rows[4::2]] == [["zero3 over", "step"], ["torch-plain", rows[6][1]]], "no counts"
    assert float(rows[6][1]) > 0
    assert len(rows) == 7
    assert "python -m benchmarks --config tiny" in out


def test_a_model_of_as_many_layers_as_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--layers", "5", "--ranks", "1", "--peers", "plain", "--no-counts"]
    found = run_json(capfd, *argv)
    assert found["shape"]["layers"] == 5
    assert found["contenders"]["zero3"]["program"]["ops"]["Forward"] == 5 + 2


def test_a_rank_that_fails_is_named_with_its_last_lines() -> None:
    bench = Bench(config="tiny", ranks=1, steps=2, peers=("plain",))
    with pytest.raises(harness.RankFailed, match=r"rank 0 of the time run of hsdp ended with code 1(?s:.*)replicate=2"):
        harness.run("benchmarks.steps:time", ("hsdp",), **bench.turns)


def test_ranks_that_do_not_end_are_killed() -> None:
    bench = Bench(config="tiny", steps=10_000, timeout=0.2)
    with pytest.raises(harness.RankFailed, match=r"ranks \[0, 1\] of the time run of torch-ddp did not end within 0 s"):
        harness.run("benchmarks.steps:time", ("torch-ddp",), **bench.turns)


def test_torchrun_is_refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(TINY) == 2
    assert "it starts its own rank processes" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_a_missing_device_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda", "--ranks", "1"]) == 1
    captured = capfd.readouterr()
    assert "bench: --device cuda needs a CUDA device and a CUDA build of torch" in captured.err
    assert captured.out == ""


@on_gpu
def test_json_on_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    found = run_json(capfd, "--device", "cuda", "--ranks", "1", "--peers", "fsdp2", "plain")
    assert found["contenders"]["zero3"]["peak_memory_of"].startswith("torch.cuda.max_memory_allocated")
    assert found["over_first"]["torch-plain"]["median"] > 0
    assert "gpu" in found["machine"]
