"""The README's code runs, and what it shows is what comes out."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from models import llama
from tests.harness import forked, readme
from tests.harness.marks import nightly
from tests.harness.pages import ROOT
from tests.harness.readme import README
from train.__main__ import main


def test_the_code_runs_and_the_program_is_as_shown() -> None:
    names: dict[str, Any] = {}
    exec(readme.on('ya.mesh(device="cpu")'), names)
    assert 4 < float(names["metrics"]["loss"]) < 7
    config = dataclasses.replace(llama.CONFIGS["debug"], layers=3)
    state = ya.init(llama.params(config), names["tx"], mesh=names["mesh"])
    batch = {"tokens": names["text"][:, :-1], "targets": names["text"][:, 1:]}
    program = ya.train_step(llama.loss(config), names["tx"]).lower(state, batch)
    assert str(program.with_ops(program.ops)) in README  # as its schedule made it: not proved yet
    with pytest.raises(ya.errors.Refused) as refusal:
        ya.verify(program.with_ops(program.ops[:14] + program.ops[15:]))
    assert str(refusal.value) in README


@pytest.mark.parametrize(("gpus", "expected"), [(0, ["1", "2"]), nightly(1, ["1"])])
def test_the_whole_code_starts_no_more_ranks_than_there_are_gpus(
    gpus: int, expected: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "first.py"
    script.write_text(f"import torch\ntorch.cuda.device_count = lambda: {gpus}\n{readme.FIRST}")
    status, said = forked.script(script, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT)
    assert status == 0, said
    assert re.findall(r"^(\d) ranks: [4-6]\.\d{4}$", said, re.M) == expected
    assert "program of" in said


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150
    assert "## Out of scope" in README


def test_the_plan_is_as_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.search(r"\$ python -m train (plan .*)\n([^`]*)```", README)
    assert shown is not None
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*shown.group(1).split(), "--timeline", "None"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert set(shown.group(2).splitlines()) <= set(printed)
