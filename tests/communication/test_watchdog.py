"""The thread that names what does not end."""

from __future__ import annotations

import itertools
import json
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

from tests.harness.stalls import until
from yafsdp_fn.communication import watchdog
from yafsdp_fn.communication.watchdog import PeerStatus, WorkWatch
from yafsdp_fn.communication.where import RankStatus


class Work:
    """asked: how often whether it is done"""

    def __init__(self, done: bool = False) -> None:
        self.done, self.asked = done, 0

    def query(self) -> bool:
        self.asked += 1
        return self.done

    def looked_at(self, times: int) -> None:
        """Returns when it has been asked so often from now on: twice, for a look that has begun after this call."""
        before = self.asked
        until(lambda: self.asked >= before + times)


def watched(
    work: dict[str, list[tuple[Work, str]]], seconds: float = 0.2
) -> tuple[WorkWatch, list[str], threading.Event]:
    said: list[str] = []
    told = threading.Event()
    watch = WorkWatch(3, timedelta(seconds=seconds), lambda what: (said.append(what), told.set())[0])
    for stream, each in work.items():
        for end, label in each:
            watch.add(stream, end, label)
    return watch, said, told


def test_the_first_that_does_not_end_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    watch, said, told = watched(
        {"gather": [(Work(True), "a")], "reduce": [(Work(True), "b"), (Work(), "c"), (Work(), "d")]}
    )
    assert told.wait(60)
    watch.close()
    assert len(said) == 1 and said[0].startswith("rank 3: c has not ended after 0 s. Another rank has probably stopped")
    assert said[0] in capsys.readouterr().err


def test_what_ends_in_time_is_not_late_however_long_it_waited_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, work = [0.0], [Work() for _ in range(6)]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch, said, told = watched({"gather": [(each, str(n)) for n, each in enumerate(work)]}, seconds=1.0)
    for each, following in itertools.pairwise(work):  # together longer than the timeout
        clock[0] += 0.9
        each.looked_at(2)
        each.done = True
        following.looked_at(1)
    assert not told.is_set() and not said
    clock[0] += 1.1
    assert told.wait(60) and "5 has not ended" in said[0]
    watch.close()


def test_it_ends_when_it_is_told() -> None:
    watch, said, _ = watched({"gather": [(Work(), "a")]}, seconds=3600)
    watch.close()
    assert not watch._thread.is_alive() and not said


class Store(dict[str, str]):
    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_a_rank_that_has_never_spoken_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = Store({"rank 0": json.dumps(RankStatus(5, "after step 1", 3.0))})
    peers = PeerStatus(store, world=2, beat=1.0)
    now[0] = 1.0
    assert peers.read(False) == ""  # who is silent is not known yet
    now[0] = 10.0
    store["rank 0"] = json.dumps(RankStatus(14, "after step 1", 12.0))
    text = peers.read(False)
    assert "rank 0: after step 1, 12 s\n" in text and "rank 1: no sign of life for 10 s: ended, or in a call" in text
    assert text.endswith("Look at rank 1 first.")
