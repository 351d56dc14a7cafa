"""Meshes with replicas and nodes: what holds at every number of ranks holds on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import grad

import yafsdp_fn as ya
from tests.checkpoint import test_resharding as resharding
from tests.harness.meshes import MESHES, made, on
from tests.harness.pool import Pools, on_ranks
from tests.steps.test_whole_trees import initial, numbers, several_units

ON = pytest.mark.parametrize("mesh", [name for name in MESHES if name != "shard"])
BF16 = torch.bfloat16


@on_ranks(4)
@ON
def test_initial_values_have_the_same_bits(_: Any, mesh: str) -> None:
    for name in ("base", "frozen"):
        initial(made(mesh), name)


@on_ranks(4)
@ON
def test_numbers_over_trees_and_map_layers(_: Any, mesh: str) -> None:
    numbers(made(mesh), "frozen")
    several_units(made(mesh))


def slope(rank: int) -> Tensor:
    """Multiples of 1/8 below 32, which bf16 can represent; sums of two need a ninth bit."""
    return ((torch.arange(1001.0) * (7 + 2 * rank)) % 511 - 255) / 8


def rounded(mesh: Any, precision: ya.Precision) -> list[Tensor]:
    """Gradients of the pure path, twice: the slope of each rank, averaged over four and taken four times."""
    state = ya.init({"w": ya.Param((1001,))}, ya.optim.sgd(0.1), mesh=mesh, precision=precision)
    own = slope(mesh.get_rank())

    def loss(params: Any) -> Tensor:
        return ya.apply(lambda w: (w * own).sum(), params["w"])

    return [4 * ya.unshard(tree)["w"] for tree in (grad(loss)(state.params), grad(loss)(state.params))]


@pytest.mark.parametrize("mesh", ["shard", "replicate", "copies", "nodes"])
def test_the_pure_path_sums_in_accumulate(pools: Pools, mesh: str) -> None:
    exact = torch.stack([slope(rank) for rank in range(4)]).sum(0)
    wide = pools[4].run(on, mesh, rounded, ya.Precision(reduce=BF16, accumulate=torch.float32))
    narrow = pools[4].run(on, mesh, rounded, ya.Precision(reduce=BF16))
    for (got, again), (in_bf16, _) in zip(wide, narrow, strict=True):
        assert torch.equal(got, again)
        assert got.dtype == torch.float32
        if mesh in ("shard", "copies"):  # one sum over all ranks, no partial sums that are rounded
            assert torch.equal(got, exact)
        assert (in_bf16 - exact).norm() > 0
        assert (got - exact).norm() < (in_bf16 - exact).norm()


SCHEDULES = {"ddp": ya.schedules.ddp(), "zero3": ya.schedules.zero3(), "hsdp": ya.schedules.hsdp()}


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "schedule"), [("shard", "zero3"), ("replicate", "hsdp"), ("copies", "ddp"), ("nodes", "zero3")]
)
def test_a_step_sums_in_accumulate_too(_: Any, name: str, schedule: str) -> None:
    """A step reduces as the pure path does, to the bit, and its replicas stay equal to the bit."""
    mesh = made(name)
    precision = ya.Precision(reduce=BF16, accumulate=torch.float32)
    state = ya.init({"w": ya.Param((1001,))}, ya.optim.sgd(1.0), mesh=mesh, precision=precision)
    own = slope(mesh.get_rank())

    def loss(params: Any) -> ya.Mean:
        return ya.Mean(ya.apply(lambda w: (w * own).sum(), params["w"]), 0.25)  # weights add up to 1

    expected = 4 * ya.unshard(grad(lambda params: loss(params).total)(state.params))["w"]  # of a mean over four
    for call in ("first", "second"):
        _, grads = ya.value_and_grad(loss, schedule=SCHEDULES[schedule])(state.params)
        assert torch.equal(ya.unshard(grads)["w"], expected), call
    step = ya.train_step(lambda params, _: loss(params), ya.optim.sgd(1.0), schedule=SCHEDULES[schedule])
    before = ya.unshard(state)["w"]
    for _ in range(3):
        state, _ = step(state, {})
    after = ya.unshard(state)["w"]
    torch.testing.assert_close(after, before - 3 * expected, rtol=1e-6, atol=1e-4)
    everywhere = [torch.empty_like(after) for _ in range(4)]
    torch.distributed.all_gather(everywhere, after)
    assert all(torch.equal(after, other) for other in everywhere)


# ---- checkpoints


def test_replicas_save_a_shard_once(pools: Pools, tmp_path: Path) -> None:
    sizes = {}
    for mesh in ("shard", "replicate", "copies"):
        pools[4].run(on, mesh, resharding.saved, str(tmp_path / mesh), resharding.FP32)
        sizes[mesh] = sum(file.stat().st_size for file in (tmp_path / mesh).rglob("*.safetensors"))
    numel = sum(leaf.numel() for leaf in optree.tree_leaves(ya.materialize(resharding.net(), seed=0)))
    assert sizes["shard"] > 4 * numel
    assert sizes["replicate"] < 1.2 * sizes["shard"]
    assert sizes["copies"] < 1.2 * sizes["shard"]
