"""Whole runs on datasets and tokenizers: a tokenizer that is gone; held-out means."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import Pools, on_ranks
from tests.train.inside import fine, flags, inside, spoken
from train import tokenizer
from train.config import Data, Sources
from train.data.rows import Place
from train.data.stream import Gathered
from train.running.loop import Evaluation
from train.settings import Config


@pytest.mark.nightly
def test_a_run_keeps_its_tokenizer(pools: Pools, tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"line {i} of a text that is easy to learn\n" * 20)
    tokenizer.learn(tokenizer.Config(tmp_path / "bpe", 512, Sources(files=(f"{tmp_path}/*.txt",))))
    argv = (*flags(tmp_path, "--data.tokenizer", str(tmp_path / "bpe")), "--data.files", f"{tmp_path}/*.txt")
    fine(pools[2].run(inside, (*argv, "--steps", "4")))
    kept = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert kept["vocab"] % 64 == 0
    assert kept["command"] == "clm"
    shutil.rmtree(tmp_path / "bpe")
    for cached in (tmp_path / "runs" / ".tokens").iterdir():
        shutil.rmtree(cached) if cached.is_dir() else cached.unlink()
    fine(pools[1].run(inside, (*argv, "--resume", "--steps", "6")))
    (shown,) = pools[1].run(
        spoken,
        tmp_path / "runs" / "a",
        "--prompt",
        "line",
        "--length",
        "3",
    )
    assert "step 6" in shown
    assert "line" in shown


@on_ranks(1, 2)
def test_held_out_losses_are_means_over_targets(mesh: Any) -> None:
    """Of a model that is as wrong as the token says."""
    draw = torch.Generator().manual_seed(0)
    rows = [{"tokens": torch.randint(9, (4,), generator=draw), "targets": torch.zeros(4)} for _ in range(24)]
    for index, row in enumerate(rows):
        row["targets"][: index % 5] = -100  # of some rows, none counts
    tokens, targets = (torch.stack([row[key] for row in rows]) for key in ("tokens", "targets"))
    expected = tokens[targets != -100].double().mean().item()

    def loss(params: Any, batch: dict[str, Tensor]) -> tuple[ya.Mean, dict[str, Any]]:
        valid = batch["targets"] != -100
        wrong = ya.apply(lambda w, x: x * w["one"], params, batch["tokens"])
        return ya.Mean((wrong * valid).sum(), valid.sum()), {"twice": ya.Mean(2 * (wrong * valid).sum(), valid.sum())}

    state = ya.init({"one": ya.Param((1,), init=ya.params.initializers.ones)}, ya.optim.identity(), mesh=mesh, seed=0)
    place = Place.of(mesh)
    config = Config(data=Data(seq_len=4, batch=4 // place.ranks), eval_batches=9)
    found, told = Evaluation(config, loss, Gathered("held-out text", tuple(rows), "these"), place).loss(state)
    assert found == pytest.approx(expected, rel=1e-6)
    assert told == {"twice": pytest.approx(2 * found)}
