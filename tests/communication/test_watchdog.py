"""The thread that names what does not end."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.stalls import until
from yafsdp_fn.communication import cuda_streams, watchdog
from yafsdp_fn.communication.cuda_streams import CudaStream
from yafsdp_fn.communication.watchdog import Steps, Watchdog


@dataclass
class Work:
    """asked: how often whether it is done"""

    done: bool = False
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done

    def looked_at(self) -> None:
        """Returns when it has been asked four times from now on, twice a look: one has begun after this call."""
        before = self.asked
        until(lambda: self.asked >= before + 4)


def watched(*work: list[tuple[Work, str]], seconds: float = 0.2) -> Any:
    """Watches work, by stream and in order, for a rank 3 on a device, whose communicators are returned."""
    ranks: Any = SimpleNamespace(world_rank=3, world=4, timeout=timedelta(seconds=seconds), steps=Steps(), said=[])
    ranks.device = SimpleNamespace(type="meta")
    ranks.abort_late = ranks.said.append
    streams: list[Any] = [CudaStream.__new__(CudaStream) for _ in work]
    for stream, each in zip(streams, work, strict=True):
        stream._pending = deque(each)
        stream._since = time.monotonic()
    ranks.under_way = lambda: [stream.doing for stream in streams if stream.doing]
    ranks.watchdog = Watchdog(dist.HashStore(), ranks)  # type: ignore[attr-defined]
    return ranks


def test_the_first_that_does_not_end_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = watched([(Work(True), "a")], [(Work(True), "b"), (Work(), "c"), (Work(), "d")])
    until(lambda: ranks.said)
    ranks.watchdog.close()
    (said,) = ranks.said
    assert said.startswith("rank 3: c has not ended after 0 s. Another rank has probably stopped")
    assert said in capsys.readouterr().err


def test_what_ends_in_time_is_not_late_however_long_it_waited_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, work = [0.0], [Work() for _ in range(6)]
    for module in (watchdog, cuda_streams):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ranks = watched([(each, str(n)) for n, each in enumerate(work)], seconds=1.0)
    for each, following in itertools.pairwise(work):  # together longer than the timeout
        each.looked_at()
        clock[0] += 0.9
        each.looked_at()
        each.done = True
        following.looked_at()
    assert not ranks.said
    clock[0] += 1.1
    until(lambda: ranks.said)
    assert "5 has not ended" in ranks.said[0]
    ranks.watchdog.close()


def test_it_ends_when_it_is_told() -> None:
    ranks = watched([(Work(), "a")], seconds=3600)
    ranks.watchdog.close()
    assert not any(thread.is_alive() for thread in ranks.watchdog._threads)
    assert not ranks.said


def test_a_rank_that_has_never_spoken_is_silent() -> None:
    ranks = watched([(Work(), "a")], seconds=3600)
    lines = ranks.watchdog.ask().splitlines()
    ranks.watchdog.close()
    assert lines[0].startswith(
        "  ranks 0-2: no sign of life: ended, or in a call that holds Python's lock; before that "
    )
    assert len(lines) == 2 and lines[1].startswith("  rank 3: waiting for a; before the first step"), lines


def test_a_wait_that_ends_while_ranks_are_read_shows_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    work = Work()
    ranks = watched([(work, "a")], seconds=3600)
    ranks.watchdog._silence, ranks.watchdog._patience = 3600.0, 0.0
    until(lambda: ranks.watchdog._store.check(["rank 0"]))  # it reads all
    work.done = True
    until(lambda: "waiting" not in ranks.watchdog._status)
    ranks.watchdog.close()
    assert capsys.readouterr().err == ""


def test_the_table_is_printed_once_between_two_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "LONGEST_S", 0.02)
    ranks = watched([(Work(), "a")], seconds=3600)
    ranks.watchdog._patience = 0.0
    store = ranks.watchdog._store
    until(lambda: store.check(["table before the first step"]))
    ranks.steps.after = "after step 0"
    until(lambda: store.check(["table after step 0"]))
    ranks.watchdog.ask()
    ranks.steps.after = "after CommunicationError in step 1"
    ranks.watchdog.ask()
    ranks.watchdog.close()
    said = capsys.readouterr().err
    assert said.count("rank 3 has waited for ") == said.count("Where ranks are:") == 2, said


def test_what_is_ended_for_another_rank_is_what_is_waited_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that looks may be late on a busy machine: its last look is of a wait that has ended since."""
    work = [(Work(), "a"), (Work(), "b")]
    with monkeypatch.context() as late:
        late.setattr(Watchdog, "_watch", Watchdog._look)  # it looks once
        late.setattr(Watchdog, "_tell", Watchdog._say)
        ranks = watched(work, seconds=2)
        until(lambda: "waiting for a; " in ranks.watchdog._status)
        ranks.watchdog.close()
    work[0][0].done = True
    ranks.watchdog._store.set(watchdog.FAILED, "rank 2, forward of head: ValueError")
    ranks.watchdog._share_failure()
    assert ranks.said == ["b: another rank has failed alone (rank 2, forward of head: ValueError)"]
