"""The watchdog of a rank: it writes where the rank is to a store, names a collective that hangs, and ends it.

    a thread, once a beat:       looks at its position, what it waits for, and since when
                                 after the timeout, on CUDA, aborts the communicators
    another, once a beat:        store["rank 3"] = that
                                 if the rank waits for long, reads the status of all, grouped and shown (where.py)

Whoever talks to the store may wait for ever: torch has no limit for the answers of a server that is frozen.

It is a side channel: the store is that of the process group's rendezvous, over a connection of its own, and no
collective is used. A step only keeps its position in attributes. So a rank that waits in C++ or in Python is located.
One that has ended, or is in a call that holds Python's lock, is known by its silence, and shown where it was last seen.
"""

import atexit
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from yafsdp_fn.communication import where
from yafsdp_fn.communication.cuda_streams import begin_thread
from yafsdp_fn.communication.store import disconnect_store
from yafsdp_fn.communication.streams import ADVICE
from yafsdp_fn.communication.where import RankStatus, table

BEATS, LONGEST_S = 20, 1.0
"""Looks in one timeout, and the longest pause between two, in seconds."""

STALL = 4
"""Beats without progress after which a rank adds detail to its status, and reads that of the others."""

PATIENCE = timedelta(seconds=10)
"""The time limit for the store's answers."""

SILENCE_BEATS, SILENCE_S = 4, 0.8
"""A rank without a new status for so many beats, but at least so many seconds (busy machines are late), is silent."""

READS = 64
"""Ranks read in a beat; in a larger world a waiting rank reads less often."""

KEEPER = "the process that keeps it, often that of rank 0,"
KEEPER_ENDED = "the keeper of the store has ended"

ENDS = -1
"""The beat in the last status of a rank that has ended normally."""

UNKNOWN = RankStatus(0, "has said nothing yet", 0.0)

PendingLabels = list[tuple[str]]
"""Labels of the communication under way, each in a tuple made for this one call, so that calls are told apart."""


class RankPosition(NamedTuple):
    """A rank's position: `where` in words, a new object for each visit of it; the number of its op in its stage's
    program, a `Program`; its stage, which is named where there are several."""

    where: str
    number: int = -1
    program: Any = None
    stage: int | None = None

    def __str__(self) -> str:
        return self.where if self.stage is None else f"{self.where}, stage {self.stage}"


@dataclasses.dataclass(slots=True)
class Steps:
    """The running steps of a rank, left for the watchdog by the thread that steps. looks: one per step, the innermost
    last; lost: why the communicators can no longer be used, if so"""

    looks: list[Callable[[], RankPosition]] = dataclasses.field(default_factory=list)
    after: str = "before the first step"
    failed: bool = False
    lost: str | None = None
    thread: int = threading.main_thread().ident or 0


class PeerStatus:
    """The status of all ranks, as one rank reads it from the store from some time on.

    posts: the last status by rank; silent: seconds without a new one, for ranks that are silent
    patience: seconds until a rank is silent, and until it is known which are
    """

    def __init__(self, store: Any, world: int, beat: float) -> None:
        self._store = store
        self._period = beat * max(1.0, world / READS)
        self.patience = max(SILENCE_S, SILENCE_BEATS * beat, 1.5 * self._period)
        self._since = time.monotonic()
        self._read_at = 0.0
        self.posts = dict.fromkeys(range(world), UNKNOWN)
        self._heard_at = dict.fromkeys(self.posts, self._since)
        self.silent: dict[int, float] = {}

    def read(self) -> str:
        """Reads the store and returns the table; "" while it is not known yet, or unchanged."""
        now = time.monotonic()
        if now - self._read_at < 0.9 * self._period:
            return ""
        self._read_at = now
        for rank, before in self.posts.items():
            # which returns what is there: to get a missing key would wait for it
            post = RankStatus(*json.loads(self._store.compare_set(f"rank {rank}", "", json.dumps(UNKNOWN))))
            if post.beat != before.beat:
                self.posts[rank] = post
                self._heard_at[rank] = now
        ages = {rank: now - at for rank, at in self._heard_at.items() if self.posts[rank].beat != ENDS}
        self.silent = {rank: age for rank, age in ages.items() if age > self.patience}
        return table(self.posts, self.silent) if now - self._since > self.patience else ""


class Watchdog:
    """The watchdog of one rank. comms: the `Communicators` of a mesh of several ranks, with a timeout"""

    def __init__(self, store: Any, comms: Any) -> None:
        seconds: float = comms.timeout.total_seconds()
        self._store = store
        self._comms = comms
        self._steps = comms.steps
        self._rank = comms.world_rank
        self._beat = min(LONGEST_S, seconds / BEATS)
        self._timeout = seconds
        self._patience = seconds / 2
        # ---- this rank
        self._position = RankPosition(comms.steps.after)
        self._labels: PendingLabels = []  # of its own communication, kept, so that no other has the id of one
        self._since: dict[Hashable, float] = {}  # of its position, and of what it waits for
        self._post = UNKNOWN
        self._shown: str | None = None  # its position when it showed the table
        self._aborts = comms.device.type != "cpu"
        # ---- all ranks, while this one waits
        self._peers: PeerStatus | None = None
        self._table = ""
        self._made_at = float("-inf")
        self._known = threading.Event()  # whoever clears it asks for the table
        self._known.set()
        self._lost: str | None = None  # why the store is no longer used
        self._closed = threading.Event()
        self._threads = []
        for beats in (self._watch, self._talk):
            self._threads.append(threading.Thread(target=beats, name="yafsdp-watchdog", daemon=True))
            self._threads[-1].start()
        atexit.register(self._exit)

    # ---- for the thread that steps

    def ask(self) -> str:
        """Returns the table, after a failure. A recent one shows for what ranks waited, which now they do not; else it
        takes some beats to find out who is silent."""
        limit = 2 * PeerStatus(None, self._comms.world, self._beat).patience + 5
        if self._made_at < time.monotonic() - STALL * self._beat:
            self._known.clear()
        until = time.monotonic() + limit
        while self._lost is None and time.monotonic() < until:
            if self._known.wait(self._beat):
                return self._table
        why = self._lost or f"does not answer for {limit:.0f} s; {KEEPER} is probably frozen"
        own = table({self._rank: self._post}, {})
        return f"  where others are is not known: the store of the process group {why}\n{own}"

    def close(self) -> None:
        """Ends the threads, unless one waits for a store whose server has frozen."""
        atexit.unregister(self._exit)
        self._closed.set()
        for thread in self._threads:
            if threading.current_thread() is not thread:  # the collector may run there
                thread.join(PATIENCE.total_seconds())

    def _exit(self) -> None:
        """Runs when the process ends. The store's server waits for the others to notice: torch warns at length of a
        connection that ends."""
        self.close()
        if self._threads[-1].is_alive():  # threads of torch's may wait for the store, too, and this process for them
            disconnect_store()
        elif dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with suppress(RuntimeError):  # the store has gone before
                self._store.set(KEEPER_ENDED, "")
                until = time.monotonic() + 1.5 * self._beat
                while time.monotonic() < until and self._store.add("left", 0) < self._comms.world:
                    time.sleep(self._beat / 50)

    # ---- the thread that looks

    def _watch(self) -> None:
        begin_thread(self._comms.device)  # Python's collector may free tensors here
        while not self._closed.wait(self._beat):
            self._look()
            self._end_late()

    def _look(self) -> None:
        """Records this rank's position and status. A rank that stands still says its op and line, too."""
        now = time.monotonic()
        thread = self._steps.thread
        position = RankPosition(self._steps.after)
        for look in self._steps.looks[-1:]:
            position = look()
        own = where.collective(thread)
        # on the CPU a rank that computes waits for nothing: its streams run ahead, as a later receive does
        ahead = own is None and self._comms.device.type == "cpu"
        labels = [] if ahead else self._comms.under_way()
        names: dict[Hashable, str] = {id(label): label[0] for label in labels}
        if own:
            names[own] = own
        at = id(position.where), position.number
        self._since = {key: self._since.get(key, now) for key in (at, *names)}
        self._position, self._labels = position, labels
        # in words
        seconds = now - self._since[at]
        waited = now - min(map(self._since.__getitem__, names), default=now)
        text = str(position)
        line = ""
        program = ""
        if self._is_stalled(max(seconds, waited)):
            line = where.line(thread)
            if position.program is not None:
                ops = position.program.stages[position.stage or 0]
                text = f"op {position.number} of {len(ops)}, {text}"
                program = position.program.fingerprint()
        shown = self._shown is not None
        waits = ", ".join(names.values())
        self._post = RankStatus(self._post.beat + 1, text, seconds, waits, waited, program, line, shown)

    def _is_stalled(self, seconds: float) -> bool:
        return seconds > STALL * self._beat

    def _end_late(self) -> None:
        """Ends a collective on CUDA, where no host waits for one: a rank whose peer has died keeps issuing until it
        wants a value. NCCL's own watchdog ends the process later, and knows neither op nor unit. When communicators are
        aborted, waits for them return, with meaningless values, and the next `Communicators.check` raises.

        torch stops NCCL's watchdog of a group before it aborts the group. A look of it that has begun already, or a
        peer's, may take the abort for an error and end its process: what hangs is printed by then.
        """
        before = time.monotonic() - self._timeout
        late = [label[0] for label in self._labels if self._since[id(label)] < before]
        if late and self._aborts:
            self._aborts = False
            text = f"rank {self._rank}: {late[0]} has not ended after {self._timeout:.0f} s. {ADVICE}"
            print(text, file=sys.stderr, flush=True)
            self._comms.abort_late(text)

    # ---- the thread that talks to the store

    def _talk(self) -> None:
        begin_thread(self._comms.device)
        try:
            while not self._closed.wait(self._beat) and self._lost is None:
                self._tell()
            self._say(self._post._replace(beat=ENDS, where=f"has ended, {self._post.where}", waits=""))
            self._store.add("left", 1)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self._lost = f"cannot be reached; {KEEPER} has probably ended ({why})"

    def _say(self, post: RankStatus) -> None:
        self._store.set(f"rank {self._rank}", json.dumps(post))

    def _tell(self) -> None:
        """Writes this rank's status, and reads that of the others if it is asked for, or if this rank waits."""
        self._say(self._post)
        if self._store.check([KEEPER_ENDED]):
            self._lost = f"cannot be reached; {KEEPER} has ended"
        elif self._known.is_set() and not self._is_stalled(self._post.waited):
            self._go_on()
        else:
            self._peers = self._peers or PeerStatus(self._store, self._comms.world, self._beat)
            found = self._peers.read()
            if found:
                self._table = found
                self._made_at = time.monotonic()
                self._show(self._peers)
                self._known.set()

    def _show(self, peers: PeerStatus) -> None:
        """Prints the table once per stall, on one rank: the lowest of those that wait, as soon as it has for too long,
        or one that was too late before that one had stalled."""
        able = [rank for rank in peers.posts if rank not in peers.silent]
        lowest = next((rank for rank in able if self._is_stalled(peers.posts[rank].waited)), None)
        told = self._shown is not None or any(peers.posts[rank].shown for rank in able)
        waited = self._post.waited
        if waited > self._patience and self._rank == lowest and not told:
            self._shown = self._position.where
            what = f"rank {self._rank} has waited for {waited:.0f} s. Where ranks are:\n{self._table}"
            print(what, file=sys.stderr, flush=True)

    def _go_on(self) -> None:
        """Ends the report: the communication that it waited for has come, or failed."""
        if self._shown is not None and self._position.where is not self._shown and not self._steps.failed:
            print(f"rank {self._rank} goes on.", file=sys.stderr, flush=True)
        self._peers = None
        self._shown = None
