"""Influences are those of a dense solver, and what refitting with another weight does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.func as tf
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.lab.curvature.problem import (
    BOUND,
    DAMPING,
    DOUBLE,
    TX,
    Dense,
    batch,
    everywhere,
    here,
    logits,
    loss,
    loss_of_logits,
    off,
)
from yafsdp_fn.lab.curvature import gauss_newton_product, hessian_product, influence


def influences(mesh: Any, frozen: bool, tolerance: float = 0.1) -> Tensor:
    params, own, test = here(mesh, frozen)
    product = partial(gauss_newton_product(logits, loss_of_logits), params, own)
    return influence(loss, params, own, test, product, damping=DAMPING, tolerance=tolerance)


@pytest.mark.parametrize("frozen", [False, True])
def test_against_a_dense_solver(pools: dict[int, Pool], frozen: bool) -> None:
    dense = Dense(frozen)
    damped = dense.gauss_newton + DAMPING * torch.eye(len(dense.params)).double()
    expected = -dense.examples @ torch.linalg.solve(damped, dense.gradient(batch(1)))
    assert off(torch.cat(pools[2].run(influences, frozen, 1e-12)), expected) < BOUND  # each rank has its own examples'


def test_the_same_numbers_at_every_number_of_ranks(pools: dict[int, Pool]) -> None:
    """Of a few steps of the solver: of a plain tree, and on all meshes."""
    plain = Dense().marked
    product = partial(gauss_newton_product(logits, loss_of_logits), plain, batch())
    expected = influence(loss, plain, batch(), batch(1), product, damping=DAMPING, tolerance=0.1)
    for where, results in everywhere(pools, influences).items():
        assert off(torch.cat(results), expected) < BOUND, where


# ---- against refitting: a regression whose optimum is known, with uneven weights

N, FEATURES = 8, 3


def regression() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y, weight = (torch.randn(N, k, generator=generator).double() for k in (FEATURES, 1, 1))
    return {"x": x, "y": y[:, 0], "weight": weight[:, 0].abs() + 0.5}


def squares(params: Any, data: Any) -> ya.Mean:
    off = ya.apply(lambda w, x: x @ w, params["w"], data["x"]) - data["y"]
    return ya.Mean((data["weight"] * off.square()).sum(), data["weight"].sum())


def fitted(data: dict[str, Tensor], example: int = 0, more: float = 0.0) -> Tensor:
    """The minimum of the objective plus DAMPING / 2 |w - w0|^2 and `more` of an example's share. w0: of the optimum"""

    def objective(w: Tensor) -> Tensor:
        total, weight = squares({"w": w}, data)
        own, _ = squares({"w": w}, {key: value[example : example + 1] for key, value in data.items()})
        return total / weight + 0.5 * DAMPING * (w - centre).square().sum() + more * own / (weight / N)

    root = data["weight"].sqrt()
    centre = torch.linalg.lstsq(root[:, None] * data["x"], root * data["y"]).solution
    start = torch.zeros(FEATURES).double()
    return start - torch.linalg.solve(tf.hessian(objective)(start), tf.grad(objective)(start))


def of_regression(mesh: Any) -> Tensor:
    data = regression()
    train = ya.shard_batch(data, mesh)
    params = ya.shard({"w": fitted(data)}, TX, mesh=mesh, precision=DOUBLE).params
    test = {"x": train["x"].flip(1), "y": train["y"], "weight": train["weight"]}
    return influence(
        squares,
        params,
        train,
        test,
        partial(hessian_product(squares), params, train),
        damping=DAMPING,
        tolerance=1e-12,
    )


def test_against_refitting(pools: dict[int, Pool]) -> None:
    data, step = regression(), 1e-4
    test = {"x": data["x"].flip(1), "y": data["y"], "weight": data["weight"]}

    def after(example: int, more: float) -> Tensor:
        total, weight = squares({"w": fitted(data, example, more)}, test)
        return total / weight

    slopes = torch.stack([(after(i, step) - after(i, -step)) / (2 * step) for i in range(N)])
    assert off(torch.cat(pools[2].run(of_regression)), slopes) < 1e-6
