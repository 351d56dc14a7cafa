"""`clm --mesh.stage`: losses of a run on one rank, resumed with stages and without; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.pool import Pools
from tests.train import inside

ORDERS = ("one_f_one_b", "v_shaped")


def spread(_: Any, argv: tuple[str, ...], sizes: dict[str, int], *more: Any) -> inside.Run:
    """A run on a mesh of these sizes."""
    return inside.inside(ya.mesh(device="cpu", **sizes), argv, *more)


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    base = inside.flags(folder, "--sharding.microbatches", "2", "--eval-every", "4", "--eval-batches", "2")
    return (*base, "--data.files", f"{folder}/*.txt", "--data.heldout-fraction", "0.3", *more)


def numbers(folder: Path) -> dict[str, list[float]]:
    lines = inside.lines(folder)
    return {key: [line[key] for line in lines if key in line] for key in ("loss", "eval_loss", "grad_norm")}


def texts(folder: Path) -> Path:
    """Some files; which are held out depends on their names."""
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"text {i} of a dozen\n" * 8)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return texts(tmp_path / "staged")


def alike(folder: Path, alone: Path) -> None:
    """The numbers of a run are those of another one."""
    found = numbers(folder)
    expected = numbers(alone)
    for key, values in expected.items():
        assert len(values) > 2 and found[key] == pytest.approx(values, rel=1e-4), key


@pytest.mark.nightly
@pytest.mark.parametrize("order", ORDERS)
def test_a_run_across_stages_is_that_of_one_rank(pools: Pools, folder: Path, tmp_path: Path, order: str) -> None:
    alone = texts(tmp_path / "alone")
    two = {"stage": 2}
    (one,) = inside.fine(pools[1].run(inside.inside, flags(alone)))
    stages = flags(folder, "--mesh.stage", "2", "--mesh.order", order, "--timeline-every", "50")
    for run in pools[2].run(spread, stages, two, inside.killed, 7):
        assert run.error == "Killed: " and run.read == one.read[:6], run
    for run in inside.fine(pools[2].run(spread, (*stages, "--resume"), two)):
        assert run.read == one.read[4:], run
    alike(folder, alone)
    assert not (folder / "runs" / "a" / "timeline.json").exists()
    whole = flags(folder, "--resume", "--mesh.stage", "1", "--mesh.order", "one_f_one_b", "--steps", "14")
    inside.fine(pools[1].run(inside.inside, whole))
    assert len(numbers(folder)["loss"]) == 14


def test_what_cannot_be_is_refused_by_name(pools: Pools, folder: Path) -> None:
    (alone,) = pools[1].run(inside.inside, flags(folder, "--mesh.stage", "2"))
    assert "ConfigError: mesh.stage is 2: 1 rank(s) do not divide into so many stages" in alone.error
    for run in pools[3].run(spread, flags(folder, "--mesh.stage", "3", "--mesh.order", "v_shaped"), {"stage": 3}):
        assert "ConfigError: --mesh.stage 3, --mesh.order v_shaped: assign: 6 segments of 4 visits" in run.error
    assert not list((folder / "runs").glob("*/config.json"))
