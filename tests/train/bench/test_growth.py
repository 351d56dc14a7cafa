"""Overhead per layer: the arithmetic, the floor that is subtracted, the picture, and one small run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.llama import model as llama
from train.bench import growth, main
from train.bench.contenders import make_batches, materialize
from train.bench.growth import Growth, Pure
from train.bench.options import SHAPES

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


def test_a_profile_of_one_layer(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--layers", "1", "3", "--ranks", "1", "--steps", "2", "--warmup", "2", "--functions", "5"]
    assert main(["growth", *argv, "--json"]) == 0, capfd.readouterr().err
    rows = {row["function"]: row for row in json.loads(capfd.readouterr().out)["functions"]}
    assert rows["C <built-in method torch._C._nn.linear>"]["calls"] == 7
    assert main(["growth", *argv]) == 0 and "C <method 'run_backward'" in capfd.readouterr().out
