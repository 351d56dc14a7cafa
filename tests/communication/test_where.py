"""Where ranks are, in words."""

from __future__ import annotations

import re
import threading

import pytest

from yafsdp_fn.communication.where import RankStatus, collective, line, named, table

GATHER = RankStatus(9, "op 3 of 9, forward of b (step 1)", 31.2, waits="gather of b (step 1)", waited=31.0, program="p")


@pytest.mark.parametrize(
    "ranks, text",
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([0, 2, 4, 5], "ranks 0, 2, 4-5")],
)
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert named(ranks) == text


def test_what_is_alike_is_said_once_and_who_waits_for_nobody_is_named() -> None:
    busy = RankStatus(7, "op 1 of 9, forward of a (step 1)", 33.4, program="p", line="model.py:41 in block")
    posts = {0: GATHER, 1: GATHER._replace(beat=5, waited=29.0), 2: busy, 3: GATHER}
    assert table(posts, {}).splitlines() == [
        "  ranks 0-1, 3: wait for gather of b (step 1), 29-31 s; op 3 of 9, forward of b (step 1)",
        "  rank 2: op 1 of 9, forward of a (step 1), 33 s; model.py:41 in block",
        "  Look at rank 2: it waits for no other.",
    ]


def test_who_is_silent_is_looked_at_first() -> None:
    lines = table({0: GATHER, 1: GATHER._replace(waits=""), 2: GATHER}, {2: 12.0}).splitlines()
    assert lines[2].startswith("  rank 2: no sign of life for 12 s: ended, or in a call that holds Python's lock; ")
    assert lines[2].endswith("before that: waits for gather of b (step 1), 31 s; op 3 of 9, forward of b (step 1)")
    assert lines[3] == "  Look at rank 2 first."


def test_ranks_with_other_programs_are_named() -> None:
    posts = {0: GATHER, 1: GATHER, 2: GATHER._replace(program="q"), 3: GATHER._replace(program="")}
    *_, advice, differ = table(posts, {}).splitlines()
    assert advice.startswith("  All wait, for each other")
    assert differ == "  ranks 0-1 and rank 2 run other programs."


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
    found = {line(working) for _ in range(300)}
    here = re.compile(r"test_where\.py:\d+ in (works|deeper|<genexpr>)")
    assert all(here.fullmatch(each) or not each for each in found), found
    assert re.fullmatch(r"test_where\.py:\d+ in waits", line(waiting)) and collective(waiting) is None
    ended.set()
    for thread in threads:
        thread.join()
    assert line(waiting) == ""
