"""The thread that names what does not end."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from yafsdp_fn.dist.watchdog import Watch


class Work:
    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


def watched(work: dict[str, list[tuple[Work, str]]], seconds: float = 0.2) -> tuple[Watch, list[str], threading.Event]:
    said: list[str] = []
    told = threading.Event()
    watch = Watch(3, timedelta(seconds=seconds), lambda what: (said.append(what), told.set())[0])
    for stream, each in work.items():
        for end, label in each:
            watch.add(stream, end, label)
    return watch, said, told


def test_the_first_that_does_not_end_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    watch, said, told = watched(
        {"gather": [(Work(True), "a")], "reduce": [(Work(True), "b"), (Work(), "c"), (Work(), "d")]}
    )
    assert told.wait(10)
    watch.close()
    assert len(said) == 1 and said[0].startswith("rank 3: c has not ended after 0 s. Another rank has probably stopped")
    assert said[0] in capsys.readouterr().err


def test_what_ends_in_time_is_not_late_however_long_it_waited_for_its_turn() -> None:
    work = [Work() for _ in range(6)]
    watch, said, told = watched({"gather": [(each, str(n)) for n, each in enumerate(work)]}, seconds=1.0)
    for each in work:  # together longer than the timeout
        time.sleep(0.3)
        each.done = True
    assert not told.wait(0.3) and not said
    watch.close()


def test_it_ends_when_it_is_told() -> None:
    watch, said, _ = watched({"gather": [(Work(), "a")]}, seconds=3600)
    watch.close()
    assert not watch._thread.is_alive() and not said
