"""Python's collector in a run: at steps of its own choice it would let every other rank wait."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.train.inside import Runs, inside


def collections(mesh: Any, argv: tuple[str, ...]) -> tuple[str, list[int], set[bool], bool]:
    """The error of a run, the steps after which all garbage was collected, whether the collector was on, and is."""
    steps, after, on = [0], list[int](), set[bool]()

    def begins(times: int, reader: object) -> None:
        steps[0] = times
        on.add(gc.isenabled())

    def collects(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2:
            after.append(steps[0])

    gc.callbacks.append(collects)
    try:
        found = inside(mesh, argv, begins)
    finally:
        gc.callbacks.remove(collects)
    return found.error, [step for step in after if 0 < step < 12], on, gc.isenabled()


@pytest.mark.parametrize(("every", "expected", "on"), [(5, [5, 10], {False}), (0, None, {True})])
def test_garbage_is_collected_after_the_same_steps_on_all_ranks(
    runs: Runs, every: int, expected: list[int] | None, on: set[bool]
) -> None:
    for error, after, was, now in runs(2, "--gc-every", str(every), by=collections):
        assert not error
        assert was == on
        assert now
        assert expected is None or after == expected
