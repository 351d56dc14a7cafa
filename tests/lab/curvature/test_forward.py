"""A forward gradient is the slope along its direction, times the direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.pool import Pool
from tests.lab.curvature.problem import BOUND, Dense, batch, everywhere, here, loss, off, vector
from tests.steps.test_collectives import recorded
from yafsdp_fn.lab.curvature import forward_gradient


def estimate(mesh: Any, frozen: bool) -> tuple[Tensor, Tensor, set[str]]:
    params, own, _ = here(mesh, frozen)
    with recorded() as calls:
        value, gradient = forward_gradient(loss)(params, own, 7)
    return value, vector(gradient), {call.kind for call in calls}


@pytest.mark.parametrize("frozen", [False, True])
def test_against_the_gradient(pools: dict[int, Pool], frozen: bool) -> None:
    dense = Dense(frozen)
    v = dense.direction(7)
    expected = dense.gradient(batch()).dot(v) * v
    for where, results in everywhere(pools, estimate, frozen).items():
        for value, gradient, kinds in results:
            assert off(value, dense.objective(dense.params, batch())) < BOUND, where
            assert off(gradient, expected) < BOUND, where
            assert kinds <= {"gather"}, where


def test_its_mean_is_the_gradient() -> None:
    """Of n seeds it is off by |gradient| sqrt((parameters + 1) / n), give or take."""
    dense, seeds = Dense(), 2000
    gradient = dense.gradient(batch())
    v = torch.stack([dense.direction(seed) for seed in range(seeds)])
    mean = ((v @ gradient)[:, None] * v).mean(0)
    expected = ((len(gradient) + 1) / seeds) ** 0.5
    assert 0.7 * expected < off(mean, gradient) < 1.3 * expected
