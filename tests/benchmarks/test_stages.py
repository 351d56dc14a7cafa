"""Pipelines of ours and of torch: the same losses, step by step, and what is shown of them."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import stages
from benchmarks.contenders import make_batches
from benchmarks.shapes import SHAPES
from benchmarks.stages import Stages
from tests.harness.marks import nightly
from tests.harness.pool import Pools


def losses(mesh: Any, steps: int) -> dict[str, list[float]]:
    """Of this rank. Torch's last stage alone knows the loss, and counts it for all."""
    ranks = mesh.size()
    device = torch.device("cpu")
    shape = dataclasses.replace(SHAPES["tiny"], layers=6, batch=2 * ranks)
    batches = make_batches(shape, steps, seed=0, rank=0, device=device)
    found = {}
    for name in stages.contenders(ranks):
        contender = stages.build(name, "zero2", shape, seed=0, device=device)
        found[name] = [contender.step(batch) for batch in batches]
    return found


@pytest.mark.parametrize("world", [2, nightly(4)])
def test_contenders_train_alike(pools: Pools, world: int) -> None:
    every = pools[world].run(losses, 2)
    means = {name: [sum(step) / world for step in zip(*(of[name] for of in every), strict=True)] for name in every[0]}
    first = means["1f1b"]
    assert len(means) == (4 if world == 2 else 6)
    assert first[0] != first[1]
    for name, each in means.items():
        assert each == pytest.approx(first, rel=1e-5), name


def test_shown() -> None:
    spread = {"median": 1.25, "p10": 1.0, "p90": 2.0}
    each = {"step_ms": spread, "cpu_ms": spread, "peak_bytes": 2**20}
    found = {"ranks": {"2": {"1f1b": {**each, "over_peer": spread, "peak_over_peer": 1.5}, "torch-1f1b": each}}}
    console = Console(file=io.StringIO(), width=150)
    console.print(*stages.show(Stages(), found))
    text = console.file.getvalue()
    assert "1.250 MISSED" in text
    assert "1.000 - 2.000" in text
    assert "2 ranks" in text


@pytest.mark.parametrize(("config", "ranks"), [("A", 3), ("A", 6), ("tiny", 4)])
def test_refused(config: Any, ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"--ranks {ranks} with --config {config}: expected an even number of ranks"):
        Stages(config=config, ranks=(ranks,))
