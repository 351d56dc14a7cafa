"""The watchdog of a rank: it writes where the rank is to a store, names a collective that hangs, and ends it.

    a thread, once a beat:       looks at its position, what it waits for, and since when
                                 after the timeout, on CUDA, aborts the communicators
    another, once a beat:        store["rank 3"] = that
                                 if the rank waits for long, or has failed, reads the status of all (where.py)
                                 if it waits while another one has failed alone, ends its wait

Whoever talks to the store may wait for ever: torch has no limit for the answers of a server that is frozen.

It is a side channel: the store is that of the process group's rendezvous, over a connection of its own, and no
collective is used. A step only keeps its position in attributes. So a rank that waits in C++ or in Python is located.
One that has ended, or is in a call that holds Python's lock, is known by its silence, and shown where it was last seen.
"""

import atexit
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from yafsdp_fn.communication import where
from yafsdp_fn.communication.cuda_streams import begin_thread
from yafsdp_fn.communication.store import disconnect_store
from yafsdp_fn.communication.streams import ADVICE

BEATS, LONGEST_S = 20, 1.0
"""Looks in one timeout, and the longest pause between two, in seconds."""

PATIENCE = timedelta(seconds=10)
"""The time limit for the store's answers."""

SILENCE_BEATS, SILENCE_S = 4, 0.8
"""A rank without a new status for so many beats, but at least so many seconds (busy machines are late), is silent."""

KEEPER = "the process that keeps it, often that of rank 0,"
KEEPER_ENDED = "the keeper of the store has ended"
FAILED = "a rank has failed alone"

UNKNOWN = "0 has said nothing yet"
"""The status of a rank that has not looked yet. A status is the number of looks, and the rank's place in words."""

Pending = tuple[str, float]
"""The label of communication under way, and since when it is, by `time.monotonic`."""


@dataclasses.dataclass(slots=True)
class Steps:
    """The running steps of a rank, left for the watchdog by the thread that steps. looks: one per step, the innermost
    last, each returns the position in words; lost: why the communicators can no longer be used, if so; failed: the
    exception of this rank, if others have not had it, and may wait for what it will never send"""

    looks: list[Callable[[], str]] = dataclasses.field(default_factory=list)
    after: str = "before the first step"
    lost: str | None = None
    failed: str = ""
    thread: int = threading.main_thread().ident or 0


OF_ANOTHER_PROCESS = (
    "the state is on a mesh of the process that was forked (by ya.launch, say): each rank would go on with a copy of "
    "its own, without the gradients of others. Make mesh and state in the launched function"
)

IN_ANOTHER_THREAD = (
    "a step or an evaluation begins in one thread while another thread is in one, on the same mesh: ranks would take "
    "them in different orders, and wait for each other. Take turns in one thread, in the same order on all ranks"
)


class Watchdog:
    """The watchdog of one rank. comms: the `Communicators` of a mesh of several ranks, with a timeout"""

    def __init__(self, store: Any, comms: Any) -> None:
        self._store = store
        self._comms = comms
        self._steps = comms.steps
        self._timeout: float = comms.timeout.total_seconds()
        self._beat = min(LONGEST_S, self._timeout / BEATS)
        self._patience = self._timeout / 2
        self._silence = max(SILENCE_S, SILENCE_BEATS * self._beat)
        # ---- this rank
        self._key = f"rank {comms.world_rank}"
        self._looks = 0
        self._status = UNKNOWN
        self._since = math.inf  # it waits since then
        self._aborts = comms.device.type != "cpu"
        # ---- all ranks
        self._table = ""
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
        """Returns the table, after a failure. It takes some beats to find out who is silent."""
        self._patience = math.inf  # the error says it from now on
        limit = 2 * self._silence + PATIENCE.total_seconds()
        self._known.clear()
        if self._lost is None and self._known.wait(limit) and self._lost is None:
            return self._table
        why = self._lost or f"does not answer for {limit:.0f} s; {KEEPER} is probably frozen"
        return f"  where others are is not known: the store of the process group {why}"

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

    def _look(self) -> None:
        """Finds out this rank's status."""
        place = self._steps.after
        for look in self._steps.looks[-1:]:
            place = look()
        line, pending = self._standing()
        if line:
            place = f"{place}; {line}"
        self._since = min((since for _, since in pending), default=math.inf)
        if pending:
            place = f"{where.WAITING} {_labels(pending)}; {place}"
        self._looks += 1
        self._status = f"{self._looks} {place}"
        self._end_late(pending)

    def _standing(self) -> tuple[str, list[Pending]]:
        """Returns the line of the user's Python, and what this rank waits for."""
        line, waits = where.standing(self._steps.thread)
        # on the CPU a rank that computes waits for nothing: its streams run ahead, as a later receive does
        return line, self._comms.under_way() if waits or self._comms.device.type != "cpu" else []

    def _end_late(self, pending: list[Pending]) -> None:
        """Ends a collective on CUDA, where no host waits for one: a rank whose peer has died keeps issuing until it
        wants a value. NCCL's own watchdog ends the process later, and knows neither op nor unit. When communicators are
        aborted, waits for them return, with meaningless values, and the next `Communicators.check` raises.

        torch stops NCCL's watchdog of a group before it aborts the group. A look of it that has begun already, or a
        peer's, may take the abort for an error and end its process: what hangs is printed by then.
        """
        before = time.monotonic() - self._timeout
        late = [label for label, since in pending if since < before]
        if late and self._aborts:
            self._aborts = False
            text = f"{self._key}: {late[0]} has not ended after {self._timeout:.0f} s. {ADVICE}"
            print(text, file=sys.stderr, flush=True)
            self._comms.abort_late(text)

    # ---- the thread that talks to the store

    def _talk(self) -> None:
        begin_thread(self._comms.device)
        try:
            while not self._closed.wait(self._beat) and not self._store.check([KEEPER_ENDED]):
                self._say()
                self._share_failure()
                self._tell()
            self._share_failure()  # of a mesh that ends with it
            self._lost = f"cannot be reached; {KEEPER} has ended"
            self._store.add("left", 1)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self._lost = f"cannot be reached; {KEEPER} has probably ended ({why})"
        self._known.set()

    def _say(self) -> None:
        self._store.set(self._key, self._status)

    def _share_failure(self) -> None:
        """Tells other ranks of an exception that this rank alone had, or learns of theirs, and ends its wait."""
        if self._steps.failed:
            self._store.set(FAILED, self._steps.failed)
        elif self._since < math.inf and self._steps.lost is None and self._store.check([FAILED]):
            failed = self._store.get(FAILED).decode()
            _, pending = self._standing()  # the last look may be of an earlier wait
            if pending:
                self._comms.abort_late(f"{_labels(pending)}: another rank has failed alone ({failed})")

    def _tell(self) -> None:
        """Finds out where ranks are if that is asked for, or if this rank waits for long: the first rank that does
        prints it, once between two steps."""
        if not self._known.is_set():
            self._table = self._find()
            self._known.set()
        shown = f"table {self._steps.after}"
        if self._waited() > self._patience and not self._store.check([shown]):
            found = self._find()
            waited = self._waited()
            if waited > self._patience and self._store.add(shown, 1) == 1:  # it waits still
                text = f"{self._key} has waited for {waited:.0f} s. Where ranks are:\n{found}"
                print(text, file=sys.stderr, flush=True)

    def _waited(self) -> float:
        return time.monotonic() - self._since

    def _find(self) -> str:
        """Returns the table of all ranks. Those that say nothing new meanwhile are silent."""
        before = self._read()
        until = time.monotonic() + self._silence
        while time.monotonic() < until and not self._closed.wait(self._beat):
            self._say()
        found = self._read()
        silent = [rank for rank, status in enumerate(found) if status == before[rank]]
        return where.table([status.partition(" ")[2] for status in found], silent)

    def _read(self) -> list[str]:
        keys = [f"rank {rank}" for rank in range(self._comms.world)]
        if not self._store.check(keys):  # to get a missing one would wait for it
            for key in keys:
                self._store.compare_set(key, "", UNKNOWN)
        return [status.decode() for status in self._store.multi_get(keys)]


def _labels(pending: list[Pending]) -> str:
    return ", ".join(label for label, _ in pending)
