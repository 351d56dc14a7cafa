"""`clm --mesh.tensor --mesh.context`: losses of a run on one rank, and its checkpoints; what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.train import inside
from tests.train.test_stages import flags, numbers, texts
from train.config import Config, ConfigError, Mesh, Sharding

AXES = ("--mesh.tensor", "2", "--mesh.sequence", "--mesh.context", "2")


def spread(_: Any, argv: tuple[str, ...], sizes: dict[str, int], *more: Any) -> inside.Run:
    return inside.inside(ya.mesh(device="cpu", **sizes), argv, *more)


def test_a_run_over_axes_is_that_of_one_rank(pools: dict[int, Pool], tmp_path: Path) -> None:
    alone, folder = texts(tmp_path / "alone"), texts(tmp_path / "axes")
    (one,) = pools[1].run(inside.inside, flags(alone))
    assert not one.error, one
    for run in pools[4].run(spread, flags(folder, *AXES), {"context": 2, "tensor": 2}, inside.killed, 7):
        assert run.error == "Killed: ", run
    for run in pools[4].run(spread, flags(folder, *AXES, "--resume"), {"context": 2, "tensor": 2}):
        assert not run.error, run
    found, expected = numbers(folder), numbers(alone)
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key
    # on another number of ranks, and across stages
    more = ("--resume", "--mesh.tensor", "2", "--mesh.context", "1", "--steps", "14")
    for run in pools[2].run(spread, flags(folder, *more), {"tensor": 2}):
        assert not run.error, run
    more = ("--resume", "--mesh.stage", "2", "--mesh.tensor", "2", "--mesh.context", "1", "--steps", "16")
    for run in pools[4].run(spread, flags(folder, *more), {"stage": 2, "tensor": 2}):
        assert not run.error, run
    assert len(numbers(folder)["loss"]) == 16


def test_what_cannot_be_is_refused_by_name(pools: dict[int, Pool], tmp_path: Path) -> None:
    folder = texts(tmp_path / "axes")
    (alone,) = pools[1].run(inside.inside, flags(folder, "--mesh.tensor", "2"))
    assert "mesh.context is 1, mesh.tensor 2: 1 rank(s) do not divide into so many" in alone.error
    for run in pools[2].run(spread, flags(folder, "--mesh.tensor", "2", "--model", "debug-mixtral"), {"tensor": 2}):
        assert "mesh.tensor is 2: Axes(tensor=True): weights of this family are not split over tensor" in run.error
    for run in pools[2].run(spread, flags(folder, "--mesh.context", "2", "--data.seq-len", "18"), {"context": 2}):
        assert "mesh.context is 2, data.seq_len 18: not a multiple of 4" in run.error
    with pytest.raises(
        ConfigError, match=re.escape("sharding.local is 3, mesh.context 2, mesh.tensor 1: a node has a")
    ):
        Config(mesh=Mesh(context=2), sharding=Sharding(schedule="hpz", local=3))
    with pytest.raises(ConfigError, match=re.escape("mesh.sequence is of the ranks of mesh.tensor")):
        Mesh(sequence=True)
