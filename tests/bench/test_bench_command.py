"""The command as a user runs it: real rank processes, a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from train.bench import launch, main
from train.bench.options import Bench

TINY = ["--config", "tiny", "--steps", "2", "--warmup", "2"]


def run_json(capfd: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*TINY, *argv, "--json"]) == 0, capfd.readouterr().err
    found: dict[str, Any] = json.loads(capfd.readouterr().out)  # JSON alone on stdout, or this raises
    return found


def test_json_on_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    found = run_json(capfd, "--peers", "fsdp2", "ddp", "--malloc-tuned")
    assert list(found["contenders"]) == ["ours", "fsdp2", "ddp"]
    for peer in ("fsdp2", "ddp"):
        ratio = found["ratio"][peer]
        assert set(ratio) == {"median", "p10", "p90"} and 0 < ratio["p10"] <= ratio["median"] <= ratio["p90"]
        assert set(found["memory_ratio"][peer]) == {"peak_memory_bytes", "peak_tensor_bytes"}
    for name, contender in found["contenders"].items():
        assert len(contender["step_ms"]["all"]) == 2, name
        assert contender["tokens_per_s"] == pytest.approx(2 * 2 * 8 / contender["step_ms"]["median"] * 1e3)
        assert contender["peak_memory_bytes"] > contender["peak_tensor_bytes"] > 0
        assert contender["weight_size_allocations"] == 0, "nothing of this model is that large"
    layers, units = 3, 5
    ours, fsdp2, ddp = (found["contenders"][name] for name in ("ours", "fsdp2", "ddp"))
    assert ours["collectives"]["all_gather"]["count"] == max(layers, 2 * layers - 2) + 2
    assert ours["collectives"]["reduce_scatter"]["count"] == units == ours["program"]["ops"]["Reduce"]
    assert ours["program"]["ops"]["Gather"] == ours["collectives"]["all_gather"]["count"]
    assert fsdp2["collectives"]["reduce_scatter"]["count"] == layers + 1
    assert set(ddp["collectives"]) == {"all_reduce"}
    assert found["malloc"]["MALLOC_MMAP_MAX_"] == "0" and found["options"]["malloc_tuned"]
    assert found["command"].startswith("python -m train bench --config tiny")
    assert {"cpu", "cores", "memory_bytes"} <= set(found["machine"]) and found["versions"]["torch"] == torch.__version__


def test_table_at_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--ranks", "1", "--peers", "plain", "--no-counts"]) == 0
    out = capfd.readouterr().out
    assert "plain" in out and "ours" in out and "tokens/s" in out and "peak memory" not in out


def test_a_rank_that_fails_is_named_with_its_last_lines() -> None:
    bench = Bench(config="Z", ranks=2, steps=2)  # type: ignore[arg-type]
    with pytest.raises(
        launch.RankFailed, match=r"rank \d of the time run of ddp ended with code 1(?s:.*)KeyError: 'Z'"
    ):
        launch.run("time", ("ddp",), bench)


def test_ranks_that_do_not_end_are_killed() -> None:
    bench = Bench(config="tiny", timeout=0.2)
    with pytest.raises(launch.RankFailed, match=r"ranks \[0, 1\] of the time run of ddp did not end within 0 s"):
        launch.run("time", ("ddp",), bench)


def test_torchrun_is_refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(TINY) == 2
    assert "it starts its own rank processes" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
@pytest.mark.parametrize(("flags", "status"), [([], 1), (["--skip-without-device"], 0)])
def test_a_missing_device_is_said(capfd: pytest.CaptureFixture[str], flags: list[str], status: int) -> None:
    assert main(["--device", "cuda", "--ranks", "1", *flags]) == status
    captured = capfd.readouterr()
    assert "needs a CUDA device and a CUDA build of torch, and this machine has none" in captured.err
    assert ("skipped" in captured.err) == bool(flags) and captured.out == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_json_on_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    found = run_json(capfd, "--device", "cuda", "--ranks", "1", "--peers", "fsdp2", "plain")
    assert found["contenders"]["ours"]["peak_memory_of"].startswith("torch.cuda.max_memory_allocated")
    assert found["ratio"]["plain"]["median"] > 0 and "gpu" in found["machine"]
