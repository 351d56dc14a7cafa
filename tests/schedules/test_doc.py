"""What docs/schedules.md shows is what happens; its custom schedule runs on ranks."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.harness.oracle import check_exact
from tests.harness.pool import Pool
from tests.harness.problems import PROBLEMS

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(CUSTOM,) = (block for block in BLOCKS if "def pairs" in block)


def custom(source: str = CUSTOM) -> Any:
    names: dict[str, Any] = {}
    exec(source.partition("\n\nstep =")[0], names)
    return names["pairs"]


def test_the_schedule_has_at_most_thirty_lines() -> None:
    body = CUSTOM.partition("\n\nstep =")[0].split("def pairs")[1]
    assert len(body.strip().splitlines()) <= 30


@pytest.mark.filterwarnings("ignore")
def test_every_block_runs_and_the_refusal_is_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(llama.CONFIGS["debug"], layers=4)
    tx = ya.optim.adamw(1e-3)
    state = ya.init(llama.params(config), tx, mesh=ya.mesh(device="cpu"))
    text = torch.arange(4 * 33).reshape(4, 33) % 256
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    names = {"ya": ya, "llama": llama, "config": config, "loss_fn": llama.loss(config), "tx": tx, "state": state}
    names |= {"batch": batch, "one_slot_less": custom(CUSTOM.replace("i % (ahead + 1)", "i % ahead"))}
    with pytest.raises(ya.Refused) as refusal:
        for block in BLOCKS:
            exec(block, names)
    assert block is BLOCKS[-1]
    assert str(refusal.value) in PAGE
    out = capsys.readouterr().out
    assert "reduce head, layers[3] <- grad slots" in out


def on_ranks(mesh: Any) -> list[str]:
    """Exact, in one microbatch and in three, or refused; which are refused."""
    refused = []
    for name in ("base", "tied", "stacks", "twice", "pairs"):
        try:
            check_exact(mesh, PROBLEMS[name], layers=5, schedules={"pairs": custom()})
        except ya.Refused:
            refused.append(name)
    return refused


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_exact_on_ranks(pools: dict[int, Pool], world: int) -> None:
    assert pools[world].run(on_ranks)[0] == ["twice", "pairs"]


def test_a_builder_that_does_not_fit_says_so_as_shown() -> None:
    config = dataclasses.replace(llama.CONFIGS["debug"], layers=2)
    state = ya.init(llama.params(config), ya.optim.identity(), mesh=ya.mesh(device="cpu"))
    batch = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("tokens", "targets")}
    with pytest.raises(ValueError) as error:
        ya.train_step(llama.loss(config), ya.optim.identity(), schedule=ya.schedules.hpz(2)).lower(state, batch)
    assert f"ValueError: {error.value}".replace("shard=1", "shard=4") in PAGE
