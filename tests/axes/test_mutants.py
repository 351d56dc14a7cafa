"""A visit's collective left out, doubled, swapped with its neighbour, of another kind or size, over another axis, or
without its adjoint, in one layer.

    on one rank, in the first step    all ranks say so, before it runs
    on one rank, in a later step      that rank says so, before it runs or at the visit's end; the others wait, and the
                                      table of where ranks are names it
    on all ranks, in a later step     all say so, and the state is as before the step
    on all ranks, in the first step   another program: exact for what it says
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.axes.test_exact import FLOAT64, close
from tests.harness.groups import SOON, beating, giving_up
from tests.harness.marks import nightly
from tests.harness.pool import Pool, Pools
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.errors import OrderChanged, RanksDisagree
from yafsdp_fn.schedules import zero3

LAYERS, STEPS, LATER = 3, 4, 2
Calls = Sequence[Callable[[Tensor], Tensor]]


def psum(x: Tensor, axis: str = "tensor") -> Tensor:
    return ya.psum(x, axis) / ya.axis_size(axis)


def gathered(x: Tensor) -> Tensor:
    return ya.all_gather(x, "tensor").mean(0)


def passed_on(x: Tensor) -> Tensor:
    n = ya.axis_size("tensor")
    return ya.ppermute(x, "tensor", [(k, (k + 1) % n) for k in range(n)])


RIGHT: Calls = (psum, gathered, passed_on)
"""What a layer does to what all ranks of `tensor` have alike: each is the identity, and says so in its own way."""

MUTANTS: dict[str, Calls] = {
    "left out": (psum, passed_on),
    "the last left out": (psum, gathered),
    "doubled": (psum, psum, gathered, passed_on),
    "swapped": (gathered, psum, passed_on),
    "of another kind": (passed_on, gathered, passed_on),
    "over another axis": (lambda x: psum(x, "context"), gathered, passed_on),
    "of another size": (lambda x: psum(torch.cat([x, x]))[: len(x)], gathered, passed_on),
    "without its adjoint": (lambda x: psum(x.detach()) + x - x.detach(), gathered, passed_on),
}


class Model:
    """wrong: the calls of the layer in the middle in step `at` (0: from the first on), on some ranks"""

    def __init__(self, wrong: Calls, at: int, mine: bool) -> None:
        self.wrong, self.at, self.mine, self.step = wrong, at, mine, 0

    def loss(self, params: Any, x: Tensor) -> ya.Mean:
        def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
            off = self.mine and int(w["number"][0]) == 1 and self.step == self.at
            for call in self.wrong if off else RIGHT:
                x = call(torch.tanh(x * w["w"]))
            return x, None

        out = ya.scan(block, x, params["layers"])[0]
        return ya.Mean(out.square().sum(), out.numel())


def tree() -> Any:
    number = ya.frozen(torch.arange(LAYERS, dtype=torch.float64)[:, None])
    w = torch.linspace(0.5, 2, LAYERS * 4, dtype=torch.float64).view(LAYERS, 4)
    return {"layers": ya.Stacked({"w": w, "number": number})}


TX = ya.optim.sgd(0.1)
X = torch.linspace(-1, 1, 4, dtype=torch.float64).expand(3, 4)


def run(_: Any, how: str, at: int, ranks: Sequence[int], axes: dict[str, int], remat: str) -> str:
    """What becomes of four steps on this rank: "exact", or the error; `at` -1: of a mutant in every step."""
    mesh = ya.mesh(device="cpu", **axes)
    with beating():
        communicators(mesh)
    model = Model(MUTANTS[how], max(at, 0), torch.distributed.get_rank() in ranks)
    rank = torch.distributed.get_rank()
    plain = ya.PlainState.create(tree(), TX)
    state = ya.shard(tree(), TX, mesh=mesh, precision=FLOAT64)
    schedule = zero3(remat=remat)
    step = ya.train_step(model.loss, TX, schedule=schedule)
    of_plain = ya.train_step(model.loss, TX)
    for number in range(STEPS):
        model.step = model.at if at < 0 else number
        before = ya.unshard(state)
        try:
            # others wait for one that has said so
            with giving_up(SOON) if number == at > 0 and len(ranks) < mesh.size() else nullcontext():
                state = step(state, X)[0]
        except (OrderChanged, RanksDisagree) as error:
            if len(ranks) == mesh.size():  # all failed at one place
                close(state, before, "the state")
                model.step = 0  # as the first step was
                step(state, X)
            return f"{type(error).__name__}: {error}"
        except RuntimeError as error:
            return f"waited: {error} {getattr(error, '__notes__', '')}"
        plain = of_plain(plain, X)[0]
        close(state, plain.params, f"rank {rank}, step {number}")
    return "exact"


LATE = "forward of layers[1] (visit 1, microbatch 0, step 2): expected its collective "
SAID = {
    "left out": LATE + "1 to be all_gather over 'tensor', 192 bytes; got ppermute over 'tensor', 96 bytes",
    "the last left out": LATE + "2 to be ppermute over 'tensor', 96 bytes; got none",
    "doubled": LATE + "1 to be all_gather over 'tensor', 192 bytes; got psum over 'tensor', 96 bytes",
    "swapped": LATE + "0 to be psum over 'tensor', 96 bytes; got all_gather over 'tensor', 192 bytes",
    "of another kind": LATE + "0 to be psum over 'tensor', 96 bytes; got ppermute over 'tensor', 96 bytes",
    "over another axis": LATE + "0 to be psum over 'tensor', 96 bytes; got psum over 'context', 96 bytes",
    "of another size": LATE + "0 to be psum over 'tensor', 96 bytes; got psum over 'tensor', 192 bytes",
    "without its adjoint": LATE.replace("forward", "backward") + "2 to be psum over 'tensor', 96 bytes; got none",
}
ADVICE = "Is there a branch on values around it (if, .item())?"


def judge(pool: Pool, how: str, at: int, ranks: Sequence[int], axes: dict[str, int], remat: str) -> None:
    found = pool.run(run, how, at, ranks, axes, remat)
    everywhere = len(ranks) == pool.world
    if at < 0:
        assert found == ["exact"] * pool.world
    elif at == 0:
        if everywhere:  # then the next step has another program than the first
            assert all(error.startswith("OrderChanged") for error in found), found
        else:
            assert all(error.startswith("RanksDisagree: ranks disagree on what") for error in found), found
    else:
        for rank, outcome in enumerate(found):
            if rank in ranks:
                said = re.sub(r" of torch.float64(, rows to each rank \(.*?\), from each \(.*?\))?", "", outcome)
                assert said.startswith(f"OrderChanged: {SAID[how]}") and ADVICE in outcome, outcome
            else:
                assert outcome.startswith("waited: "), outcome


TENSOR = {"tensor": 2}
BOTH = {"context": 2, "tensor": 2}
DAILY = [
    ("swapped", LATER, [1], TENSOR, "none"),
    ("the last left out", LATER, [0, 1], TENSOR, "all"),
    nightly("without its adjoint", LATER, [1], TENSOR, "all"),
    ("doubled", 0, [1], TENSOR, "none"),
    ("of another size", 0, [1], TENSOR, "all"),
    ("left out", -1, [0, 1], TENSOR, "none"),
]


@pytest.mark.parametrize(("how", "at", "ranks", "axes", "remat"), DAILY)
def test_none_is_wrong_and_silent(
    pools: Pools, how: str, at: int, ranks: list[int], axes: dict[str, int], remat: str
) -> None:
    judge(pools[2], how, at, ranks, axes, remat)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [[0], [1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize(("at", "remat"), [*itertools.product((0, LATER), ("none", "all")), (-1, "all")])
@pytest.mark.parametrize("how", MUTANTS)
def test_all_of_them(pools: Pools, how: str, at: int, remat: str, ranks: list[int]) -> None:
    if at < 0 and len(ranks) < 4:
        ranks = [0, 1, 2, 3]
    judge(pools[4], how, at, ranks, BOTH, remat)
