"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.multi_rank.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Rank processes by world size, 1 to 4; started at first use, ended with the session."""
    made = {world: Pool(world) for world in (1, 2, 3, 4)}
    yield made
    for pool in made.values():
        pool.stop()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
