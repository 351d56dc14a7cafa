"""Forward passes without gradients: evaluation steps, evaluation inside a training step, averaged parameters."""

from __future__ import annotations

import functools
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import bits, same
from tests.harness.marks import nightly
from tests.harness.oracle import batch_of, check_steps, compare, global_batch, looped, own_and_all, plain, whole
from tests.harness.pool import on_ranks
from tests.harness.problems import (
    IGNORED,
    PROBLEMS,
    SCHEDULES,
    Batch,
    Params,
    base_loss,
    base_params,
    dropout_loss,
)

TX = ya.optim.adamw(1e-2)
WORLDS = on_ranks(1, 2)
Aux = dict[str, Any]


def loss_with_aux(params: Params, batch: Batch) -> tuple[ya.Mean, Aux]:
    mean = base_loss(params, batch)
    valid = (batch["targets"] != IGNORED).sum()
    largest = batch["targets"].max()
    own = batch["tokens"].float().mean()
    return mean, {
        "mean": ya.Mean(mean.total.detach(), valid),
        "valid": ya.Sum(valid),
        "max": ya.Max(largest),
        "own": own,
    }


@WORLDS
@pytest.mark.parametrize("by_turns", [True, nightly(False)])
def test_evaluation_is_exact_and_changes_nothing(mesh: Any, by_turns: bool) -> None:
    """by_turns: each problem with one of the schedules"""
    ranks = mesh.size()
    rank = mesh.get_local_rank()
    tolerance = 0.0 if ranks == 1 else 1e-5
    every = ("zero3", "zero3-far", "zero2-remat-all")
    for at, (name, problem) in enumerate(PROBLEMS.items()):
        if name == "dropout":
            continue
        schedules = every[at % 3 :][:1] if by_turns else every
        state = ya.init(problem.params(3), TX, mesh=mesh)
        before = bits(state)
        for parts in (1, 3) if ranks == 1 else (3,):
            oracle = ya.eval_step(problem.loss, microbatches=parts if ranks == 1 else 1)
            expected = oracle(plain(problem.params(3)), global_batch(ranks))["loss"]
            for schedule in schedules:
                evaluate = ya.eval_step(problem.loss, schedule=SCHEDULES[schedule], microbatches=parts)
                what = f"{name}, {schedule}, {parts} microbatches"
                for tree in (state, state.params):
                    got = evaluate(tree, batch_of(rank))
                    assert set(got) == {"loss"}
                    assert not got["loss"].requires_grad
                    compare(got["loss"], expected, tolerance, what)
        with torch.no_grad():
            direct = problem.loss(state.params, batch_of(rank))
        compare(
            direct.total,
            problem.loss(whole(plain(problem.params(3))), batch_of(rank)).total.detach(),
            1e-5,
            name,
        )
        assert same(bits(state), before)


@on_ranks(1, 2, 3)
def test_aux_is_reduced(mesh: Any) -> None:
    ranks = mesh.size()
    rank = mesh.get_local_rank()
    state = ya.init(base_params(2), TX, mesh=mesh)
    everything = global_batch(ranks)
    for parts in (1, 3):
        evaluate = ya.eval_step(loss_with_aux, has_aux=True, microbatches=parts)
        step = ya.train_step(loss_with_aux, TX, has_aux=True, microbatches=parts, donate=False)
        for call in range(4):
            metrics = (evaluate if call < 2 else step)(state, batch_of(rank))
            metrics = metrics[1] if call >= 2 else metrics
            found = metrics["aux"]
            compare(found["mean"], metrics["loss"], 1e-5, "mean")
            assert found["valid"] == (everything["targets"] != IGNORED).sum()
            assert found["valid"].dtype == torch.int64
            assert found["max"] == everything["targets"].max()
            means = [part.float().mean() for part in batch_of(rank)["tokens"].chunk(parts)]
            compare(found["own"], means[0] if parts == 1 else torch.stack(means), 1e-5, "own")


# ---- evaluation inside a training step


def evaluated_within(params: Params, batch: Batch) -> tuple[ya.Mean, Aux]:
    """Visits without grad before, between and after those with grad, on the step's own parameters."""
    with torch.no_grad():
        before = base_loss(params, batch)
    mean = base_loss(params, batch)
    with torch.no_grad():
        rolled = {key: value.roll(1, 1) for key, value in batch.items()}
        other = base_loss(params, rolled)
    twice = base_loss(params, rolled)
    return ya.Mean(mean.total + twice.total, mean.weight), {"before": ya.Mean(*before), "other": ya.Mean(*other)}


@WORLDS
def test_evaluation_inside_a_training_step(mesh: Any) -> None:
    batches = [own_and_all(mesh, seed=number) for number in range(3)]
    for schedule in ("zero3", "zero3-remat-all", "zero2"):
        for parts in (1, 3) if mesh.size() == 1 else (3,):
            state = ya.init(base_params(3), TX, mesh=mesh)
            oracle = ya.PlainState.create(base_params(3), TX)
            step = ya.train_step(evaluated_within, TX, has_aux=True, schedule=SCHEDULES[schedule], microbatches=parts)
            plain_step = ya.train_step(evaluated_within, TX, has_aux=True)
            check_steps((step, state), (plain_step, oracle), batches, 1e-5, f"{schedule}, {parts} microbatches")


def dropout_within(params: Params, batch: Batch) -> ya.Mean:
    with torch.no_grad():
        sampled = dropout_loss(params, batch)
    mean = dropout_loss(params, batch)
    return ya.Mean(mean.total * (1 + sampled.total.sigmoid()), mean.weight)


def evaluated_first(params: Params, batch: Batch) -> ya.Mean:
    with torch.no_grad():
        dropout_loss(params, batch)
    return dropout_loss(params, batch)


@WORLDS
def test_random_numbers_of_an_evaluation_inside(mesh: Any) -> None:
    """Visits with and without grad are numbered apart, so that an evaluation shifts no random numbers."""
    ranks = mesh.size()
    rank = mesh.get_local_rank()
    state = ya.init(base_params(3), TX, mesh=mesh)
    params = whole(plain(base_params(3)))
    for parts in (1, 3):
        function = ya.value_and_grad(dropout_within, microbatches=parts, schedule=SCHEDULES["zero3-remat-all"])
        batches = [batch_of(r) for r in range(ranks)]
        found = looped(evaluated_first, params, batches, parts=parts)
        compare(found, looped(dropout_loss, params, batches, parts=parts), 0.0, "with an evaluation, and without")
        expected = looped(dropout_within, params, batches, parts=parts)
        for _ in range(2):
            compare(function(state.params, batch_of(rank)), expected, 1e-5, f"{parts} microbatches")


# ---- parameters that are not the state's own


averaged = functools.partial(optree.tree_map, lambda a, b: 0.7 * a + 0.3 * b)


@WORLDS
def test_averaged_parameters(mesh: Any) -> None:
    """An exponential average of the parameters, by tree_map, evaluated between steps."""
    step = ya.train_step(base_loss, TX)
    evaluate = ya.eval_step(base_loss)
    for precision in (ya.Precision(), ya.Precision(compute=torch.bfloat16)):
        loose = 1e-5 if precision == ya.Precision() else 2e-2
        state = ya.init(base_params(3), TX, mesh=mesh, precision=precision)
        oracle = ya.PlainState.create(base_params(3), TX)
        mean = optree.tree_map(Tensor.clone, state.params)
        plain_mean = whole(oracle.params)
        for number in range(4):
            mine, everything = own_and_all(mesh, seed=number)
            state, _ = step(state, mine)
            oracle, _ = step(oracle, everything)
            mean = averaged(mean, state.params)
            plain_mean = averaged(plain_mean, whole(oracle.params))
            for tree, expected in ((mean, plain_mean), (state, oracle)):
                got = evaluate(tree, mine)["loss"]
                compare(got, evaluate(expected, everything)["loss"], loose, f"step {number}")
        compare(mean, plain_mean, loose, "the average")
