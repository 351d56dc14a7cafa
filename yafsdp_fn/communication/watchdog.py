"""The watchdog: peers' status over a side channel, and a thread that names and ends a collective which hangs."""

import atexit
import dataclasses
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from yafsdp_fn.communication import where
from yafsdp_fn.communication.cuda_streams import begin_thread
from yafsdp_fn.communication.store import disconnect_store
from yafsdp_fn.communication.streams import ADVICE
from yafsdp_fn.communication.where import RankStatus, table

CPU = torch.device("cpu")

# ---- Reads the status of all ranks from the store, and finds the silent ones. Used only while this rank waits.

SILENCE_BEATS, SILENCE_S = 4, 0.8
"""A rank without a new status for so many beats, but at least so many seconds (busy machines are late), is silent."""

READS = 64
"""Ranks read in a beat; in a larger world a waiting rank reads less often."""

ENDS = -1
"""The beat in the last status of a rank that has ended normally."""


class PeerStatus:
    """The status of all ranks, as one rank reads it from the store from some time on.

    store: has the status of rank 3 at `rank 3`
    posts: the last status by rank; silent: seconds without a new one, for ranks that are silent
    """

    def __init__(self, store: Any, world: int, beat: float) -> None:
        self._store = store
        self._period = beat * max(1.0, world / READS)
        self._patience = max(SILENCE_S, SILENCE_BEATS * beat, 1.5 * self._period)
        self._since = time.monotonic()
        self._read_at = 0.0
        self.posts = dict.fromkeys(range(world), RankStatus(0, "has said nothing yet", 0.0))
        self._heard_at = dict.fromkeys(self.posts, self._since)
        self.silent: dict[int, float] = {}

    def read(self, now_or_never: bool) -> str:
        """Reads the store and returns the table; "" while it is not known yet, or unchanged. Passes on the store's
        RuntimeError."""
        now = time.monotonic()
        if now - self._read_at < 0.9 * self._period and not now_or_never:
            return ""
        self._read_at = now
        self.silent = {}
        for rank in self.posts:
            key = f"rank {rank}"
            if self._store.check([key]):  # it would wait for a missing one
                post = RankStatus(*json.loads(self._store.get(key)))
                if post.beat != self.posts[rank].beat:
                    self.posts[rank], self._heard_at[rank] = post, now
            age = now - self._heard_at[rank]
            if age > self._patience and self.posts[rank].beat != ENDS:
                self.silent[rank] = age
        if not now_or_never and now - self._since <= self._patience:
            return ""  # who is silent is not known yet
        return table(self.posts, self.silent)


# ---- A watchdog on every rank: when one rank waits for long, it reports the positions of all.
#
#     thread of each rank, once a second:     store["rank 3"] = its position and since when
#     after too long a wait:                  the status of all ranks is read, grouped and shown (where.py)
#
# It is a side channel: the store is that of the process group's rendezvous, over a connection of its own, and no
# collective is used. A step only keeps its position in attributes. So a rank that waits in C++ or in Python is
# located. One that has ended, or is in a call that holds Python's lock, is known by its silence, and shown where it
# was last seen.

BEATS, LONGEST_S = 20, 1.0
"""Status writes in one timeout, and the longest pause between two, in seconds."""

STALL = 4
"""Beats without progress after which a rank adds detail to its status, and reads that of the others."""

PATIENCE = timedelta(seconds=10)
"""The time limit for the store's answers."""

KEEPER_ENDED = "the keeper of the store has ended"

PendingLabels = list[tuple[str]]
"""Labels of the communication under way, each in a tuple made for this one call, so that calls are told apart."""


class RankPosition(NamedTuple):
    """A rank's position: `where` in words, a new object for each visit of it; the number of its op in its
    stage's program, a `Program`."""

    where: str
    number: int = -1
    program: Any = None
    stage: int = 0


@dataclasses.dataclass(slots=True)
class Steps:
    """The running steps of a rank, left for the watchdog by the thread that steps. looks: one per step, the innermost
    last; lost: why the communicators can no longer be used, if so"""

    looks: list[Callable[[], RankPosition]] = dataclasses.field(default_factory=list)
    after: str = "before the first step"
    failed: bool = False
    lost: str | None = None
    thread: int = threading.main_thread().ident or 0


class Watchdog:
    """The watchdog of one rank of a mesh. under_way: lists its communication, of communicators that may be gone

    table: the last one read, empty before
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout: timedelta,
        steps: Steps,
        under_way: weakref.WeakMethod[Callable[[], PendingLabels]],
        device: torch.device = CPU,
    ) -> None:
        seconds = timeout.total_seconds()
        self._store = store
        self._rank = rank
        self._world = world
        self._under_way = under_way
        self._beat = min(LONGEST_S, seconds / BEATS)
        self._patience = seconds / 2
        self._steps = steps
        self._device = device
        self._position = RankPosition(steps.after)
        self._since = time.monotonic()
        self._waits: list[tuple[tuple[str], float]] = []
        self._post = RankStatus(0, steps.after, 0.0)
        self._peers: PeerStatus | None = None
        self._shown: str | None = None  # its position when it showed the table
        self.table = ""
        self._made_at = float("-inf")
        self._asked = False
        self._turned = time.monotonic()  # since then the thread waits for a beat, or for the store
        self._keeps_store = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="yafsdp-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    # ---- for the thread that steps

    def ask(self) -> str:
        """Returns the table, after a failure. If the last one is old, it takes some beats to find out who is silent."""
        begun = time.monotonic()
        recent = begun - STALL * self._beat
        until = begun + 4 * STALL * self._beat + 5
        self._asked = True
        while self._made_at < recent and self._thread.is_alive():
            if self._stuck or time.monotonic() > until:
                silent = time.monotonic() - self._turned
                return self._alone(f"does not answer for {silent:.0f} s", "is probably frozen")
            time.sleep(self._beat / STALL)
        self._asked = False
        return self.table

    def close(self) -> None:
        """Ends the thread, unless it waits for a store whose server has frozen: nothing ends that wait."""
        atexit.unregister(self._exit)
        self._closed.set()
        if threading.current_thread() is not self._thread:  # the collector may run there
            self._thread.join(LONGEST_S if self._stuck else PATIENCE.total_seconds())

    @property
    def _stuck(self) -> bool:
        """True if the store does not answer the thread, as far as can be told."""
        return self._thread.is_alive() and time.monotonic() - self._turned > PATIENCE.total_seconds()

    def _exit(self) -> None:
        """Runs when the process ends. The store's server waits for the others to notice: torch warns at length of a
        connection that ends."""
        self.close()
        if self._thread.is_alive():  # threads of torch's may wait for the store, too, and this process for them
            disconnect_store()
            self._thread.join(LONGEST_S)
        if self._keeps_store:
            with suppress(RuntimeError):  # the store has gone before
                self._store.set(KEEPER_ENDED, "")
                until = time.monotonic() + 1.5 * self._beat
                while time.monotonic() < until and self._store.add("left", 0) < self._world:
                    time.sleep(self._beat / 50)

    # ---- the thread

    def _run(self) -> None:
        begin_thread(self._device)  # Python's collector may free tensors here
        try:
            last = False
            while not last and not self._closed.wait(self._beat) and self._look():
                self._turned = time.monotonic()
                last = self._store.check([KEEPER_ENDED])
                self._say(self._post)
                if self._asked or self._is_stalled(self._post.waited):
                    self._read_status(last)
                elif self._peers is not None:
                    self._over()
            self._say(RankStatus(ENDS, f"has ended, {self._post.where}", self._post.seconds))
            self._store.add("left", 1)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self.table = self._alone("cannot be reached", f"has probably ended ({why})")
            self._made_at = float("inf")

    def _alone(self, store: str, keeper: str) -> str:
        """Describes this rank's position, and the trouble with the store and its server."""
        own = table({self._rank: self._status(self._position, time.monotonic())}, {})
        return (
            f"  where others are is not known: the store of the process group {store}; the process that keeps it, "
            f"often that of rank 0, {keeper}\n{own}"
        )

    def _look(self) -> bool:
        """Records this rank's position and status. Returns False when the communicators are gone."""
        method = self._under_way()
        if method is None:
            return False
        labels = method()
        now = time.monotonic()
        before = self._position
        position = RankPosition(self._steps.after)
        for look in self._steps.looks[-1:]:
            position = look()
        if before.where is not position.where or before.number != position.number:
            self._since = now
        name = where.collective(self._steps.thread)
        if name is not None:
            labels.append(next((label for label, _ in self._waits if label == (name,)), (name,)))
        old = {id(label): since for label, since in self._waits}
        self._waits = [(label, old.get(id(label), now)) for label in labels]
        self._position, self._post = position, self._status(position, now)
        return True

    def _status(self, position: RankPosition, now: float) -> RankStatus:
        """Describes the position. A rank that stands still says its op and line, too."""
        seconds = now - self._since
        waits = ", ".join(label for (label,), _ in self._waits)
        waited = 0.0
        if self._waits:
            waited = now - min(since for _, since in self._waits)
        shown = self._shown is not None
        found = RankStatus(self._post.beat + 1, position.where, seconds, waits, waited, shown=shown)
        if not self._is_stalled(seconds) and not self._is_stalled(waited):
            return found
        found = found._replace(line=where.line(self._steps.thread))
        if position.program is None:
            return found
        op = f"op {position.number} of {len(position.program.stages[position.stage])}"
        return found._replace(op=op, program=position.program.fingerprint())

    def _is_stalled(self, seconds: float) -> bool:
        return seconds > STALL * self._beat

    def _say(self, post: RankStatus) -> None:
        self._store.set(f"rank {self._rank}", json.dumps(post))

    def _read_status(self, last: bool) -> None:
        """Reads the status of the others. last: it is the last chance"""
        self._peers = self._peers or PeerStatus(self._store, self._world, self._beat)
        found = self._peers.read(last)
        if found:
            self.table = found
            self._show(self._peers)
            self._made_at = time.monotonic()

    def _show(self, peers: PeerStatus) -> None:
        """Prints the table once per stall, on one rank: the lowest of those that wait, as soon as it has for too long,
        or one that was too late before that one had stalled."""
        able = {rank: post for rank, post in peers.posts.items() if rank not in peers.silent}
        lowest = min((rank for rank, post in able.items() if self._is_stalled(post.waited)), default=None)
        waited = self._post.waited
        if waited > self._patience and self._rank == lowest and not any(post.shown for post in able.values()):
            self._shown = self._post.where
            what = f"rank {self._rank} has waited for {waited:.0f} s. Where ranks are:\n{self.table}"
            print(what, file=sys.stderr, flush=True)

    def _over(self) -> None:
        """Ends the report: the communication that it waited for has come, or failed."""
        if self._shown is not None and self._post.where is not self._shown and not self._steps.failed:
            print(f"rank {self._rank} goes on.", file=sys.stderr, flush=True)
        self._peers = None
        self._shown = None


# ---- A watchdog thread on CUDA: names the collective that does not end, and aborts it.
#
# On CUDA no host waits for a collective: a rank whose peer has died keeps issuing until it wants a value. NCCL's own
# watchdog ends the process after its timeout, and knows neither op nor unit. This one looks a little sooner, reports
# what has not ended, and has the communicators aborted. Waits for them then return, with meaningless values, and the
# next `Communicators.check` raises.
#
# torch stops NCCL's watchdog of a group before it aborts the group. A look that has begun already, or a peer's, may
# take the abort for an error and end its process: what hangs, and where ranks are, is printed by then.

LOOKS, LONGEST_LOOK_S = 20, 1.0
"""Looks in one timeout, and the longest pause in seconds: ended work is kept until then, hundreds of events a step."""


class Ending(Protocol):
    def query(self) -> bool: ...


@dataclasses.dataclass(slots=True)
class _Pending:
    end: Ending
    label: tuple[str]
    since: float


class WorkWatch:
    """The watchdog of one rank. late: called once, with a text, when work lasts longer than `timeout`; then the watch
    ends"""

    def __init__(self, rank: int, timeout: timedelta, late: Callable[[str], None], device: torch.device = CPU) -> None:
        self._rank = rank
        self._seconds = timeout.total_seconds()
        self._late = late
        self._device = device
        self._pending: dict[str, deque[_Pending]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="yafsdp-watch", daemon=True)
        self._thread.start()

    def add(self, stream: str, end: Ending, label: str) -> None:
        """Watches work called `label`, after which `end` is recorded, the last one of its stream so far."""
        self._pending.setdefault(stream, deque()).append(_Pending(end, (label,), time.monotonic()))

    def under_way(self) -> list[tuple[str]]:
        """Lists each stream's current work, as of the last look: see `Watchdog`."""
        return [first.label for pending in list(self._pending.values()) for first in list(pending)[:1]]

    def close(self) -> None:
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        begin_thread(self._device)
        while not self._closed.wait(min(self._seconds / LOOKS, LONGEST_LOOK_S)):
            for pending in list(self._pending.values()):
                ended = time.monotonic()
                while pending and pending[0].end.query():
                    pending.popleft()
                    if pending:  # it cannot have begun before
                        pending[0].since = max(pending[0].since, ended)
                if pending and ended - pending[0].since > self._seconds:
                    (label,) = pending[0].label
                    what = f"rank {self._rank}: {label} has not ended after {self._seconds:.0f} s. {ADVICE}"
                    print(what, file=sys.stderr, flush=True)
                    self._late(what)
                    return
