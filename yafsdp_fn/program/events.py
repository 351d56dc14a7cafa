"""Runs events that wait for each other: pipelines as they are built and proved, and simulations.

    begins     when the event before it on its stream, and all that it waits for, have ended; both ends of a transfer
               begin together
    runs       phase by phase, at rates that depend on the events that run at the same time
    ends       and events that waited for it may begin

A stage stands for its ranks, which all do the same. Rates depend on the events of the same stage; those of a transfer
on both of its stages. They change only when an event of the stage begins or ends, so that the cost of an event is the
number of events that run in its stage.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

# ---- An event, and its time.


class StageEvent(NamedTuple):
    """Something that happens on a stream of a stage, behind those before it there.

    waits: numbers of other events; phases: `(resource, seconds alone)`, one after the other
    partner: number of the event that is the other end of its transfer, which has the same phases
    """

    stage: int
    stream: str
    waits: Sequence[int]
    phases: Sequence[tuple[str, float]] = ()
    partner: int | None = None


class EventTime(NamedTuple):
    """The time of an event. cause: number of the one whose end let it begin, None where it began with the step"""

    start: float
    end: float
    cause: int | None


Rate = Callable[[str, bool, Sequence[str]], float]
"""The rate of a phase, given its resource, whether its stream computes, and the resources of all its stage runs."""


def play(todo: Sequence[StageEvent], rate: Rate = lambda *_: 1.0) -> list[EventTime | None]:
    """Returns the times of events; None for those that never begin, since they wait for each other."""
    return _Loop(todo, rate).play()


# ---- The loop.

BEGUN = -1
"""Stands for the number of events that one waits for once it has begun: both ends of a transfer may find it ready."""


class _Running:
    """An event, or both ends of a transfer, under way: what is left of its phases, at the rate that it has had `since`.

    ends: `(stage, stream)` of each end
    """

    __slots__ = ("ends", "events", "left", "phases", "rate", "since")

    def __init__(
        self, events: tuple[int, ...], ends: tuple[tuple[int, str], ...], todo: Sequence[tuple[str, float]], now: float
    ) -> None:
        self.events = events
        self.ends = ends
        self.phases = [*reversed(todo)]
        self.left = todo[0][1]
        self.rate = 0.0
        self.since = now

    @property
    def resource(self) -> str:
        return self.phases[-1][0]


class _Loop:
    """Runs events to their end: those that begin, the rates of what runs together, and the phase that ends next."""

    def __init__(self, todo: Sequence[StageEvent], rate: Rate) -> None:
        self.todo = todo
        self.now = 0.0
        self._rate = rate
        # times
        self.starts = [0.0] * len(todo)
        self.ends = [math.nan] * len(todo)
        self.causes: list[int | None] = [None] * len(todo)
        # who waits for whom: for the event before it on its stream, and for those that it names
        self._before: list[list[int]] = []
        self._waiting: list[int] = []  # how many of these have not ended
        self._waiters: defaultdict[int, list[int]] = defaultdict(list)
        last: dict[tuple[int, str], list[int]] = {}
        for number, event in enumerate(todo):
            before = last.get((event.stage, event.stream), [])
            last[event.stage, event.stream] = [number]
            self._before.append(before)
            self._waiting.append(len(before) + len(event.waits))
            for earlier in (*before, *event.waits):
                self._waiters[earlier].append(number)
        # what runs now
        self._running: defaultdict[int, dict[str, _Running]] = defaultdict(dict)  # stage -> stream -> what it runs
        self._agenda: list[tuple[float, int, _Running, float]] = []  # when something ends at a rate, if that stays
        self._turn = itertools.count()

    def play(self) -> list[EventTime | None]:
        self._set_rates(self._begin([number for number, left in enumerate(self._waiting) if not left]))
        while self._agenda:
            self.now = self._agenda[0][0]
            over = self._due()
            changed = {stage for running in over for stage, _ in running.ends}
            self._set_rates(changed | self._begin(self._go_on(over)))
        times = zip(self.starts, self.ends, self.causes, strict=True)
        return [None if math.isnan(end) else EventTime(start, end, cause) for start, end, cause in times]

    # ---- ends and beginnings

    def _due(self) -> list[_Running]:
        """Returns those whose phase ends now; a rounding later is now, too."""
        found: list[_Running] = []
        limit = self.now * (1 + 1e-12)
        while self._agenda and self._agenda[0][0] <= limit:
            _, _, running, rate = heapq.heappop(self._agenda)
            if running.phases and running.rate == rate and running not in found:
                left = running.left - (self.now - running.since) * rate
                if left <= 1e-11 * max(self.now, running.left):
                    found.append(running)
        return found

    def _go_on(self, over: Sequence[_Running]) -> list[int]:
        """Begins the next phase of those whose phase is over, or ends their events; returns those that may begin."""
        ready: list[int] = []
        for running in over:
            running.phases.pop()
            if running.phases:
                running.left = running.phases[-1][1]
                running.since = self.now
                running.rate = 0.0
                continue
            for stage, stream in running.ends:
                del self._running[stage][stream]
            ready += self._end(running.events)
        return ready

    def _end(self, events: Sequence[int]) -> list[int]:
        """Ends events; returns those that may begin, as far as these are concerned."""
        ready: list[int] = []
        for number in events:
            self.ends[number] = self.now
            for later in self._waiters[number]:
                self._waiting[later] -= 1
                if not self._waiting[later]:
                    ready.append(later)
        return ready

    def _begin(self, candidates: list[int]) -> set[int]:
        """Begins the events that can begin. One without phases ends at once, and may let others begin. Returns their
        stages."""
        changed: set[int] = set()
        while candidates:
            number = candidates.pop()
            partner = self.todo[number].partner
            events = (number,) if partner is None else (number, partner)
            if any(self._waiting[one] for one in events):
                continue
            # what let it begin, on its stream or on others: the last to end, on its stream where several end together
            before = [earlier for one in events for earlier in self._before[one]]
            before += [earlier for one in events for earlier in self.todo[one].waits]
            cause = max(before, key=self.ends.__getitem__, default=None)
            # it begins, at both of its ends
            for one in events:
                self._waiting[one] = BEGUN
                self.starts[one] = self.now
                self.causes[one] = cause
            ends = tuple((self.todo[one].stage, self.todo[one].stream) for one in events)
            changed.update(stage for stage, _ in ends)
            phases = self.todo[number].phases
            if not phases:
                candidates += self._end(events)
                continue
            running = _Running(events, ends, phases, self.now)
            for stage, stream in ends:
                self._running[stage][stream] = running
        return changed

    # ---- rates

    def _set_rates(self, stages: set[int]) -> None:
        """Sets the rates of all that runs in `stages`, where something has begun or ended."""
        here: dict[int, _Running] = {}  # a transfer once, of both of its ends
        for stage in stages:
            for running in self._running[stage].values():
                here[id(running)] = running
        for running in here.values():
            rate = min(self._rate_in(running, stage) for stage, _ in running.ends)
            if rate != running.rate:
                running.left -= (self.now - running.since) * running.rate
                running.since = self.now
                running.rate = rate
                end = self.now + running.left / rate
                heapq.heappush(self._agenda, (end, next(self._turn), running, rate))

    def _rate_in(self, running: _Running, stage: int) -> float:
        beside = [one.resource for one in self._running[stage].values()]
        return self._rate(running.resource, (stage, "compute") in running.ends, beside)
