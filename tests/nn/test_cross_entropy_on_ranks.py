"""ya.linear_cross_entropy in a sharded step: the plain loop's numbers, and where and when its gradient is formed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness import problems
from tests.harness.oracle import batch_of, check_exact
from tests.harness.pool import on_ranks
from tests.harness.problems import IGNORED, SCHEDULES, TX, Batch, Head, Params, Problem, TiedHead, block, embed
from tests.steps.test_allocations import measured
from yafsdp_fn.nn import cross_entropy

MORE = {"deferred": ya.schedules.zero3(defer=True), "first step": ya.schedules.zero3(), **SCHEDULES}
FEW = ("zero3", "zero3-remat-all", "deferred")
CHUNK = 4  # of 15 rows


def head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    total = ya.linear_cross_entropy(x * w.scale, w.out, targets, ignore_index=IGNORED, chunk=CHUNK)
    return ya.Mean(total, (targets != IGNORED).sum())


def tied_head(weights: tuple[TiedHead, Tensor], x: Tensor, targets: Tensor) -> ya.Mean:
    return head(Head(weights[0].scale, weights[1]), x, targets)


def twice_head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    """Two losses and a regulariser on one weight; its gradient of the first one is asked for inside as well."""
    first = head(w, x, targets).total
    second = head(w, x.flip(-1), targets).total
    if torch.is_grad_enabled() and w.out.requires_grad:
        torch.autograd.grad(first, w.out, retain_graph=True)
    return ya.Mean(3.0 * first + 0.5 * second + ya.linear(x, w.out).square().sum(), 2 * (targets != IGNORED).sum())


def unused_head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    """A loss whose gradient is formed, and not used."""
    head(w, x, targets)
    return ya.Mean((x * w.scale).square().sum() + 0.0 * w.out.sum(), x.numel())


def visits(last: Any, *, tied: bool = False) -> Any:
    def loss(params: Params, batch: Batch) -> ya.Mean:
        x = ya.apply(embed, params.embed, batch["tokens"])
        x, _ = ya.scan(block, x, params.layers)
        units = (params.head, params.embed) if tied else params.head
        mean: ya.Mean = ya.apply(last, units, x, batch["targets"])
        return mean

    return loss


def frozen_params(layers: int) -> Params:
    params = problems.base_params(layers)
    return params._replace(head=ya.frozen(params.head))


PROBLEMS = {
    "head": Problem(problems.base_params, visits(head)),
    "tied": Problem(problems.tied_params, visits(tied_head, tied=True)),
    "twice": Problem(problems.base_params, visits(twice_head)),
    "unused": Problem(problems.base_params, visits(unused_head)),
    "frozen": Problem(frozen_params, visits(head)),
}


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("schedule", FEW)
def test_equals_the_plain_loop(mesh: Any, name: str, schedule: str) -> None:
    check_exact(mesh, PROBLEMS[name], layers=2, schedules={schedule: MORE[schedule]}, bits=False)


EARLY = ["gradients"]
LATE = ["total", "gradients"]


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("name", "schedule", "microbatches", "alone", "together"),
    [
        ("head", "zero3", 1, EARLY, EARLY),
        ("head", "zero3", 3, EARLY + 2 * LATE, 3 * EARLY),  # alone, the slot is the shard that adds up
        ("head", "deferred", 3, EARLY + 2 * LATE, EARLY + 2 * LATE),
        ("head", "first step", 1, ["total", *EARLY], ["total", *EARLY]),  # recorded, then as in all others
        ("tied", "zero3", 1, EARLY, EARLY),
        ("twice", "zero3", 1, ["gradients", "total", "gradients", "gradients"], None),
    ],
)
def test_the_forward_forms_the_gradient_where_the_slot_is_free(
    mesh: Any, name: str, schedule: str, microbatches: int, alone: list[str], together: list[str] | None
) -> None:
    """What the losses of a step compute, in order: the total alone, or gradients with it."""
    calls: list[str] = []
    chunks = cross_entropy._chunks

    def noted(*args: Any, **how: Any) -> Tensor:
        calls.append("gradients" if how["write"] else "total")
        return chunks(*args, **how)

    state = ya.init(PROBLEMS[name].params(2), TX, mesh=mesh)
    step = ya.train_step(PROBLEMS[name].loss, TX, schedule=MORE[schedule], microbatches=microbatches)
    if schedule != "first step":
        state, _ = step(state, batch_of(mesh.get_rank()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "_chunks", noted)
        step(state, batch_of(mesh.get_rank()))
    assert calls == (alone if mesh.size() == 1 or together is None else together)


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("zero3", 1), ("zero3", 2), ("deferred", 2), ("zero3-remat-all", 1)]
)
def test_nothing_of_weight_size_is_allocated(mesh: Any, schedule: str, microbatches: int) -> None:
    """The weight takes 24,576 bytes, the embedding's gradient 8,192, the chunk of logits 768."""
    V, E = 96, 64
    params = {"embed": ya.Param((32, E)), "out": ya.Param((V, E))}

    def last(w: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        return ya.linear_cross_entropy(x, w, targets, chunk=2)

    def loss(params: Any, batch: Batch) -> Tensor:
        total: Tensor = ya.apply(
            last, params["out"], ya.apply(embed, params["embed"], batch["tokens"]), batch["tokens"]
        )
        return total

    state = ya.init(params, TX, mesh=mesh)
    step = ya.train_step(loss, TX, schedule=MORE[schedule], microbatches=microbatches)
    batch = {"tokens": torch.arange(12).view(4, 3)}
    found = []

    def one() -> None:
        nonlocal state
        state, _ = step(state, batch)

    one()
    one()
    for _ in range(2):
        taken = measured(one)
        found.append(max(*taken.main, *taken.outputs, *taken.streams, 0))
    assert max(found) <= 8192
