"""What a loss returns and what a step is given: values that are not finite, wrong types, wrong divisions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import TX, LossFn, batch, bits, embed, head, layer, loss, plain, same, state
from tests.harness.pool import on_ranks


def spoiled(bad: Callable[[Tensor], Tensor]) -> LossFn:
    """The model's loss, through `bad` where the batch says so."""

    def total(tree: Any, data: Any) -> Tensor:
        value = loss(tree, data)
        return bad(value) if data["bad"] else value

    return total


def gradient_only(tree: Any, data: Any) -> Tensor:
    """A finite loss, whose gradient is not: that of sqrt at 0."""
    x = ya.apply(embed, tree["embed"], data["tokens"])

    def block(w: Any, x: Tensor) -> Tensor:
        value = head(w, x, data["targets"])
        return value + (value.detach() - value).clamp(0, 0).add(0 * value).abs().sqrt() if data["bad"] else value

    x, _ = ya.scan(layer, x, tree["layers"])
    return ya.apply(block, tree["head"], x)


BAD: dict[str, LossFn] = {
    "nan": spoiled(lambda value: value * float("nan")),
    "infinite": spoiled(lambda value: value / 0),
    "a gradient": gradient_only,
    "no weight": lambda tree, data: ya.Mean(loss(tree, data) * (1 - data["bad"]), 1 - data["bad"]),
}


def not_finite(make: Callable[[], Any], which: str, rank: int = 0, bad_here: bool = True) -> None:
    """A bad step keeps every bit but the step number; the next one is that of a run without it."""
    for options in ({}, {"microbatches": 2}):
        step = ya.train_step(BAD[which], TX, **options)
        good = {**batch(rank), "bad": torch.tensor(0)}
        bad = {**good, "bad": torch.tensor(int(bad_here))}
        now = make()
        expected = ya.train_step(BAD[which], TX, **options)(make(), good)[0]
        before = bits(now)
        for count in (1, 2):  # recorded, then by its program
            now, metrics = step(now, bad)
            assert float(metrics["skipped"]) == 1.0, metrics
            assert same(bits(now), before)
            assert now.step == count
        now, metrics = step(now, good)
        assert float(metrics["skipped"]) == 0.0
        assert metrics["grad_norm"].isfinite()
        assert now.step == 3
        assert same(bits(now), bits(expected))
        now, metrics = step(now, good)
        assert metrics["loss"].isfinite()
        assert float(metrics["skipped"]) == 0.0


@on_ranks(1)
@pytest.mark.parametrize("which", BAD)
def test_a_step_that_is_not_finite_is_skipped(mesh: Any, which: str) -> None:
    not_finite(functools.partial(state, mesh), which)


@pytest.mark.parametrize("which", BAD)
def test_so_is_one_of_a_plain_state(which: str) -> None:
    not_finite(plain, which)


@on_ranks(2)
@pytest.mark.parametrize("which", ["nan", "a gradient"])
def test_one_rank_that_is_not_finite_skips_all(mesh: Any, which: str) -> None:
    rank = mesh.get_local_rank()
    not_finite(functools.partial(state, mesh), which, rank, bad_here=rank == 1)


def test_skipping_can_be_switched_off() -> None:
    step = ya.train_step(BAD["nan"], TX, skip_nonfinite=False)
    for before in (state(), plain()):
        now, metrics = step(before, {**batch(), "bad": torch.tensor(1)})
        assert float(metrics["skipped"]) == 0.0
        assert all(leaf.isnan().any() for leaf in optree.tree_leaves(now.params))


@on_ranks(2)
def test_a_step_that_one_rank_skips_is_skipped_by_all(mesh: Any) -> None:
    """Rank 1 skips the second of three steps; nobody else judges any."""
    asked = iter(range(3))
    step = ya.train_step(loss, TX, skip=lambda _: torch.tensor(next(asked) == 1 and mesh.get_local_rank() == 1))
    now = state(mesh)
    kept = []
    skipped = []
    for _ in range(3):
        before = bits(now)
        now, metrics = step(now, batch(mesh.get_local_rank()))
        kept.append(same(bits(now), before))
        skipped.append(float(metrics["skipped"]))
    assert (kept, skipped) == ([False, True, False], [0.0, 1.0, 0.0])


@on_ranks(1, 2)
def test_a_user_may_judge_steps(mesh: Any) -> None:
    """`skip` sees the metrics of all ranks before the update, in every kind of step, and beside `skip_nonfinite`."""
    data = batch(mesh.get_local_rank())
    for options in ({}, {"microbatches": 2}, {"schedule": ya.schedules.zero3(update=True)}):
        bound = torch.tensor(float("inf"))
        seen = []

        def skip(metrics: dict[str, Any], bound: Tensor = bound, seen: list[float] = seen) -> Tensor:
            seen.append(float(metrics["loss"]))
            return torch.as_tensor(metrics["loss"] > bound)

        step = ya.train_step(loss, TX, skip=skip, **options)
        now = state(mesh)
        expected = state(mesh)
        for allowed in (float("inf"), 0.0, float("inf")):
            bound.fill_(allowed)
            before = bits(now)
            now, metrics = step(now, data)
            assert seen[-1] == float(metrics["loss"])
            assert float(metrics["skipped"]) == (allowed == 0)
            assert allowed != 0 or same(bits(now), before)
        plain = ya.train_step(loss, TX, **options)
        for _ in range(2):
            expected, _ = plain(expected, data)
        assert same(bits(now), bits(expected))
        assert len(seen) == 3
    step = ya.train_step(loss, TX, skip=lambda metrics: metrics["loss"])
    with pytest.raises(
        TypeError, match=r"skip returned torch.float.* of shape \(\): expected a bool tensor without axes"
    ):
        step(state(mesh), data)


def with_aux(tree: Any, data: Any) -> Any:
    return loss(tree, data), {}


SCALAR = r"the loss: expected a scalar tensor or ya.Mean of one, got {}; with aux, pass has_aux=True"
LOSSES: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "nothing": (lambda p, d: None, {}, TypeError, SCALAR.format("NoneType")),
    "a number": (lambda p, d: 1.0, {}, TypeError, SCALAR.format("float")),
    "a vector": (lambda p, d: loss(p, d)[None], {}, TypeError, SCALAR.format(r"torch.float32 \(1,\)")),
    "a pair": (with_aux, {}, TypeError, SCALAR.format("tuple")),
    "an integer": (
        lambda p, d: loss(p, d).long(),
        {},
        TypeError,
        "the loss: the total of a Mean should be a floating-point tensor, got torch.int64",
    ),
    "a constant": (
        lambda p, d: torch.ones(()),
        {},
        ValueError,
        "the loss does not depend on the differentiated arguments",
    ),
    "detached": (
        lambda p, d: loss(p, d).detach(),
        {},
        ValueError,
        "the loss does not depend on the differentiated arguments: it was detached",
    ),
    "a weight per row": (
        lambda p, d: ya.Mean(loss(p, d), torch.ones(4)),
        {},
        TypeError,
        r"the loss: the weight of a Mean should be a scalar or .*, got \(4,\)",
    ),
    "no aux": (
        loss,
        {"has_aux": True},
        TypeError,
        r"has_aux=True: the function must return \(loss, aux\), got Tensor",
    ),
    "three for aux": (
        lambda p, d: (loss(p, d), 1, 2),
        {"has_aux": True},
        TypeError,
        r"has_aux=True: the function must return \(loss, aux\), got tuple",
    ),
}


@pytest.mark.parametrize("which", LOSSES)
def test_a_loss_of_the_wrong_type(which: str) -> None:
    """On sharded and plain states alike; the state is as before."""
    function, options, kind, text = LOSSES[which]
    now = state()
    with pytest.raises(kind, match=text):
        ya.train_step(function, TX, **options)(now, batch())
    with pytest.raises(kind, match=text):
        ya.train_step(function, TX, **options)(plain(), batch())
    assert same(bits(now), bits(state()))
    ya.train_step(loss, TX)(now, batch())


def test_wrong_divisions_of_a_batch() -> None:
    for of in (state(), plain()):
        with pytest.raises(ValueError, match=r"targets.* has 4 rows, not a multiple of 3 microbatches") as caught:
            ya.train_step(loss, TX, microbatches=3)(of, batch())
        assert "0.1." not in str(caught.value), "a path that means nothing to a user"
    with pytest.raises((TypeError, ValueError), match=r"microbatches=2.0: expected an integer"):
        ya.train_step(loss, TX, microbatches=2.0)


def test_arguments_of_steps() -> None:
    now = state()
    with pytest.raises(TypeError, match=r"schedule.*zero3\(\)"):  # the call forgotten
        ya.train_step(loss, TX, schedule=ya.schedules.zero3)(now, batch())
    for factory in (ya.schedules.zero3, ya.schedules.zero2):
        with pytest.raises(ValueError, match=rf"{factory.__name__}\(prefetch=-1\): expected an integer >= 0"):
            factory(prefetch=-1)
    with pytest.raises((TypeError, ValueError), match=r"optimizer|optim"):  # not that of the state
        ya.train_step(loss, ya.optim.sgd(1.0))(now, batch())
    assert same(bits(now), bits(state()))
