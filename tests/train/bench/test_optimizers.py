"""AdamW against Muon: one small run."""

from __future__ import annotations

import json

import pytest

from train.bench import main
from train.bench.optimizers import CONTENDERS


def test_a_small_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizers", "--config", "tiny", "--ranks", "2", "--steps", "2", "--warmup", "2", "--json"]) == 0
    out = capfd.readouterr().out
    found = json.loads(out[out.index("{") :])
    rows = found["ranks"]["2"]
    assert tuple(rows) == CONTENDERS and found["muon_adds_over_one_rank"] == {}
    assert rows["muon"]["wire_over_first"] > 1 and rows["muon"]["peak_over_first"] < 1
    for name, each in rows.items():
        # matrices of a tiny model are most of a unit, and what works on one does not shrink with ranks
        assert each["step_ms"] > 0 and abs(each["planned_over_peak"] - 1) < (0.03 if name == "adamw" else 0.2)
