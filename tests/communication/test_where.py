"""Where ranks are, in words."""

from __future__ import annotations

import re
import threading

import pytest

from yafsdp_fn.communication.where import named, standing, table


@pytest.mark.parametrize(
    "ranks, text",
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([0, 2, 4, 5], "ranks 0, 2, 4-5")],
)
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert named(ranks) == text


def test_the_silent_come_first_then_who_waits_for_nobody_and_what_is_alike_is_said_once() -> None:
    waiting = "waiting for gather of b; forward of b (step 1), op 3 of 9 of program 3f2a91c0; model.py:9 in loss"
    busy = "forward of a (step 1), op 1 of 9 of program 3f2a91c0; model.py:41 in block"
    assert table([waiting, waiting, busy, waiting, waiting], [4]).splitlines() == [
        f"  rank 4: no sign of life: ended, or in a call that holds Python's lock; before that {waiting}",
        f"  rank 2: {busy}",
        f"  ranks 0-1, 3: {waiting}",
    ]


def test_the_line_of_a_thread_that_runs_meanwhile() -> None:
    """Frames were walked one by one: under load a rank ended with a segmentation fault."""
    begun, ended = threading.Event(), threading.Event()

    def deeper(depth: int) -> int:
        return sum(deeper(depth - 1) for _ in range(2)) if depth else 0

    def works() -> None:
        begun.set()
        while not ended.is_set():
            deeper(6)

    def waits() -> None:
        ended.wait()

    threads = [threading.Thread(target=function, daemon=True) for function in (works, waits)]
    for thread in threads:
        thread.start()
    begun.wait()
    working, waiting = (thread.ident or 0 for thread in threads)
    found = {standing(working)[0] for _ in range(300)}
    here = re.compile(r"test_where\.py:\d+ in (works|deeper|<genexpr>)")
    assert all(here.fullmatch(each) or not each for each in found), found
    line, communicates = standing(waiting)
    assert re.fullmatch(r"test_where\.py:\d+ in waits", line)
    assert not communicates
    ended.set()
    for thread in threads:
        thread.join()
    assert standing(waiting) == ("", False)
