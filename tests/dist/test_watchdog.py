"""The thread that names what does not end."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from yafsdp_fn.dist import watchdog
from yafsdp_fn.dist.watchdog import PeerStatus, Watch
from yafsdp_fn.dist.where import RankStatus


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
