"""`clm` trains any family, tells what it says beside its loss, and refuses too many positions; `sample` decodes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.marks import nightly
from tests.harness.pool import Pools
from tests.train.inside import Run, flags, inside, lines, spoken, text


def trained(mesh: Any, folder: Path, model: str, *more: str) -> tuple[Run, list[str]]:
    """The run of this rank, and what `sample --json` then says of it."""
    run = inside(mesh, flags(folder, "--model", model, *more))
    said = "" if run.error else spoken(mesh, folder / "runs" / "a", "--json", "--length", "4")
    return run, said.splitlines()


@pytest.mark.parametrize("model", ["tiny-mixtral-3", nightly("tiny-gpt2")])
def test_a_family_is_trained_and_sampled(pools: Pools, tmp_path: Path, model: str) -> None:
    (tmp_path / "heldout.txt").write_text(text(tmp_path, 200).read_text())
    more = ("--data.heldout-files", str(tmp_path / "heldout.txt"), "--eval-every", "6", "--eval-batches", "2")
    (first, said), (second, silent) = pools[2].run(trained, tmp_path, model, *more)
    assert first.error == second.error == ""
    assert silent == []
    assert json.loads(said[0])["prompt"] == "def "
    assert len(json.loads(said[0])["tokens"]) <= 4
    heldout = [line for line in lines(tmp_path) if "eval_loss" in line]
    assert [line["step"] for line in heldout] == [0, 6, 12]
    assert heldout[-1]["eval_loss"] < heldout[0]["eval_loss"]
    for line in heldout:
        if model == "tiny-mixtral-3":
            assert 1.0 <= line["eval_expert_load"] <= 1.5, "three experts, of which two are chosen"
            assert line["eval_router_loss"] == pytest.approx(2.0, abs=0.3)
        else:
            assert line.keys() == {"step", "eval_loss"}


def test_more_positions_than_there_are_is_refused(pools: Pools, tmp_path: Path) -> None:
    """Of a family whose positions are a table."""
    text(tmp_path, 200)
    ((run, _),) = pools[1].run(trained, tmp_path, "tiny-gpt2", "--data.seq-len", "65")
    assert "ConfigError: data.seq_len is 65: model tiny-gpt2 has 64 positions" in run.error
