"""`clm --mesh.stage`: losses of a run on one rank, resumed with stages and without; and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.pool import Pools
from tests.train import inside
from train.config import ConfigError, Mesh, Sharding
from train.settings import Config

ORDERS = ("one_f_one_b", "v_shaped")


def staged(mesh: Any, argv: tuple[str, ...], hook: inside.Hook = inside.nothing, *arguments: Any) -> inside.Run:
    stages = int(argv[argv.index("--mesh.stage") + 1])
    return inside.inside(ya.mesh(device="cpu", stage=stages), argv, hook, *arguments)


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


@pytest.mark.nightly
@pytest.mark.parametrize("order", ORDERS)
def test_a_run_across_stages_is_that_of_one_rank(pools: Pools, folder: Path, tmp_path: Path, order: str) -> None:
    alone = texts(tmp_path / "alone")
    (one,) = pools[1].run(inside.inside, flags(alone))
    assert not one.error, one
    stages = ("--mesh.stage", "2", "--mesh.order", order, "--timeline-every", "50")
    for run in pools[2].run(staged, flags(folder, *stages), inside.killed, 7):
        assert run.error == "Killed: " and run.read == one.read[:6], run
    for run in pools[2].run(staged, flags(folder, *stages, "--resume")):
        assert not run.error and run.read == one.read[4:], run
    found, expected = numbers(folder), numbers(alone)
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key
    assert not (folder / "runs" / "a" / "timeline.json").exists()
    (on,) = pools[1].run(
        inside.inside, flags(folder, "--resume", "--mesh.stage", "1", "--mesh.order", "one_f_one_b", "--steps", "14")
    )
    assert not on.error and len(numbers(folder)["loss"]) == 14, on


def test_what_cannot_be_is_refused_by_name(pools: Pools, folder: Path) -> None:
    (alone,) = pools[1].run(inside.inside, flags(folder, "--mesh.stage", "2"))
    assert "ConfigError: mesh.stage is 2: 1 rank(s) do not divide into so many stages" in alone.error
    for run in pools[3].run(staged, flags(folder, "--mesh.stage", "3", "--mesh.order", "v_shaped")):
        assert "ConfigError: --mesh.stage 3, --mesh.order v_shaped: assign: 6 segments of 4 visits" in run.error
    assert not list((folder / "runs").glob("*/config.json"))
    for given, why in (
        (Sharding(schedule="own.py:f"), "sharding.schedule own.py:f: one of the library's, or saved"),
        (Sharding(remat="offload"), "sharding.remat offload: a stage keeps none on the host; take all"),
        (Sharding(chunks=2), "sharding.chunks 2: layer-major microbatches would go through all stages layer by layer"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"mesh.stage is 2, {why}")):
            Config(mesh=Mesh(stage=2), sharding=given)
    with pytest.raises(ConfigError, match=r"mesh\.order is gpipe, and mesh\.stage 1: no stages"):
        Mesh(order="gpipe")
