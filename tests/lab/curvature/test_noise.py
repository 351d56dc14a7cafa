"""The noise scale is what its definition gives on plain gradients, and is unbiased."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.lab.curvature.problem import BOUND, ROWS, Dense, everywhere, here, loss, off
from yafsdp_fn.lab.curvature import gradient_noise_scale


def scale(mesh: Any, frozen: bool) -> Tensor:
    params, own, _ = here(mesh, frozen)
    found = gradient_noise_scale(loss, params, own, at_once=2)
    return torch.stack([found.noise, found.signal, found.scale])


def test_against_plain_gradients(pools: dict[int, Pool]) -> None:
    examples = Dense().examples
    noise = examples.var(0).sum()  # the trace of the unbiased covariance
    signal = examples.mean(0).square().sum() - noise / ROWS
    for where, results in everywhere(pools, scale).items():
        for got in results:
            assert off(got, torch.stack([noise, signal, noise / signal])) < BOUND, where


def test_it_is_unbiased() -> None:
    """Over all batches of three out of a population of four rows, drawn with replacement."""
    rows = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5], [1.0, 1.0]]).double()
    slope = lambda p, batch: ya.Mean((batch @ p).sum(), len(batch))  # noqa: E731
    point = torch.zeros(2).double()
    batches = [rows[list(drawn)] for drawn in itertools.product(range(4), repeat=3)]
    found = [gradient_noise_scale(slope, point, batch) for batch in batches]
    assert off(torch.stack([f.noise for f in found]).mean(), rows.var(0, correction=0).sum()) < BOUND
    assert off(torch.stack([f.signal for f in found]).mean(), rows.mean(0).square().sum()) < BOUND


def test_one_example_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of one example has no noise to see"):
        gradient_noise_scale(lambda p, batch: (batch @ p).sum(), torch.zeros(2), torch.ones(1, 2))
