"""The README's code runs, and what it shows is what comes out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from models import llama
from tests.harness.pool import Pool
from train.__main__ import main

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_code_runs_and_the_program_is_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.S)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code.group(1).replace("ya.mesh()", 'ya.mesh(device="cpu")'), names)
    lines = capsys.readouterr().out.splitlines()
    assert all(4 < float(line.split()[0]) < 7 for line in lines[:3]), lines[:3]
    assert lines[3] == str(names["step"].program(names["state"])).splitlines()[0]

    config = dataclasses.replace(llama.CONFIGS["debug"], layers=3)
    state = ya.init(llama.params(config), names["tx"], mesh=names["mesh"])
    batch = {"tokens": names["text"][:, :-1], "targets": names["text"][:, 1:]}
    program = ya.train_step(llama.loss(config), names["tx"]).lower(state, batch)
    assert str(program) in README
    with pytest.raises(ya.errors.Refused) as refusal:
        ya.verify(program.with_ops(program.ops[:14] + program.ops[15:]))
    assert str(refusal.value) in README


def across_stages(_: Any, first: str, second: str) -> float:
    names: dict[str, Any] = {}
    exec(first.replace("ya.mesh()", 'ya.mesh(device="cpu")').replace("range(3)", "range(1)"), names)
    exec(second.replace("shard=-1", 'shard=-1, device="cpu"'), names)
    return float(names["metrics"]["loss"])


def test_the_code_of_stages_runs(pools: dict[int, Pool]) -> None:
    first, second = re.findall(r"```python\n(.*?)```", README, re.S)
    losses = pools[2].run(across_stages, first, second)
    assert losses[0] == losses[1] and 4 < losses[0] < 7


def test_the_plan_is_as_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.search(r"\$ python -m train (plan .*)\n([^`]*)```", README)
    assert shown is not None
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*shown.group(1).split(), "--timeline", "None"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert set(shown.group(2).splitlines()) <= set(printed)
