"""The code of docs/planner.md runs, and prints what the page shows; what it and the pages beside it name exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pages import ROOT, blocks
from train.subcommands import SUBCOMMANDS
from yafsdp_fn.planner import Found, Plan

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("planner", "synthesis", "accuracy")}
PAGE = PAGES["planner"]


@pytest.mark.nightly
def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, beside = blocks(PAGE)
    names: dict[str, Any] = {}
    exec(code, names)
    exec(beside.replace("found", "several"), names)
    assert f"```\n{names['several']}\n```" in PAGE
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert list(names["several"].rows) == [
        "zero3",
        "hsdp",
        "1F1B",
    ]
    assert isinstance(names["plan"], Plan)
    assert isinstance(names["found"], Found)
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert str(names["plan"]) in printed
    assert str(names["found"]) in printed


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_exists(page: str) -> None:
    text = PAGES[page]
    for path in re.findall(r"\((tests/[\w/]+\.py|tests/\w+)\)", text):
        assert (ROOT / path).exists(), path
    for module, name in re.findall(r"`((?:planner|lab)\.\w+)\.(\w+)`", text):
        assert hasattr(importlib.import_module(f"yafsdp_fn.{module}"), name), name
    for command in re.findall(r"python -m train (?:launch --ranks 2 )?(\w+)", text):
        assert command in SUBCOMMANDS
