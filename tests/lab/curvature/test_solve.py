"""Conjugate gradients solve what a dense solver does, or say why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.lab.curvature.problem import (
    BOUND,
    DAMPING,
    Dense,
    batch,
    here,
    logits,
    loss,
    loss_of_logits,
    off,
    vector,
)
from yafsdp_fn.lab.curvature import conjugate_gradients, gauss_newton_product, hessian_product


def solved(mesh: Any) -> tuple[Tensor, float]:
    params, own, test = here(mesh)
    product = partial(gauss_newton_product(logits, loss_of_logits), params, own)
    found = conjugate_gradients(product, ya.grad(loss)(params, test), damping=DAMPING, tolerance=1e-12)
    return vector(found.x), found.residual


def test_against_a_dense_solver(pools: dict[int, Pool]) -> None:
    """Other meshes: test_influence.py."""
    dense = Dense()
    damped = dense.gauss_newton + DAMPING * torch.eye(len(dense.params)).double()
    expected = torch.linalg.solve(damped, dense.gradient(batch(1)))
    for got, residual in pools[2].run(solved):
        assert off(got, expected) < BOUND and residual <= 1e-12


def indefinite(mesh: Any) -> None:
    params, own, test = here(mesh)
    conjugate_gradients(partial(hessian_product(loss), params, own), ya.grad(loss)(params, test), damping=DAMPING)


def test_what_is_not_convex_is_refused(pools: dict[int, Pool]) -> None:
    assert torch.linalg.eigvalsh(Dense().hessian)[0] < -DAMPING
    for error in pools[2].errors(indefinite):
        assert "ValueError: conjugate_gradients: after " in error
        assert "damping 1.5 included, is not positive. Raise damping, or use gauss_newton_product" in error


def test_edges() -> None:
    zero = conjugate_gradients(lambda v: v, torch.zeros(3))
    assert not zero.x.any() and (zero.residual, zero.products) == (0.0, 0)
    exact = conjugate_gradients(lambda v: 2.0 * v, torch.ones(3), damping=2.0)
    assert torch.equal(exact.x, torch.full((3,), 0.25)) and exact.products == 1
    matrix = torch.linspace(1.0, 1000.0, 50).double()
    with pytest.raises(RuntimeError, match=r"after 5 products the residual is 0\.\d+, expected 1e-05 at most"):
        conjugate_gradients(lambda v: matrix * v, torch.ones(50).double(), products=5)
