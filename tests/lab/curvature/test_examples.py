"""Norms of examples' gradients are those of plain gradients, one example at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.lab.curvature.problem import BOUND, ROWS, Dense, batch, everywhere, here, loss, off
from yafsdp_fn.lab.curvature import example_gradient_norms
from yafsdp_fn.lab.curvature.examples import of_examples


def norms(mesh: Any, frozen: bool) -> Tensor:
    """One after the other, or three and then what is left."""
    params, own, _ = here(mesh, frozen)
    return example_gradient_norms(loss, params, own, at_once=1 if frozen else 3)


@pytest.mark.parametrize("frozen", [False, True])
def test_against_plain_gradients(pools: dict[int, Pool], frozen: bool) -> None:
    dense = Dense(frozen)
    for where, results in everywhere(pools, norms, frozen).items():
        got = torch.cat(results)  # each rank has its own examples'
        assert off(got, dense.examples.norm(dim=1)) < BOUND, where


def test_the_gradient_is_the_mean_of_examples() -> None:
    dense = Dense()
    assert off(dense.examples.mean(0), dense.gradient(batch())) < BOUND
    totals, weights = of_examples(loss, dense.marked, batch())
    total, weight = loss(dense.marked, batch())
    assert off(totals.sum(), total) < BOUND and float(weights.sum()) == float(weight) == 3 * ROWS - 4


def test_an_example_that_counts_nothing() -> None:
    given = batch()
    given["targets"][1] = -1
    dense = Dense()
    got = example_gradient_norms(loss, dense.marked, given)
    assert float(got[1]) == 0.0 and bool((got[[0, 2, 3]] > 0).all())


def uneven(mesh: Any) -> None:
    params, own, _ = here(mesh)
    rows = 1 + mesh.get_rank()
    example_gradient_norms(loss, params, {key: value[:rows] for key, value in own.items()})


def test_different_numbers_of_rows_are_refused(pools: dict[int, Pool]) -> None:
    for error in pools[2].errors(uneven):
        assert "RanksDisagree: ranks disagree on example_gradient_norms; rows of the batch" in error


def test_random_losses_are_refused() -> None:
    noisy = lambda p, batch: torch.nn.functional.dropout(ya.apply(lambda w: w["weight"], p.embed)).sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="random operation while in randomness error mode"):
        example_gradient_norms(noisy, Dense().marked, batch())
