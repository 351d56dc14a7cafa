"""Axes inside blocks, ours and torch's: the same losses, step by step, and what is shown of them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.harness.pool import Pool
from train.bench import axes, harness
from train.bench.axes import AxesInside
from train.bench.contenders import make_batches
from train.bench.options import SHAPES


def losses(mesh: Any, ways: list[str], steps: int) -> dict[str, list[float]]:
    """Of this rank."""
    device = torch.device("cpu")
    batches = make_batches(SHAPES["tiny"], steps, seed=0, rank=0, device=device)
    found = {}
    for name in (each for way in ways for each in (way, f"torch-{way}")):
        task = harness.Task("", (name,), SHAPES["tiny"], ranks=4, steps=2, warmup=2, timeout=60, schedule="zero3")
        contender = axes.build(name, task, device)
        found[name] = [contender.step(batch) for batch in batches]
    return found


@pytest.mark.parametrize("ways", [["tensor", "context"], pytest.param(["sequence"], marks=pytest.mark.nightly)])
def test_contenders_train_alike(pools: dict[int, Pool], ways: list[str]) -> None:
    every = pools[4].run(losses, ways, 2)
    means = {name: [sum(step) / 4 for step in zip(*(of[name] for of in every), strict=True)] for name in every[0]}
    for way in ways:
        assert means[way][0] != means[way][1]
        assert means[f"torch-{way}"] == pytest.approx(means[way], rel=1e-5)


def test_shown() -> None:
    spread = {"median": 1.25, "p10": 1.0, "p90": 2.0}
    each: dict[str, Any] = {"tokens": [2, 8], "step_ms": spread, "cpu_ms": spread, "peak_bytes": 2**20}
    found = {"ways": {"tensor": {**each, "over_peer": spread, "peak_over_peer": 0.5}, "torch-tensor": each}}
    console = Console(file=io.StringIO(), width=150)
    console.print(*axes.show(AxesInside(), found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.250 MISSED" in text and "1.000 - 2.000" in text and "2 x 8" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [({"ways": ("pipeline",)}, "--ways pipeline: expected some of"), ({"context_length": 6}, "a multiple of 4")],
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AxesInside(**options)
