"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.multi_rank.pool import Pool

MANY_THREADS = 150
"""In one rank process; a mesh with its groups takes some 40."""


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Rank processes by world size, 1 to 4; started at first use, ended with the session."""
    made = {world: Pool(world) for world in (1, 2, 3, 4)}
    yield made
    for pool in made.values():
        pool.stop()


@pytest.fixture(autouse=True, scope="module")
def few_threads(pools: dict[int, Pool]) -> Iterator[None]:
    """Groups of meshes that tests have made stay, and gloo's idle threads poll: processes with many begin afresh."""
    yield
    for pool in pools.values():
        if pool.threads() > MANY_THREADS:
            pool.stop()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
