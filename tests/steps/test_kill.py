"""A rank that is killed in the middle of a step: the others end soon, with an error that names the op."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

from tests.harness.failing import Fault, Steps, loss_with, state
from tests.harness.groups import TIMEOUT, breakable
from tests.harness.pool import Pool

FIRST = r"forward of layers\[1\] \(visit 2, microbatch 0, step 0\)"
LATER = r"(reduce of \S+|gather of layers\[0\]) \(step 2\)"


def killed(mesh: Any, steps: int, at: int) -> tuple[list[str], float]:
    """The last rank of `mesh` ends at event `at` of the step after `steps`. What others see, twice, and how soon."""
    fault = Fault()
    ranks = Steps(loss_with(fault), steps, mesh)
    fault.before = lambda: os.kill(os.getpid(), signal.SIGKILL)
    fault.arm(at if mesh.get_local_rank() == mesh.size() - 1 else None)
    start = time.monotonic()
    seen = [ranks.said() for _ in range(2)]
    return seen, time.monotonic() - start


def two_after_another(mesh: Any) -> dict[str, tuple[list[str], float]]:
    """Rank 2 is killed in a first step; then rank 1, in a program that it runs with rank 0."""
    meshes = breakable(), breakable(ranks=mesh.size() - 1)
    for each in filter(None, meshes):  # their communicators are made before any rank ends
        state(each)
    return {FIRST: killed(meshes[0], 0, 1), LATER: killed(meshes[1], 2, 6)}


def test_the_others_end_with_an_error_that_names_the_op() -> None:
    pool = Pool(3)
    try:
        (ok, seen), *dead = pool._call(two_after_another, (), 60)
    finally:
        pool.stop()
    assert ok, seen
    assert all("EOFError" in str(value) for _, value in dead)
    for op, ((first, again), seconds) in seen.items():
        assert re.search(rf"CommunicationError: rank 0: {op}", first), first
        assert "Another rank has probably stopped" in first
        assert "restart all" in first
        assert re.search(r"rank 0: .* lost since .*; restart all ranks", again), again
        assert seconds < 3 * TIMEOUT + 5
