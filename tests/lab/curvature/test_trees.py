"""Vectors as trees: sums, and directions that leave out what is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.lab.curvature.problem import Dense, abstract, everywhere, here, vector
from yafsdp_fn.lab.curvature.trees import add_, combination, directions


def sums(mesh: Any, frozen: bool) -> list[torch.Tensor]:
    params = here(mesh, frozen).params
    u, v = directions(1, params), directions(2, params)
    return [vector(tree) for tree in (u, combination([1.0, -2.0], [u, v]), add_(combination([1.0], [v]), 0.5, u))]


@pytest.mark.parametrize("frozen", [False, True])
def test_on_ranks(pools: dict[int, Pool], frozen: bool) -> None:
    u, v = (Dense(frozen).direction(seed) for seed in (1, 2))
    for where, results in everywhere(pools, sums, frozen).items():
        for got, expected in zip(results[-1], (u, u - 2.0 * v, 0.5 * u + v), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-15, atol=1e-15, msg=where)


@pytest.mark.parametrize("frozen", [False, True])
def test_directions_of_plain_trees(frozen: bool) -> None:
    marked = ya.PlainState.create(abstract(frozen), ya.optim.sgd(0.1)).params
    got = directions(1, marked)
    assert bool(got.layers.tree["up"].all())
    assert bool(ya.params.without_markers(got).embed["weight"].any()) is not frozen
