"""Full fine-tuning against adapters, AdamW against Muon: a small run of each."""

from __future__ import annotations

import json

import pytest

from benchmarks.command import main
from benchmarks.lora import FINETUNED, OPTIMIZED, Lora


@pytest.mark.nightly
def test_a_small_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lora", "--config", "tiny", "--steps", "2", "--warmup", "2", "--json"]) == 0
    out = capfd.readouterr().out
    found = json.loads(out[out.index("{") :])
    rows = found["contenders"]
    assert tuple(rows) == FINETUNED and found["options"]["ranks"] == 2
    assert (
        rows["full"]["over_first"]["median"] == rows["full"]["wire_over_first"] == rows["full"]["peak_over_first"] == 1
    )
    for each in rows.values():
        assert each["step_ms"] > 0 and abs(each["planned_over_peak"] - 1) < 0.03
    wire = [each["wire_bytes"] for each in rows.values()]
    assert wire == sorted(wire, reverse=True) and wire[-1] < 0.7 * wire[0]


def test_refused() -> None:
    with pytest.raises(ValueError, match="there is no builder 'zero4'"):
        Lora(schedule="zero4")


def test_a_small_run_of_optimizers(capfd: pytest.CaptureFixture[str]) -> None:
    # of a smaller batch, what works on one matrix is most of the peak of a tiny model, and plans are too high
    options = ["--ranks", "2", "--steps", "2", "--warmup", "2", "--batch", "16"]
    assert main(["optimizers", "--config", "tiny", *options, "--json"]) == 0
    out = capfd.readouterr().out
    found = json.loads(out[out.index("{") :])
    rows = found["ranks"]["2"]
    assert tuple(rows) == OPTIMIZED and found["muon_adds_over_one_rank"] == {}
    assert rows["muon"]["wire_over_first"] > 1 and rows["muon"]["peak_over_first"] < 1
    for each in rows.values():
        assert each["step_ms"] > 0 and abs(each["planned_over_peak"] - 1) < 0.03
