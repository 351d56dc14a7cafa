"""What docs/schedules.md shows is what happens; its custom schedule runs on ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.harness.marks import nightly
from tests.harness.oracle import check_exact
from tests.harness.pages import blocks, doc
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS
from tests.program.traces import cut, model
from tests.steps.staged import test_exact_stages
from yafsdp_fn.schedules import from_actions, hpz, staged, verify, zero3

PAGE = doc("schedules")
KINDS = ("layers", "dense", "moe")
BLOCKS = blocks(PAGE)
(CUSTOM,) = (block for block in BLOCKS if "def pairs" in block)
(ORDER,) = (block for block in BLOCKS if "def greedy" in block)


def custom(source: str = CUSTOM) -> Any:
    names: dict[str, Any] = {}
    exec(source.partition("\n\nstep =")[0], names)
    return names["pairs"]


def test_the_schedule_has_at_most_thirty_lines() -> None:
    body = CUSTOM.partition("\n\nstep =")[0].split("def pairs")[1]
    assert len(body.strip().splitlines()) <= 30


def test_the_schedule_of_stages_has_at_most_forty_lines() -> None:
    assert len(ORDER.partition("\n\n\nschedule =")[0].strip().splitlines()) <= 40


def greedy() -> Any:
    names: dict[str, Any] = {}
    exec(ORDER.partition("\n\n\nschedule =")[0], names)
    return names["greedy"]


@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1)])
def test_the_order_fits_any_assignment(places: tuple[int, ...]) -> None:
    for microbatches in (1, 2, 5):
        trace = cut(model(6, microbatches), places)
        verify(staged(greedy(), zero3(defer=True))(trace))


def test_its_refusal_of_stages_is_as_shown() -> None:
    sent = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    received = "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    with pytest.raises(ya.errors.Refused) as refused:
        verify(from_actions([sent.split(), received.split()])(cut(model(2, 2), (0, 1))))
    assert str(refused.value) in PAGE


@on_ranks(2)
def test_the_order_is_exact_on_ranks(mesh: Any) -> None:
    test_exact_stages.HOW["own"] = test_exact_stages.How(lambda sharding: staged(greedy(), sharding), zero3(defer=True))
    test_exact_stages.check(mesh, "skip", "own", 2, (3,), False)


@pytest.mark.filterwarnings("ignore")
def test_every_block_runs_and_its_figures_and_refusal_are_as_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(llama.CONFIGS["debug"], layers=4)
    tx = ya.optim.adamw(1e-3)
    state = ya.init(llama.params(config), tx, mesh=ya.mesh(device="cpu"))
    text = torch.arange(4 * 33).reshape(4, 33) % 256
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    names = {
        "ya": ya,
        "torch": torch,
        "llama": llama,
        "config": config,
        "loss_fn": llama.loss(config),
        "tx": tx,
        "state": state,
    }
    names |= {"batch": batch, "one_slot_less": custom(CUSTOM.replace("i % (ahead + 1)", "i % ahead"))}
    stack = {"w": torch.ones(4, 1)}
    names |= {"layer": lambda x, w: (x + w["w"], x), "x": torch.zeros(1), "params": dict.fromkeys(KINDS, stack)}
    names |= {"loss_of_depth": lambda _: llama.loss(config), "batches": [batch]}
    with pytest.raises(ya.errors.Refused) as refusal:
        for block in BLOCKS:
            exec(block, names)
    assert block is BLOCKS[-1]
    assert str(refusal.value) in PAGE
    out = capsys.readouterr().out
    assert "reduce head, layers[3] <- grad slots" in out
    assert names["x"] == 13
    assert len(names["ys"]) == 5
    own = [line for line in out.splitlines() if line.startswith("[('layers.compute(float32)")]
    assert len(own) == 1
    assert f"    {own[0]}\n" in PAGE
    offloads = [line for line in out.splitlines() if line.startswith("| `")]
    assert len(offloads) == 5
    assert [line for line in offloads if f"{line}\n" not in PAGE] == []


@on_ranks()
@pytest.mark.parametrize("world", [nightly(1), 2, nightly(3)])
def test_it_is_exact_on_ranks(mesh: Any) -> None:
    """Exact, in one microbatch and in three, or refused; which are refused."""
    refused = []
    for name in ("base", "tied", "stacks", "twice", "pairs"):
        try:
            check_exact(mesh, PROBLEMS[name], layers=5, schedules={"pairs": custom()})
        except ya.errors.Refused:
            refused.append(name)
    assert refused == ["twice", "pairs"]


def test_a_builder_that_does_not_fit_says_so_as_shown() -> None:
    config = dataclasses.replace(llama.CONFIGS["debug"], layers=2)
    state = ya.init(llama.params(config), ya.optim.identity(), mesh=ya.mesh(device="cpu"))
    batch = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("tokens", "targets")}
    with pytest.raises(ValueError) as error:
        ya.train_step(llama.loss(config), ya.optim.identity(), schedule=hpz(2)).lower(state, batch)
    assert f"ValueError: {error.value}".replace("shard=1", "shard=4") in PAGE
