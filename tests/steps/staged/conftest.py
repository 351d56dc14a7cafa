"""Fixtures for tests of pipelines."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_schedules() -> Iterator[None]:
    """What torch's schedules log of each of their steps is left out."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)
