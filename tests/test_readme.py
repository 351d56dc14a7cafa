"""The README's code runs, and what it shows is what comes out."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import yafsdp_fn as ya
from models import llama
from tests.harness import readme
from tests.harness.pool import Pool
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
    assert str(program) in README
    with pytest.raises(ya.errors.Refused) as refusal:
        ya.verify(program.with_ops(program.ops[:14] + program.ops[15:]))
    assert str(refusal.value) in README


def across_stages(_: Any) -> float:
    names: dict[str, Any] = {}
    exec(readme.on('ya.mesh(device="cpu")').replace("range(3)", "range(1)"), names)
    exec(readme.SECOND.replace("shard=-1", 'shard=-1, device="cpu"'), names)
    return float(names["metrics"]["loss"])


def test_the_code_of_stages_runs(pools: dict[int, Pool]) -> None:
    losses = pools[2].run(across_stages)
    assert losses[0] == losses[1] and 4 < losses[0] < 7


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
