"""`clm` over axes inside layers: losses of a run on one rank, and its checkpoints; what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import models
import yafsdp_fn as ya
from models import mixtral
from tests.harness.pool import Pools
from tests.train import inside
from tests.train.test_stages import flags, numbers, texts
from train import export, sample
from train.config import ConfigError, Mesh, Sharding
from train.settings import Config
from train.trained.loaded import load

AXES = ("--mesh.tensor", "2", "--mesh.sequence", "--mesh.context", "2")


def spread(_: Any, argv: tuple[str, ...], sizes: dict[str, int], *more: Any) -> inside.Run:
    return inside.inside(ya.mesh(device="cpu", **sizes), argv, *more)


@pytest.mark.nightly
@pytest.mark.parametrize("moves", [False, True])
def test_a_run_over_axes_is_that_of_one_rank(pools: Pools, tmp_path: Path, moves: bool) -> None:
    """moves: it goes on with other ranks, and across stages"""
    alone, folder = texts(tmp_path / "alone"), texts(tmp_path / "axes")
    steps = ("--steps", "8")
    (one,) = pools[1].run(inside.inside, flags(alone, *steps))
    assert not one.error, one
    for run in pools[4].run(spread, flags(folder, *AXES, *steps), {"context": 2, "tensor": 2}, inside.killed, 6):
        assert run.error == "Killed: ", run
    for run in pools[4].run(spread, flags(folder, *AXES, *steps, "--resume"), {"context": 2, "tensor": 2}):
        assert not run.error, run
    found, expected = numbers(folder), numbers(alone)
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key
    if not moves:
        return
    more = ("--resume", "--mesh.tensor", "2", "--mesh.context", "1", "--steps", "10")
    for run in pools[2].run(spread, flags(folder, *more), {"tensor": 2}):
        assert not run.error, run
    assert len(numbers(folder)["loss"]) == 10
    more = ("--resume", "--mesh.stage", "2", "--mesh.tensor", "2", "--mesh.context", "1", "--steps", "11")
    for run in pools[4].run(spread, flags(folder, *more), {"stage": 2, "tensor": 2}):
        assert not run.error, run
    assert len(numbers(folder)["loss"]) == 11
    without = ("--resume", "--mesh.stage", "1", "--mesh.tensor", "1", "--mesh.no-sequence", "--steps", "12")
    (last,) = pools[1].run(inside.inside, flags(folder, *without))
    assert not last.error and len(numbers(folder)["loss"]) == 12, last


MIXTRAL = ("--model", "tiny-mixtral")


def mixture(_: Any, argv: tuple[str, ...], sizes: dict[str, int], experts: int = 4) -> inside.Run:
    """A run that may be of a Mixtral."""
    shape = {"vocab": 256, "embed": 16, "ffn": 24, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 8}
    with pytest.MonkeyPatch.context() as patch:
        model = mixtral.Config(**shape, max_length=64, experts=experts, router_loss=True, router_coef=0.1)
        patch.setitem(models.CONFIGS, "tiny-mixtral", model)
        run = spread(_, argv, sizes)
        if not run.error and "--mesh.expert" in argv:  # whole again, on ranks without these axes
            folder = argv[argv.index("--runs") + 1] + "/a"
            said = sample.parsed(["--run", folder, "--json", "--length", "3", "--device", "cpu"])
            sample.show(said, load(said.source))
            export.write(export.Config(Path(folder) / "exported", run=Path(folder), device="cpu"))
            found, params = models.hf.load(Path(folder) / "exported")
            assert found.experts == experts and params.layers.tree[mixtral.DOWN].shape == (2, experts, 16, 24)
        return run


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [pytest.param((), id="all that come"), pytest.param(("--capacity", "0.75"), id="slots")],
)
def test_experts_over_an_axis_train_as_without(pools: Pools, tmp_path: Path, more: tuple[str, ...]) -> None:
    alone, folder = texts(tmp_path / "alone"), texts(tmp_path / "axes")
    for run in pools[2].run(mixture, flags(alone, *MIXTRAL, *more), {"shard": 2}):
        assert not run.error, run
    for run in pools[2].run(mixture, flags(folder, *MIXTRAL, *more, "--mesh.expert", "2"), {"expert": 2}):
        assert not run.error, run
    found, expected = numbers(folder), numbers(alone)
    for key, values in expected.items():
        assert len(values) > 2 and found[key] == pytest.approx(values, rel=1e-4), key


def test_what_cannot_be_is_refused_by_name(pools: Pools, tmp_path: Path) -> None:
    folder = texts(tmp_path / "axes")
    (alone,) = pools[1].run(inside.inside, flags(folder, "--mesh.tensor", "2"))
    assert "mesh.tensor is 2: 1 rank(s) do not divide into so many" in alone.error
    for sizes, more, text in (
        ({"expert": 2}, (), "mesh.expert is 2: Axes(expert=True): weights of this family are not split over expert"),
        ({"expert": 2}, MIXTRAL, "mesh.expert is 2: Config.experts: 3 do not divide among 2 ranks of expert"),
        ({"tensor": 2}, ("--vocab", "257"), "mesh.tensor is 2: Config.vocab: 257 do not divide among 2 ranks of"),
        ({"shard": 2}, ("--capacity", "1.5"), "capacity is 1.5: tiny has no experts"),
    ):
        axes = [word for name, n in sizes.items() if name != "shard" for word in (f"--mesh.{name}", str(n))]
        for run in pools[2].run(mixture, flags(folder, *axes, *more), sizes, 3):
            assert text in run.error
    for run in pools[2].run(spread, flags(folder, "--mesh.context", "2", "--data.seq-len", "18"), {"context": 2}):
        assert "mesh.context is 2, data.seq_len 18: not a multiple of 4" in run.error
    with pytest.raises(
        ConfigError, match=re.escape("sharding.local is 3, mesh.context 2, mesh.tensor 1: a node has a")
    ):
        Config(mesh=Mesh(context=2), sharding=Sharding(schedule="hpz", local=3))
    with pytest.raises(ConfigError, match=re.escape("mesh.sequence is of the ranks of mesh.tensor")):
        Mesh(sequence=True)
    with pytest.raises(ConfigError, match=re.escape("mesh.expert is 0: expected 1 to")):
        Mesh(expert=0)
    with pytest.raises(ConfigError, match=re.escape("capacity is -1.0: expected a finite number, 0 or more")):
        Config(capacity=-1.0)
