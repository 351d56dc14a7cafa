"""Ranks that do not come: the others say where all of them are, by a channel that works while their own hangs."""

from __future__ import annotations

import ctypes
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.failing import TX, Fault, batch, loss, loss_with, state
from tests.harness.groups import breakable, outcome
from tests.harness.pool import Pool
from yafsdp_fn.dist.communicators import communicators

SECONDS = 4.5
"""Of a collective. Tables come after half of it, and some beats of 0.2 s."""

PAUSE = 3.4
LAST = 2  # the rank that does not come


def in_python() -> None:
    time.sleep(PAUSE)


def with_the_lock() -> None:
    ctypes.PyDLL(None).usleep(int(PAUSE * 1e6))


PAUSES: dict[str, Callable[[], None]] = {"python": in_python, "lock": with_the_lock}


class Ranks:
    """The same state and steps on each rank, and what it prints."""

    def __init__(self) -> None:
        self.mesh = breakable(SECONDS)
        self.rank = self.mesh.get_local_rank()
        self.fault, self.error = Fault(), io.StringIO()
        self.step = ya.train_step(loss_with(self.fault), TX)
        self.other = ya.train_step(loss, TX, schedule=ya.schedules.zero2())
        self.now = state(self.mesh)

    def take(self, step: Any, times: int = 1) -> None:
        for _ in range(times):
            self.now, _ = step(self.now, batch(self.rank))

    def heard(self, work: Callable[[], Any]) -> str:
        """What is printed meanwhile."""
        sys.stderr, before = io.StringIO(), sys.stderr
        try:
            work()
            return sys.stderr.getvalue()  # type: ignore[attr-defined,no-any-return]
        finally:
            sys.stderr = before


def pauses(mesh: Any) -> dict[str, str]:
    """The last rank pauses in a block, in two ways, and between two steps. What each rank has printed, by pause."""
    ranks = Ranks()
    ranks.take(ranks.step, 3)
    found = {}
    for name, pause in PAUSES.items():
        ranks.fault.arm(None)
        if ranks.rank == LAST:
            ranks.fault.event = paused(pause)  # type: ignore[method-assign]
        found[name] = ranks.heard(lambda: ranks.take(ranks.step))
        ranks.fault.event = lambda what: None  # type: ignore[method-assign]

    def late() -> None:
        if ranks.rank == LAST:
            in_python()
        ranks.take(ranks.step)
        time.sleep(0.5)  # beats, of those who say that they go on

    found["behind"] = ranks.heard(late)
    return {**found, "cost": str(cost(communicators(ranks.mesh).watchdog))}


def cost(lookout: Any) -> float:
    """Seconds that its thread has computed for each second at one look a second; 0 where the system does not tell."""
    told = Path(f"/proc/self/task/{lookout._thread.native_id}/schedstat")
    return int(told.read_text().split()[0]) / 1e9 / lookout._post.beat if told.exists() else 0.0


def paused(pause: Callable[[], None]) -> Callable[[str], None]:
    left = [pause]

    def event(what: str) -> None:
        if what == "forward layer" and left:
            left.pop()()

    return event


def other_program(mesh: Any) -> tuple[str, str]:
    """From the third step on the last rank takes the steps of another function, that all have used before."""
    ranks = Ranks()
    ranks.take(ranks.step, 2)
    ranks.take(ranks.other, 2)
    mine = ranks.other if ranks.rank == LAST else ranks.step
    seen: list[str] = []
    printed = ranks.heard(lambda: seen.append(outcome(lambda: ranks.take(mine, 30))))
    return printed, seen[0]


def killed(mesh: Any) -> str:
    ranks = Ranks()
    ranks.take(ranks.step, 2)
    time.sleep(0.7)  # two beats: it is seen where it is
    if ranks.rank == LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: ranks.take(ranks.step))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool(3)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def printed(pool: Pool) -> list[dict[str, str]]:
    found: list[dict[str, str]] = pool.run(pauses)
    return found


def test_a_rank_that_is_stuck_in_python_says_its_op_and_line(printed: list[dict[str, str]]) -> None:
    text = printed[0]["python"]
    assert re.match(r"rank 0 has waited for \d+ s. Where ranks are:\n", text), text
    assert "  rank 2: op" in text and "forward of layers[0] (visit 1, microbatch 0, step 3)" in text, text
    assert re.search(r"; test_stuck.py:\d+ in in_python\n  Look at rank 2: it waits for no other.\n", text), text
    assert "rank 0 waits for" in text or "ranks 0-1: wait for" in text, text


def test_it_costs_nothing(printed: list[dict[str, str]]) -> None:
    """Tables, and beats of ranks that wait, included."""
    for of_rank in printed:
        assert float(of_rank["cost"]) < 0.005, of_rank["cost"]


def test_one_rank_prints_it(printed: list[dict[str, str]]) -> None:
    for name in ("python", "lock", "behind"):
        assert [text[name].count("Where ranks are") for text in printed] == [1, 0, 0], printed


def test_a_rank_that_holds_the_lock_is_told_by_its_silence(printed: list[dict[str, str]]) -> None:
    text = printed[0]["lock"]
    assert re.search(
        r"  rank 2: no sign of life for [\d-]+ s: ended, or in a call that holds Python's lock; before", text
    )
    assert "  Look at rank 2 first.\n" in text, text


def test_a_rank_that_is_behind_says_after_which_step_and_others_go_on(printed: list[dict[str, str]]) -> None:
    text = printed[0]["behind"]
    assert re.search(
        r"  ranks 0-1: wait for gather of embed \(step 5\), [\d-]+ s; op \d+ of \d+, forward of embed", text
    )
    assert re.search(r"  rank 2: after step 4, [\d-]+ s; test_stuck.py:\d+ in in_python\n  Look at rank 2: it", text), (
        text
    )
    assert text.endswith("rank 0 goes on.\n"), text


def test_a_rank_that_runs_another_program(pool: Pool) -> None:
    every = pool.run(other_program)
    assert [printed.count("Where ranks are") for printed, _ in every] == [1, 0, 0]
    for rank, (_, text) in enumerate(every):
        assert f"CommunicationError: rank {rank}: " in text
        assert "All wait, for each other: their programs" in text
        assert "  ranks 0-1 and rank 2 run other programs." in text, text
        assert text.count("Where ranks are:") == 1 and every[0][0].splitlines()[1].partition(",")[0] in text


def test_a_rank_that_has_died_is_told_by_its_silence_in_the_error(pool: Pool) -> None:
    for rank, (ok, text) in enumerate(pool._call(killed, (), 60)):
        if rank == LAST:
            assert not ok and "EOFError" in text
        else:
            assert ok and f"CommunicationError: rank {rank}: " in text
            assert re.search(r"  rank 2: no sign of life for [\d-]+ s: .* before that: after step 1, ", text), text
            assert "  Look at rank 2 first." in text


def test_there_is_none_where_there_is_one_rank() -> None:
    assert communicators(ya.mesh(device="cpu")).watchdog is None
