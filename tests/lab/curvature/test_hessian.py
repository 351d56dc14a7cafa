"""The product with the Hessian is the dense matrix's, which torch.func.hessian makes of a plain tree."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.lab.curvature.problem import BOUND, Dense, batch, everywhere, here, loss, off, vector
from yafsdp_fn.lab.curvature import hessian_product
from yafsdp_fn.lab.curvature.trees import directions


def along(mesh: Any, frozen: bool) -> Tensor:
    params, own, _ = here(mesh, frozen)
    return vector(hessian_product(loss)(params, own, directions(3, params)))


@pytest.mark.parametrize("frozen", [False, True])
def test_against_the_matrix(pools: dict[int, Pool], frozen: bool) -> None:
    dense = Dense(frozen)
    expected = dense.hessian @ dense.direction(3)
    for where, results in everywhere(pools, along, frozen).items():
        for got in results:
            assert off(got, expected) < BOUND, where


def test_plain_trees() -> None:
    dense = Dense()
    v = dense.direction(3)
    for params, of_params in (
        (dense.marked, ya.normal_like(3, dense.marked)),
        (dense.tree(dense.params), dense.tree(v)),
    ):
        got = hessian_product(loss)(params, batch(), of_params)
        assert off(dense.vector(got), dense.hessian @ v) < BOUND
