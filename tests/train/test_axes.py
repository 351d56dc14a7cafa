"""`clm` over axes inside layers: losses of a run on one rank, and its checkpoints; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import models
from models import mixtral
from tests.harness.pool import Pools
from tests.train import inside
from tests.train.test_stages import alike, flags, numbers, spread, texts
from train import export

AXES = ("--mesh.tensor", "2", "--mesh.sequence", "--mesh.context", "2")


@pytest.mark.nightly
def test_a_run_over_axes_is_that_of_one_rank(pools: Pools, tmp_path: Path) -> None:
    """And goes on with other ranks, and across stages."""
    alone = texts(tmp_path / "alone")
    folder = texts(tmp_path / "axes")
    sizes = {"context": 2, "tensor": 2}
    inside.fine(pools[1].run(inside.inside, flags(alone, "--steps", "8")))
    argv = flags(folder, *AXES, "--steps", "8")
    for run in pools[4].run(spread, argv, sizes, inside.killed, 6):
        assert run.error == "Killed: ", run
    inside.fine(pools[4].run(spread, (*argv, "--resume"), sizes))
    alike(folder, alone)
    whole = ("--mesh.stage", "1", "--mesh.tensor", "1", "--mesh.no-sequence")
    two = ("--mesh.tensor", "2", "--mesh.context", "1")
    for steps, ranks, sizes, more in (
        (10, 2, {"tensor": 2}, two),
        (11, 4, {"stage": 2, "tensor": 2}, ("--mesh.stage", "2", *two)),
        (12, 1, {}, whole),
    ):
        inside.fine(pools[ranks].run(spread, flags(folder, "--resume", *more, "--steps", str(steps)), sizes))
        assert len(numbers(folder)["loss"]) == steps


MIXTRAL = ("--model", "tiny-mixtral")
OF_THREE = ("--model", "tiny-mixtral-3")


def spread_and_whole_again(_: Any, argv: tuple[str, ...], sizes: dict[str, int]) -> inside.Run:
    """A run of a Mixtral over its experts, of which this rank then reads all."""
    run = spread(_, argv, sizes)
    folder = Path(argv[argv.index("--runs") + 1], "a")
    inside.spoken(_, folder, "--json", "--length", "3")
    with inside.tiny():
        export.write(export.Config(folder / "exported", run=folder, device="cpu"))
    found, params = models.hf.load(folder / "exported")
    assert found.experts == 4
    assert params.layers.tree[mixtral.DOWN].shape == (2, 4, 16, 24)
    return run


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [pytest.param((), id="all that come"), pytest.param(("--capacity", "0.75"), id="slots")],
)
def test_experts_over_an_axis_train_as_without(pools: Pools, tmp_path: Path, more: tuple[str, ...]) -> None:
    alone = texts(tmp_path / "alone")
    folder = texts(tmp_path / "axes")
    inside.fine(pools[2].run(spread, flags(alone, *MIXTRAL, *more), {"shard": 2}))
    argv = flags(folder, *MIXTRAL, *more, "--mesh.expert", "2")
    inside.fine(pools[2].run(spread_and_whole_again, argv, {"expert": 2}))
    alike(folder, alone)


def test_what_cannot_be_is_refused_by_name(pools: Pools, tmp_path: Path) -> None:
    folder = texts(tmp_path / "axes")
    (alone,) = pools[1].run(inside.inside, flags(folder, "--mesh.tensor", "2"))
    assert "mesh.tensor is 2: 1 rank(s) do not divide into so many" in alone.error
    for sizes, more, text in (
        ({"expert": 2}, (), "mesh.expert is 2: Axes(expert=True): weights of this family are not split over expert"),
        ({"expert": 2}, OF_THREE, "mesh.expert is 2: Config.experts: 3 do not divide among 2 ranks of expert"),
        ({"tensor": 2}, ("--vocab", "257"), "mesh.tensor is 2: Config.vocab: 257 do not divide among 2 ranks of"),
        ({"shard": 2}, ("--capacity", "1.5"), "capacity is 1.5: tiny has no experts"),
    ):
        axes = [word for name, n in sizes.items() if name != "shard" for word in (f"--mesh.{name}", str(n))]
        for run in pools[2].run(spread, flags(folder, *axes, *more), sizes):
            assert text in run.error
    for run in pools[2].run(spread, flags(folder, "--mesh.context", "2", "--data.seq-len", "18"), {"context": 2}):
        assert "mesh.context is 2, data.seq_len 18: not a multiple of 4" in run.error
