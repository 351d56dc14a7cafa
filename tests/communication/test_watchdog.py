"""The thread that names what does not end."""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.stalls import until
from yafsdp_fn.communication import watchdog
from yafsdp_fn.communication.cuda_streams import CudaStream
from yafsdp_fn.communication.watchdog import PeerStatus, Steps, Watchdog
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


class Store(dict[str, str]):
    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def compare_set(self, key: str, expected: str, value: str) -> str:
        return self.setdefault(key, value) if expected == "" else self[key]

    def add(self, key: str, number: int) -> int:
        self[key] = str(int(self.get(key, "0")) + number)
        return int(self[key])


class Ranks:
    """The communicators of rank 3 on a device, as far as a watchdog looks at them. work: by stream, in order"""

    device = SimpleNamespace(type="cuda")
    world_rank, world = 3, 4
    lost = None

    def __init__(self, work: dict[str, list[tuple[Work, str]]], seconds: float) -> None:
        self.timeout, self.steps = timedelta(seconds=seconds), Steps()
        self.streams = [CudaStream.__new__(CudaStream) for _ in work]
        for stream, each in zip(self.streams, work.values(), strict=True):
            stream._pending = deque((end, (label,)) for end, label in each)  # type: ignore[misc]
        self.said: list[str] = []
        self.told = threading.Event()

    def under_way(self) -> list[tuple[str]]:
        return [stream.doing for stream in self.streams if stream.doing is not None]

    def abort_late(self, what: str) -> None:
        self.said.append(what)
        self.told.set()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setattr(watchdog, "begin_thread", lambda device: None)
    with ExitStack() as stack:

        def begin(work: dict[str, list[tuple[Work, str]]], seconds: float = 0.2) -> Ranks:
            ranks = Ranks(work, seconds)
            stack.callback(Watchdog(Store(), ranks).close)  # type: ignore[arg-type]
            return ranks

        yield begin


def test_the_first_that_does_not_end_is_named(watched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = watched({"gather": [(Work(True), "a")], "reduce": [(Work(True), "b"), (Work(), "c"), (Work(), "d")]})
    assert ranks.told.wait(60)
    (said,) = ranks.said
    assert said.startswith("rank 3: c has not ended after 0 s. Another rank has probably stopped")
    assert said in capsys.readouterr().err


def test_what_ends_in_time_is_not_late_however_long_it_waited_for_its_turn(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, work = [0.0], [Work() for _ in range(6)]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ranks = watched({"gather": [(each, str(n)) for n, each in enumerate(work)]}, seconds=1.0)
    for each, following in itertools.pairwise(work):  # together longer than the timeout
        each.looked_at(4)  # twice a look
        clock[0] += 0.9
        each.looked_at(4)
        each.done = True
        following.looked_at(4)
    assert not ranks.told.is_set() and not ranks.said
    clock[0] += 1.1
    assert ranks.told.wait(60) and "5 has not ended" in ranks.said[0]


def test_it_ends_when_it_is_told(watched: Any) -> None:
    ranks = watched({"gather": [(Work(), "a")]}, seconds=3600)
    found = Watchdog(Store(), ranks)
    found.close()
    assert not any(thread.is_alive() for thread in found._threads) and not ranks.said


def test_a_rank_that_has_never_spoken_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = Store({"rank 0": json.dumps(RankStatus(5, "after step 1", 3.0))})
    peers = PeerStatus(store, world=2, beat=1.0)
    now[0] = 1.0
    assert peers.read() == ""  # who is silent is not known yet
    now[0] = 10.0
    store["rank 0"] = json.dumps(RankStatus(14, "after step 1", 12.0))
    text = peers.read()
    assert "rank 0: after step 1, 12 s\n" in text and "rank 1: no sign of life for 10 s: ended, or in a call" in text
    assert text.endswith("Look at rank 1 first.")
