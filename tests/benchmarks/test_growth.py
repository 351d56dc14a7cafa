"""Overhead per layer: the arithmetic, the floor that is subtracted, the picture, and one small run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import growth
from benchmarks.command import main
from benchmarks.contenders import make_batches, materialize
from benchmarks.growth import Growth, Pure
from models.llama import model as llama
from tests.harness.small import one_rank
from train.shapes import SHAPES

CPU = torch.device("cpu")


def test_overhead_per_layer() -> None:
    clocks = {"zero3": [8e-3, 9e-3], "pure": [4e-3, 4e-3]}
    found = growth.point({"seconds": clocks, "thread_seconds": {"zero3": [5e-3] * 2, "pure": [4e-3] * 2}}, "zero3", 4)
    assert found["wall_us_per_layer"]["median"] == pytest.approx(1125) and found["wall_pure_us"] == pytest.approx(4e3)
    assert found["main_us_per_layer"]["median"] == pytest.approx(250) and found["main_step_us"] == pytest.approx(5e3)


def test_what_a_further_layer_costs() -> None:
    points = [{"layers": n, "main_us_per_layer": {"median": 100 + 1200 / n}} for n in (4, 8, 64)]
    found = growth.line(points)
    assert found == pytest.approx({"main_us_per_further_layer": 100, "main_us_per_step": 1200})


def test_the_floor_does_the_computations_of_the_model() -> None:
    shape = SHAPES["tiny"]
    pure = Pure(shape, ranks=2, seed=3, device=CPU)
    (batch,) = make_batches(shape, 1, seed=0, rank=0, device=CPU)
    mean = llama.loss(shape.llama())(materialize(shape.llama(), seed=3, device=CPU), batch)
    expected = float(mean.total / mean.weight)
    assert pure.step(batch) == pure.step(batch) == expected, "and never trains"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layers": (4,)}, "--layers 4: expected two different numbers"),
        ({"layers": (0, 4)}, "--layers 0 4"),
        ({"schedule": "zero3-unroll8"}, "there are 4 layers to unroll"),
        ({"schedule": "hsdp", "ranks": (2, 3)}, "hsdp makes two copies"),
        ({"plot": Path("growth.jpg")}, r"--plot growth.jpg: expected a file that ends in .png"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Growth(**options)


def test_a_run_and_its_picture(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "new" / "growth.svg"
    argv = ["--layers", "1", "2", "--ranks", "1", "--steps", "2", "--warmup", "2", "--plot", str(plot)]
    assert main(["growth", *argv, "--json"]) == 0, capfd.readouterr().err
    found = json.loads(capfd.readouterr().out)
    assert [(p["ranks"], p["layers"]) for p in found["points"]] == [(1, 1), (1, 2)]
    assert all(p["main_step_us"] > 0 < p["wall_pure_us"] for p in found["points"])
    text = plot.read_text()
    assert "goal, one rank: 100" in text and "1 rank" in text and "CPU time of the main thread" in text
    found["points"] += [{**p, "ranks": 1 + found["machine"]["cores"]} for p in found["points"]]
    growth.draw(Growth(), found, plot)
    assert "which share cores" in plot.read_text()


def test_a_profile_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {2: {"a f": (2.0, 40.0), "C g": (5.0, 5.0)}, 6: {"a f": (6.0, 60.0), "C g": (5.0, 6.0), "b h": (4.0, 80.0)}}
    monkeypatch.setattr(growth.harness, "run", lambda *args, shape, **how: found[shape.layers])
    rows = growth.by_function(Growth(layers=(2, 6), ranks=(1,), functions=2), Console())
    of = {row["function"]: (row["calls"], row["us"]) for row in rows}
    assert of == {"b h": (1.0, 20.0), "a f": (1.0, 5.0), "all others": (0.0, 0.25)} and rows[0]["function"] == "b h"
    first, table = growth.show(Growth(layers=(2, 6), ranks=(1,), functions=2), {"functions": rows})
    assert "by function, 25 us" in str(first) and isinstance(table, Table) and table.row_count == 2


def test_a_profiled_run() -> None:
    one_rank()
    task = SimpleNamespace(contenders=("zero3",), shape=SHAPES["tiny"], seed=0, warmup=2, steps=1)
    task.batches = lambda device: make_batches(SHAPES["tiny"], 1, seed=0, rank=0, device=device)
    found = growth.profiled(task, CPU)
    assert found["parts/layers.py layer"][0] == SHAPES["tiny"].layers
