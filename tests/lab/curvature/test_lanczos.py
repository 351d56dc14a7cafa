"""The top eigenvalues are the dense matrix's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.lab.curvature.problem import BOUND, Dense, batch, everywhere, here, loss, off, vector
from yafsdp_fn.lab.curvature import hessian_product, top_eigenpairs


def top(mesh: Any, frozen: bool) -> tuple[Tensor, Tensor, int]:
    params, own, _ = here(mesh, frozen)
    found = top_eigenpairs(partial(hessian_product(loss), params, own), params, 2, tolerance=1e-6, width=8)
    return found.values, torch.stack([vector(v) for v in found.vectors]), found.products


@pytest.mark.parametrize("frozen", [False, True])
def test_against_the_matrix(pools: dict[int, Pool], frozen: bool) -> None:
    """By eight vectors at once: more products than that, so it was restarted."""
    matrix = Dense(frozen).hessian
    expected = torch.linalg.eigvalsh(matrix).flip(0)[:2]
    results = pools[2].run(top, frozen)
    for values, vectors, products in results:
        assert off(values, expected) < BOUND
        assert off(vectors @ vectors.T, torch.eye(2).double()) < BOUND
        assert off(vectors @ matrix, values[:, None] * vectors) < 3e-6
        assert torch.equal(values, results[0][0]) and products == results[0][2] > 8


def begun(mesh: Any, frozen: bool) -> tuple[Tensor, int]:
    params, own, _ = here(mesh, frozen)
    found = top_eigenpairs(partial(hessian_product(loss), params, own), params, tolerance=0.3)
    return torch.stack([*found.values, *found.residuals]), found.products


def test_the_same_numbers_at_every_number_of_ranks(pools: dict[int, Pool]) -> None:
    """Before they have settled, too: of a plain tree, and on all meshes."""
    plain = Dense().marked
    expected = top_eigenpairs(partial(hessian_product(loss), plain, batch()), plain, tolerance=0.3)
    for where, results in everywhere(pools, begun).items():
        for got, products in results:
            assert off(got, torch.stack([*expected.values, *expected.residuals])) < BOUND, where
            assert products == expected.products > 3, where


def matrix_product(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: matrix @ v


def test_the_other_end_of_a_spectrum() -> None:
    spectrum = torch.linspace(-3.0, 1.0, 50).double() ** 3
    q, _ = torch.linalg.qr(torch.randn(50, 50, generator=torch.Generator().manual_seed(0)).double())
    matrix = q @ spectrum.diag() @ q.T
    largest = top_eigenpairs(matrix_product(matrix), q[0], 2, tolerance=1e-8)
    smallest = top_eigenpairs(matrix_product(-matrix), q[0], 2, tolerance=1e-8)
    assert off(largest.values, spectrum.flip(0)[:2]) < BOUND and off(-smallest.values, spectrum[:2]) < BOUND
    assert bool((largest.residuals <= 1e-8 * largest.values).all())


def test_a_bound_of_width_costs_products_alone() -> None:
    matrix = torch.linspace(0.0, 1.0, 80).double().square().diag()
    narrow, wide = (
        top_eigenpairs(matrix_product(matrix), matrix[0], 4, tolerance=1e-9, width=width) for width in (8, 80)
    )
    assert off(narrow.values, wide.values) < BOUND
    assert narrow.products > wide.products


def test_the_second_one_where_most_are_zero() -> None:
    """The start then looks like an eigenvector of zero, and must not be taken for the second one."""
    matrix = torch.zeros(5000).double()
    matrix[:3] = torch.tensor([50.0, 40.0, -45.0])
    found = top_eigenpairs(lambda v: matrix * v, matrix, 2, tolerance=0.03)
    assert off(found.values, torch.tensor([50.0, 40.0]).double()) < 1e-3


def test_spaces_that_end() -> None:
    """One vector of each eigenspace is seen: asking for more is refused, and fewer are found exactly."""
    matrix = torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0, 0.0]).double().diag()
    found = top_eigenpairs(matrix_product(matrix), matrix[0], 3)
    assert off(found.values, torch.tensor([2.0, 1.0, 0.0]).double()) < 1e-14 and found.products == 3
    with pytest.raises(ValueError, match="3 different eigenvalues can be seen, asked for 4"):
        top_eigenpairs(matrix_product(matrix), matrix[0], 4)


def test_errors() -> None:
    matrix = torch.linspace(0.0, 1.0, 80).double().diag()
    with pytest.raises(
        RuntimeError, match=r"after 7 products the eigenvalues are \[.*Raise products, width or tolerance"
    ):
        top_eigenpairs(matrix_product(matrix), matrix[0], 2, tolerance=1e-9, products=7)
    for count, width in ((0, 10), (9, 10)):
        with pytest.raises(ValueError, match="expected 1 <= count <= width - 2"):
            top_eigenpairs(matrix_product(matrix), matrix[0], count, width=width)
    with pytest.raises(ValueError, match="no direction to look along: params have nothing that is trained"):
        top_eigenpairs(lambda v: v, ya.frozen(matrix[0]))
