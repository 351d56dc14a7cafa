"""docs/timeline.md runs as it is written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness import small
from tests.harness.pages import blocks
from tests.timeline import trace_events
from yafsdp_fn.planner import CLUSTERS, simulate

PAGE = Path(__file__).parents[2] / "docs" / "timeline.md"
MEASURED, PREDICTED, BOTH = blocks(PAGE.read_text())


def test_measured_and_beside_a_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tx = ya.optim.adamw(1e-3)
    state = ya.init(small.model(), tx, mesh=small.one_rank())
    step = ya.train_step(small.loss, tx)
    names: dict[str, Any] = {"state": state, "step": step, "batch": small.batch()}
    predicted = simulate(step.lower(state, names["batch"]), CLUSTERS["a100-80g"])
    exec(MEASURED, names)
    exec(BOTH, names | {"predicted": predicted, "measured": names["timeline"]})
    out = capsys.readouterr().out
    assert "measured, rank 0 of 1: " in out
    assert "\npredicted over measured: step " in out
    assert sorted(os.listdir(tmp_path)) == ["both.png", "measured.json", "measured.png"]
    trace_events.check(Path("measured.json").read_text())


def test_pictures_are_made_as_shown_and_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(PREDICTED.replace("(8, 80)", "(8,)"), {})
    assert os.listdir(tmp_path) == ["timeline-8.png"]
    for name in re.findall(r"\(images/(.*?)\)", PAGE.read_text()):
        assert (PAGE.parent / "images" / name).stat().st_size > 10_000
