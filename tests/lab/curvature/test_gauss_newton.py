"""The product with the Gauss-Newton matrix is that of J^T H J, from dense Jacobians of a plain tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.pool import Pool
from tests.lab.curvature.problem import BOUND, Dense, batch, everywhere, here, logits, loss_of_logits, off, vector
from yafsdp_fn.lab.curvature import gauss_newton_product
from yafsdp_fn.lab.curvature.trees import directions


def along(mesh: Any, frozen: bool) -> Tensor:
    params, own, _ = here(mesh, frozen)
    return vector(gauss_newton_product(logits, loss_of_logits)(params, own, directions(3, params)))


@pytest.mark.parametrize("frozen", [False, True])
def test_against_the_matrix(pools: dict[int, Pool], frozen: bool) -> None:
    dense = Dense(frozen)
    expected = dense.gauss_newton @ dense.direction(3)
    assert off(expected, dense.hessian @ dense.direction(3)) > 0.1  # it is another matrix
    for where, results in everywhere(pools, along, frozen).items():
        for got in results:
            assert off(got, expected) < BOUND, where


def two_outputs(mesh: Any) -> Tensor:
    """Outputs may be any tree, and a loss a bare scalar, which then counts equally on every rank."""
    params, own, _ = here(mesh)
    of_parts = lambda z, batch: z["a"].square().sum() + z["b"][0].square().sum()  # noqa: E731
    parts = lambda p, batch: {"a": logits(p, batch), "b": [2.0 * logits(p, batch)]}  # noqa: E731
    whole = lambda z, batch: 5.0 * z.square().sum()  # noqa: E731
    v = directions(3, params)
    got, expected = gauss_newton_product(parts, of_parts), gauss_newton_product(logits, whole)
    return torch.stack([vector(got(params, own, v)), vector(expected(params, own, v)), mesh.size() * vector(v)])


def test_outputs_of_several_parts(pools: dict[int, Pool]) -> None:
    dense = Dense()
    jacobian = torch.func.jacrev(lambda p: logits(dense.tree(p), batch()).flatten())(dense.params)
    for world in (1, 2):
        for got, same, v in pools[world].run(two_outputs):
            assert off(got, same) < BOUND
            assert off(got, 10.0 * jacobian.T @ (jacobian @ v) / world**2) < BOUND


def test_it_is_the_hessian_where_outputs_are_linear() -> None:
    """In the head's matrix alone they are."""
    dense = Dense()
    last = torch.zeros_like(dense.params)
    last[-55:] = dense.direction(1)[-55:]
    got = gauss_newton_product(logits, loss_of_logits)(dense.tree(dense.params), batch(), dense.tree(last))
    assert off(dense.vector(got)[-55:], (dense.hessian @ last)[-55:]) < BOUND
