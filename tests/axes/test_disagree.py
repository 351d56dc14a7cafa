"""Blocks that call other collectives on one rank than on another: told by all ranks in the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import yafsdp_fn as ya
from tests.harness.groups import breakable_stages, outcome
from tests.harness.pool import Pool

TX = ya.optim.sgd(0.1)
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "left out": lambda x: x,
    "doubled": lambda x: ya.psum(ya.psum(x, "tensor"), "tensor"),
    "another": lambda x: ya.ppermute(x, "tensor", [(0, 1), (1, 0)]),
    "of another size": lambda x: ya.psum(torch.cat([x, x]), "tensor")[: len(x)],
}


def told(_: Any, how: str, layer: int) -> str:
    """The error of a first step in which rank 1 calls something else in one layer."""
    mesh, rank = ya.mesh(device="cpu", tensor=2), torch.distributed.get_rank()
    tree = {"layers": ya.Stacked({"w": ya.Param((3, 4), split={"tensor": -1}), "number": ya.Param((3,))})}
    state = ya.shard({"layers": {"w": torch.ones(3, 4), "number": torch.arange(3.0)}}, TX, mesh=mesh, like=tree)

    def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
        mine = (x * w["w"].sum()).exp()
        odd = rank == 1 and int(w["number"]) == layer
        return (WRONG[how](mine) if odd else ya.psum(mine, "tensor")) * 0.01, None

    def loss(params: Any, x: Tensor) -> Tensor:
        return ya.scan(block, x, params["layers"])[0].sum()

    with pytest.raises(RuntimeError) as caught:
        ya.train_step(loss, TX)(state, torch.full((2,), 0.1))
    return f"{type(caught.value).__name__}: {caught.value}"


def told_in_a_stage(_: Any, how: str, traced: bool) -> str:
    """The same in the first stage of two, where a program runs from the first step on; the other stage waits for it.
    traced: on fake tensors, too"""
    mesh, rank = breakable_stages(2, tensor=2), torch.distributed.get_rank()
    tree = {name: {"w": ya.Param((4,), split={"tensor": -1})} for name in ("one", "two")}
    stages = ya.schedules.Assignment(units=((0,), (1,)), homes=(0, 1))
    state = ya.init(tree, TX, mesh=mesh, stages=stages)

    def loss(params: Any, x: Tensor) -> Tensor:
        def block(w: Any, x: Tensor, odd: bool) -> Tensor:
            mine = (x * w["w"].sum()).exp()
            return WRONG[how](mine) if odd and (traced or not isinstance(x, FakeTensor)) else ya.psum(mine, "tensor")

        x = ya.apply(block, params["one"], x, rank == 1)
        return ya.apply(block, params["two"], x, False).sum()

    run = ya.train_step(loss, TX, schedule=ya.schedules.zero_bubble(ya.schedules.zero2()))
    return outcome(lambda: run(state, torch.full((2,), 0.1)))


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.nightly] * (how != "left out")) for how in WRONG])
def test_ranks_of_a_stage_say_so(pools: dict[int, Pool], how: str) -> None:
    errors = pools[4].run(told_in_a_stage, how, False)
    for error in errors[:2]:
        assert "RanksDisagree: ranks disagree on what blocks and losses communicate" in error
        assert "psum over 'tensor' of torch.float" in error and "of one (visit 0, microbatch 0" in error
    assert all("CommunicationError" in error for error in errors[2:])


def test_their_traces_say_so_before_anything_runs(pools: dict[int, Pool]) -> None:
    for error in pools[4].run(told_in_a_stage, "doubled", True):
        assert "RanksDisagree: ranks disagree on the program; visits differs" in error
        assert "rank 1: [((0,), (0,), (('psum tensor', 'psum tensor'), " in error


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("how", WRONG)
def test_ranks_say_so(pools: dict[int, Pool], how: str, layer: int) -> None:
    for error in pools[2].run(told, how, layer):
        assert error.startswith("RanksDisagree: ranks disagree on ") and "psum over 'tensor' of torch.float" in error


def alike(_: Any) -> list[float]:
    """Losses of three steps, whose loss sums what has no derivative. On demand nothing is known of that, and the sum
    goes back; in later steps it does not."""
    mesh = ya.mesh(device="cpu", tensor=2)
    state = ya.init({"layers": ya.Stacked({"w": ya.Param((2, 4), split={"tensor": -1})})}, TX, mesh=mesh)

    def block(x: Tensor, w: Any) -> tuple[Tensor, Tensor]:
        x = x + ya.psum((x * w["w"].sum()).tanh(), "tensor")
        return x, (x > 0).to(x.dtype)

    def loss(params: Any, x: Tensor) -> Tensor:
        x, counts = ya.scan(block, x, params["layers"])
        return (x.sum() * ya.psum(counts, "tensor").mean()).tanh()

    step, losses = ya.train_step(loss, TX), []
    for _ in range(3):
        state, metrics = step(state, torch.full((2,), 0.1))
        losses.append(metrics["loss"].item())
    return losses


def test_what_has_no_derivative_goes_back_on_demand_alone(pools: dict[int, Pool]) -> None:
    first, second = pools[2].run(alike)
    assert first == second and len(set(first)) == 3
