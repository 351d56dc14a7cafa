"""Blocks that call other collectives on one rank than on another: told by all ranks before the first step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import yafsdp_fn as ya
from tests.harness.groups import SOON, breakable_stages, outcome
from tests.harness.marks import by_day, nightly
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn.schedules import Assignment, zero2, zero_bubble

TX = ya.optim.sgd(0.1)
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "left out": lambda x: x,
    "doubled": lambda x: ya.psum(ya.psum(x, "tensor"), "tensor"),
    "another": lambda x: ya.ppermute(x, "tensor", [(0, 1), (1, 0)]),
    "of another size": lambda x: ya.psum(torch.cat([x, x]), "tensor")[: len(x)],
}


def told_in_a_stage(_: Any, how: str, traced: bool) -> str:
    """The same in the first stage of two, where a program runs from the first step on; the other stage waits for it.
    traced: on fake tensors, too"""
    mesh = breakable_stages(2, tensor=2)
    rank = torch.distributed.get_rank()
    tree = {name: {"w": ya.Param((4,), split={"tensor": -1})} for name in ("one", "two")}
    stages = Assignment(units=((0,), (1,)), homes=(0, 1))
    state = ya.init(tree, TX, mesh=mesh, stages=stages)

    def step(state: Any, odd: bool) -> None:
        def block(w: Any, x: Tensor, odd: bool) -> Tensor:
            mine = (x * w["w"].sum()).exp()
            return WRONG[how](mine) if odd and (traced or not isinstance(x, FakeTensor)) else ya.psum(mine, "tensor")

        def loss(params: Any, x: Tensor) -> Tensor:
            return ya.apply(block, params["two"], ya.apply(block, params["one"], x, odd), False).sum()

        run = ya.train_step(loss, TX, schedule=zero_bubble(zero2()))
        run(state, torch.full((2,), 0.1))

    step(state.copy(), odd=False)
    return outcome(lambda: step(state, odd=rank == 1), SOON)


@pytest.mark.parametrize("how", by_day(WRONG, "left out"))
def test_ranks_of_a_stage_say_so(pools: Pools, how: str) -> None:
    errors = pools[4].run(told_in_a_stage, how, False)
    for error in errors[:2]:
        assert "RanksDisagree: ranks disagree on what blocks and losses communicate" in error
        assert "psum over 'tensor' of torch.float" in error
        assert "of one (visit 0, microbatch 0" in error
    assert all("CommunicationError" in error for error in errors[2:])


@on_ranks(4)
def test_their_traces_say_so_before_anything_runs(mesh: Any) -> None:
    error = told_in_a_stage(mesh, "doubled", True)
    assert "RanksDisagree: ranks disagree on the program; visits differs" in error
    assert "rank 1: [((0,), (0,), (('psum tensor', 'psum tensor'), " in error


def alike(_: Any) -> list[float]:
    """Losses of three steps, whose loss sums what has no derivative: that sum does not go back."""
    mesh = ya.mesh(device="cpu", tensor=2)
    state = ya.init({"layers": ya.Stacked({"w": ya.Param((2, 4), split={"tensor": -1})})}, TX, mesh=mesh)

    def block(x: Tensor, w: Any) -> tuple[Tensor, Tensor]:
        x = x + ya.psum((x * w["w"].sum()).tanh(), "tensor")
        return x, (x > 0).to(x.dtype)

    def loss(params: Any, x: Tensor) -> Tensor:
        x, counts = ya.scan(block, x, params["layers"])
        return (x.sum() * ya.psum(counts, "tensor").mean()).tanh()

    step = ya.train_step(loss, TX)
    losses = []
    for _ in range(3):
        state, metrics = step(state, torch.full((2,), 0.1))
        losses.append(metrics["loss"].item())
    return losses


def test_what_has_no_derivative_goes_on_without_a_way_back(pools: Pools) -> None:
    first, second = pools[2].run(alike)
    assert first == second
    assert len(set(first)) == 3


def swapped(x: Tensor, each: int) -> Tensor:
    sizes = [each] * ya.axis_size("tensor")
    return ya.all_to_all(x, "tensor", 0, 0, tiled=True, split_sizes=sizes, concat_sizes=sizes)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": lambda x: ya.psum(x, "tensor"),
    "psum_scatter": lambda x: ya.psum_scatter(x, "tensor", tiled=True),
    "all_gather": lambda x: ya.all_gather(x, "tensor"),
    "all_to_all": lambda x: ya.all_to_all(x, "tensor", 0, 0, tiled=True),
    "ppermute": lambda x: ya.ppermute(x, "tensor", [(0, 1), (1, 0)]),
    "uneven all_to_all": lambda x: swapped(x, len(x) // ya.axis_size("tensor")),
}


def steps(ranks: int, block: Callable[[Tensor, int], Tensor], lengths: tuple[int, ...]) -> list[str]:
    """What becomes of steps on batches of these lengths, whose one block is told the number of the step."""
    mesh = breakable_stages(1, tensor=ranks)
    now = {"step": 0}
    said = list[str]()
    state = ya.init({"a": {"w": ya.Param((4,))}}, TX, mesh=mesh)

    def loss(params: Any, x: Tensor) -> Tensor:
        out: Tensor = ya.apply(lambda w, x: block(x * w["w"].sum(), now["step"]), params["a"], x)
        return out.sum().float()

    step = ya.train_step(loss, TX)
    for now["step"], length in enumerate(lengths):
        kept = state

        def one() -> None:
            nonlocal state
            state, _ = step(kept, torch.ones(length))  # noqa: B023

        last = 0 < now["step"] == len(lengths) - 1  # in which some wait for others
        said.append(outcome(one, SOON if last else None))
    return said


def other_dtype(_: Any, kind: str, ranks: int, length: int) -> list[str]:
    """In the third step the last rank sends as many bytes of another dtype."""
    last = torch.distributed.get_rank() == ranks - 1

    def block(x: Tensor, step: int) -> Tensor:
        x = x.repeat(4)
        return KINDS[kind](x.view(-1, 2).sum(-1).double() if last and step == 2 else x)

    return steps(ranks, block, (ranks, ranks, length * ranks))


DAILY = [("psum", 2, 2), ("uneven all_to_all", 4, 1)]
LONG = [(kind, *of) for kind in KINDS for of in ((2, 2), (4, 1)) if (kind, *of) not in DAILY]


# of another length sizes are not compared
@pytest.mark.parametrize(("kind", "ranks", "length"), [*DAILY, *(nightly(*of) for of in LONG)])
def test_another_dtype_is_told_in_later_steps(pools: Pools, kind: str, ranks: int, length: int) -> None:
    *others, last = pools[ranks].run(other_dtype, kind, ranks, length)
    for said in (*others, last):
        assert said[:2] == ["returned"] * 2
    size = 16 * length * ranks
    assert "OrderChanged: forward of a (visit 0, microbatch 0, step 2): expected its collective 0 to be" in last[2]
    assert f"{kind} over 'tensor', " in last[2] and "bytes of torch.float32" in last[2], size
    assert f"; got {kind} over 'tensor', " in last[2]
    assert "bytes of torch.float64" in last[2]
    assert all("CommunicationError" in said[2] for said in others)


@on_ranks(2)
def test_batches_of_another_dtype_go_on(_: Any) -> None:
    """A batch of another dtype, alike on all ranks, and a number that counts."""
    mesh = breakable_stages(1, tensor=2)
    state = ya.init({"a": {"w": ya.Param((4,))}}, TX, mesh=mesh)

    def loss(params: Any, batch: tuple[Tensor, int]) -> Tensor:
        out: Tensor = ya.apply(lambda w, x: ya.psum(w["w"].sum() * x, "tensor"), params["a"], batch[0])
        return out.sum()

    step = ya.eval_step(loss)
    xs = torch.ones(2), torch.ones(2).double(), torch.ones(4), torch.ones(4).double()
    assert [outcome(functools.partial(step, state.params, (x, n))) for n, x in enumerate(xs)] == ["returned"] * 4


def rows_of(how: str, rank: int, ranks: int, wrong: bool) -> Callable[[Tensor], Tensor]:
    """An exchange of four rows with each rank, or a ring, but for what is wrong."""
    sent = [4] * ranks
    taken = [4] * ranks
    ring = [(k, (k + 1) % ranks) for k in range(ranks)]
    if how == "perm":
        back = [(b, a) for a, b in ring] if ranks > 2 else [(0, 1)]
        return lambda x: ya.ppermute(x, "tensor", back if wrong and rank == 1 else ring)
    if wrong and how == "alike":  # on all ranks, and yet they do not fit
        sent = [5, *[4] * (ranks - 2), 3]
        taken = [5, *[4] * (ranks - 2), 3]
    elif wrong and rank == 0:  # "one": it takes less of the last rank than that sends
        taken[-1] = 3
    return lambda x: ya.all_to_all(x, "tensor", 0, 0, tiled=True, split_sizes=sent, concat_sizes=taken)


def unfit(_: Any, how: str, ranks: int, first: int) -> list[str]:
    """What is wrong from step `first` on."""
    rank = torch.distributed.get_rank()

    def block(x: Tensor, step: int) -> Tensor:
        return rows_of(how, rank, ranks, step >= first)(x)

    return steps(ranks, block, (4 * ranks,) * (first + 1))


@pytest.mark.sampled
@on_ranks(2, 3, 4)
@pytest.mark.parametrize("how", ["one", "alike", "perm"])
def test_what_does_not_fit_is_told_in_the_first_step(mesh: Any, how: str) -> None:
    ranks = mesh.size()
    words = {
        "one": f"rank {ranks - 1} sends 4 rows to rank 0, which takes 3 from it. split_sizes",
        "alike": f"rank 0 sends 3 rows to rank {ranks - 1}, which takes 5 from it. split_sizes",
        "perm": "rank 1 sends 0 rows to rank 0, which takes 1 from it. perm must be the same on all ranks",
    }
    if ranks > 2:
        words |= {
            "alike": "rank 0 sends 4 rows to rank 1, which takes 5 from it. split_sizes",
            "perm": "rank 0 sends 1 rows to rank 1, which takes 0 from it. perm must be the same on all ranks",
        }
    (error,) = unfit(mesh, how, ranks, 0)
    assert error.startswith("yafsdp_fn.communication.agreement.RanksDisagree: ranks disagree on ")
    assert words[how] in error
    assert "forward of a (visit 0, microbatch 0, step 0): rank" in error


@pytest.mark.nightly
def test_what_does_not_fit_later_is_told_with_its_rows(pools: Pools) -> None:
    """On the rank whose perm is not the one before; of sizes, which may change, when the wait is over."""
    (*before, one), (*_, two) = pools[2].run(unfit, "perm", 2, 2)
    assert before == ["returned"] * 2
    assert "CommunicationError" in one
    assert "OrderChanged: forward of a (visit 0, microbatch 0, step 2): expected its collective 0 to be ppermute" in two
    assert "rows to each rank (1, 0), from each (1, 0); got ppermute" in two
    assert "(0, 0), from each (1, 0)" in two
    (*before, one), _ = pools[2].run(unfit, "one", 2, 2)
    assert before == ["returned"] * 2
    assert "uneven all_to_all over tensor, rows to each rank (4, 4), from each (4, 3)" in one
