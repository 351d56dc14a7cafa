"""Where all ranks are, when one waits for long: known by a side channel that works while the ranks' own hangs.

    thread of each rank, once a second:     store["rank 3"] = what it does now, and since when
    where it has waited for too long:       what all have said is read (heard.py), grouped and shown (places.py)

The store is that of the process group's rendezvous, over a connection of its own; nothing here is a collective. A step
does nothing for it but keep in attributes what it is at. So a rank that waits in C++ or in Python says where; one that
has ended, or is in a call that holds Python's lock, is told by its silence, and shown where it was last seen.
"""

import atexit
import dataclasses
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from yafsdp_fn.comm import python_place
from yafsdp_fn.comm.heard import ENDS, Heard
from yafsdp_fn.comm.places import Post, table

BEATS, LONGEST_S = 20, 1.0
"""How often a rank speaks in one timeout, and the longest pause."""

STALL = 4
"""Beats: who stands still for so long says more of itself, and listens to the others."""

PATIENCE = timedelta(seconds=10)
"""With the store."""

KEEPER_ENDED = "the keeper of the store has ended"

UnderWay = list[tuple[str]]
"""The communication that a rank has under way: labels, each in a tuple that was made for this one time."""


class Ops(Protocol):
    """A program."""

    @property
    def ops(self) -> Sequence[Any]: ...
    def fingerprint(self) -> str: ...
    def words(self) -> list[str]: ...


class Sight(NamedTuple):
    """Where a rank is: place, in words, an object of its own each time; the number of its op in its program."""

    place: str
    number: int = -1
    program: Ops | None = None


@dataclasses.dataclass(slots=True)
class Steps:
    """What a rank's thread that steps leaves for its lookout: looks at the steps under way, the innermost last."""

    looks: list[Callable[[], Sight]] = dataclasses.field(default_factory=list)
    after: str = "before the first step"
    failed: bool = False
    thread: int = threading.main_thread().ident or 0


class Lookout:
    """Of one rank of a mesh. under_way: what it communicates now, of communicators that may be gone

    table: what was read last, empty before
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout: timedelta,
        steps: Steps,
        under_way: weakref.WeakMethod[Callable[[], UnderWay]],
    ) -> None:
        seconds = timeout.total_seconds()
        self._store, self._rank, self._world, self._under_way = store, rank, world, under_way
        self._beat, self._patience = min(LONGEST_S, seconds / BEATS), seconds / 2
        self._steps = steps
        self._sight, self._since, self._number = Sight(steps.after), time.monotonic(), 0
        self._waits: list[tuple[tuple[str], float]] = []
        self._program: tuple[Ops | None, str] = None, ""  # the last one that was described
        self._heard: Heard | None = None
        self._shown: str | None = None  # the place where it stood when it was
        self.table, self._made_at = "", 0.0
        self._keeps_store = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._closed, self._asked, self._settled = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="yafsdp-lookout", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    # ---- for the thread that steps

    def ask(self) -> str:
        """The table, after a failure: the last one if it is of now, else it takes some beats to see who is silent."""
        if not self.table or time.monotonic() - self._made_at > STALL * self._beat:
            self._asked.set()
            self._settled.wait(4 * STALL * self._beat + 5)
            self._asked.clear()
        return self.table

    def close(self) -> None:
        """Ends the thread."""
        atexit.unregister(self._exit)
        self._closed.set()
        if threading.current_thread() is not self._thread:  # the collector may run there
            self._thread.join()

    def _exit(self) -> None:
        """The process ends. Who keeps the store lets others see it: torch warns at length of a connection that ends."""
        self.close()
        if self._keeps_store:
            with suppress(RuntimeError):  # the store has gone before
                self._store.set(KEEPER_ENDED, "")
                until = time.monotonic() + 1.5 * self._beat
                while time.monotonic() < until and self._store.add("left", 0) < self._world:
                    time.sleep(self._beat / 50)

    # ---- the thread

    def _run(self) -> None:
        try:
            last = False
            while not last and not self._closed.wait(self._beat) and self._look():
                last = self._store.check([KEEPER_ENDED])
                self._say(self._post())
                if self._asked.is_set() or self._stalls(self._waited):
                    self._listen(last)
                elif self._heard is not None:
                    self._over()
            self._say(self._post()._replace(beat=ENDS, place=f"has ended, {self._sight.place}", waits="", line=""))
            self._store.add("left", 1)
        except RuntimeError as error:
            self._sight = Sight(self._sight.place)  # a program would be left in the store
            own, why = table({self._rank: self._post()}, {}, {}), str(error).partition("\n")[0]
            self._made_at = float("inf")
            self.table = (
                "  where others are is not known: the store of the process group cannot be reached; the process that "
                f"keeps it, often that of rank 0, has probably ended ({why})\n{own}"
            )
        finally:
            self._settled.set()

    def _look(self) -> bool:
        """Takes note of where this rank is; False where there is nothing left to look at."""
        if (method := self._under_way()) is None:
            return False
        labels, now, before = method(), time.monotonic(), self._sight
        self._sight = next((look() for look in self._steps.looks[-1:]), Sight(self._steps.after))
        if before.place is not self._sight.place or before.number != self._sight.number:
            self._since = now
        if (name := python_place.collective(self._steps.thread)) is not None:
            labels.append(next((label for label, _ in self._waits if label == (name,)), (name,)))
        old = {id(label): since for label, since in self._waits}
        self._waits = [(label, old.get(id(label), now)) for label in labels]
        self._number += 1
        return True

    @property
    def _waited(self) -> float:
        """For what is under way, the longest, in seconds."""
        return max((time.monotonic() - since for _, since in self._waits), default=0.0)

    def _stalls(self, seconds: float) -> bool:
        return seconds > STALL * self._beat

    def _post(self) -> Post:
        sight, seconds, waited = self._sight, time.monotonic() - self._since, self._waited
        post = Post(self._number, sight.place, seconds, late=waited > self._patience, shown=self._shown is not None)
        if self._waits:
            post = post._replace(waits=", ".join(label for (label,), _ in self._waits), waited=waited)
        if self._stalls(seconds) or self._stalls(waited):
            post = post._replace(line=python_place.line(self._steps.thread))
            if sight.program is not None:
                op = f"op {sight.number} of {len(sight.program.ops)}"
                post = post._replace(op=op, program=self._describe(sight.program))
        return post

    def _describe(self, program: Ops) -> str:
        """Its fingerprint; what it does is left in the store, if nobody has yet."""
        if self._program[0] is not program:
            found = program.fingerprint()
            if not self._store.check([found]):
                self._store.set(found, json.dumps(program.words()))
            self._program = program, found
        return self._program[1]

    def _say(self, post: Post) -> None:
        self._store.set(f"rank {self._rank}", json.dumps(post))

    def _listen(self, last: bool) -> None:
        """What others say; last: it is now or never."""
        self._heard = self._heard or Heard(self._store, self._world, self._beat)
        if found := self._heard.read(last):
            self.table, self._made_at = found, time.monotonic()
            self._show(self._heard)
            self._settled.set()

    def _show(self, heard: Heard) -> None:
        """Once while it lasts, and by one rank: the lowest of those that have waited for too long."""
        able = {rank: post for rank, post in heard.posts.items() if rank not in heard.silent}
        if self._rank != min((rank for rank, post in able.items() if post.late), default=None):
            return
        turn = (2 + min(self._rank, 8)) * self._beat  # lower ranks that are late, too, come first
        if self._waited > self._patience + turn and not any(post.shown for post in able.values()):
            self._shown = self._sight.place
            what = f"rank {self._rank} has waited for {self._waited:.0f} s. Where ranks are:\n{self.table}"
            print(what, file=sys.stderr, flush=True)

    def _over(self) -> None:
        """What it waited for has come, or failed."""
        if self._shown is not None and self._sight.place is not self._shown and not self._steps.failed:
            print(f"rank {self._rank} goes on.", file=sys.stderr, flush=True)
        self._heard, self._shown = None, None
        self._settled.clear()
