"""The pool itself: it answers, by rank, and it shows failures."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.harness.pool import Pool, Pools, RankFailed


def who(mesh: Any, add: int) -> int:
    return mesh.get_local_rank() + add


def fail_on_last(mesh: Any) -> None:
    if mesh.get_local_rank() == mesh.size() - 1:
        raise ValueError("planned")


def crash_on_last(mesh: Any) -> None:
    if mesh.get_local_rank() == mesh.size() - 1:
        os.abort()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_back_by_rank(pools: Pools, world: int) -> None:
    assert pools[world].run(who, 10) == [10 + rank for rank in range(world)]


def test_a_failure_shows_its_traceback_and_rank(pools: Pools) -> None:
    with pytest.raises(RankFailed, match=r"rank 1:[\s\S]*ValueError: planned"):
        pools[2].run(fail_on_last)
    assert pools[2].run(who, 0) == [0, 1]


def test_a_crash_shows_its_signal_and_stack() -> None:
    with pytest.raises(RankFailed, match=r"exit code -6\)[\s\S]*Aborted[\s\S]*in crash_on_last"):
        Pool(1).run(crash_on_last)
