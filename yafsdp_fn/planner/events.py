"""The event loop of the simulation: streams in order, shared links, and transfers between stages that need both ends.

    begins     when the task before it on its stream, and all that it waits for, have ended; of a transfer both ends do
    runs       phase by phase, each at a rate that what runs beside it decides
    ends       and lets begin what has waited for it

A stage stands for its ranks, which all do the same: rates depend on what runs in the same stage, those of a transfer
on both. Between two events of a stage nothing of it changes, so that an event costs what its stage runs.
"""

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from yafsdp_fn.planner.cluster import Phase
from yafsdp_fn.planner.costs import Foreign
from yafsdp_fn.schedules.ops import Op

LINKS = ("node", "network")


class Task(NamedTuple):
    """An op as the simulation sees it.

    waits: numbers of other tasks; phases: what it does, one after the other
    stage: that does it; partner: number of the task that is the other end of its transfer, which has the same phases
    """

    op: Op | Foreign
    stream: str
    waits: tuple[int, ...]
    phases: tuple[Phase, ...]
    stage: int = 0
    partner: int | None = None


class Times(NamedTuple):
    """When a task ran. cause: number of the task whose end let it begin, None where it began with the step"""

    start: float
    end: float
    cause: int | None


class _Running:
    """A task, or both ends of a transfer, under way: what is left of its phases, at the rate it has had since `since`.

    ends: `(stage, stream)` of each end
    """

    __slots__ = ("ends", "left", "phases", "rate", "since", "tasks")

    def __init__(self, tasks: tuple[int, ...], ends: tuple[tuple[int, str], ...], todo: Sequence[Phase]) -> None:
        self.tasks, self.ends, self.phases = tasks, ends, [*reversed(todo)]
        self.left, self.rate, self.since = todo[0].seconds, 0.0, 0.0

    @property
    def resource(self) -> str:
        return self.phases[-1].resource


class Events:
    """Plays `todo`. contention: compute takes 1 + contention times as long while its stage runs something else"""

    def __init__(self, todo: Sequence[Task], contention: float) -> None:
        self.todo, self.contention, self.now = todo, contention, 0.0
        self.starts, self.ends = [0.0] * len(todo), [math.nan] * len(todo)
        self.causes: list[int | None] = [None] * len(todo)
        self._queues: defaultdict[tuple[int, str], deque[int]] = defaultdict(deque)
        self._waiting = [len(task.waits) for task in todo]
        self._waiters: defaultdict[int, list[int]] = defaultdict(list)
        for number, task in enumerate(todo):
            self._queues[task.stage, task.stream].append(number)
            for earlier in task.waits:
                self._waiters[earlier].append(number)
        self._before: dict[tuple[int, str], tuple[int, ...]] = dict.fromkeys(self._queues, ())
        self._running: defaultdict[int, dict[str, _Running]] = defaultdict(dict)  # stage -> stream -> what it runs
        self._agenda: list[tuple[float, int, _Running, float]] = []  # when something ends at a rate, if that stays
        self._turn = itertools.count()

    def play(self) -> list[Times]:
        """When each task ran. Raises ValueError where some never do."""
        changed = self._begin([queue[0] for queue in self._queues.values()])
        self._set_rates(changed)
        while self._agenda:
            self.now = self._agenda[0][0]
            over = self._due()
            changed = {stage for running in over for stage, _ in running.ends}
            ready: list[int] = []
            for running in over:
                running.phases.pop()
                if running.phases:
                    running.left, running.since, running.rate = running.phases[-1].seconds, self.now, 0.0
                else:
                    for stage, stream in running.ends:
                        del self._running[stage][stream]
                    ready += self._end(running.tasks)
            self._set_rates(changed | self._begin(ready))
        if any(self._queues.values()):
            raise ValueError(self._stuck())
        return list(map(Times, self.starts, self.ends, self.causes))

    def _due(self) -> list[_Running]:
        """What ends now; a rounding later is now, too."""
        found: list[_Running] = []
        limit = self.now * (1 + 1e-12)
        while self._agenda and self._agenda[0][0] <= limit:
            _, _, running, rate = heapq.heappop(self._agenda)
            if running.phases and running.rate == rate and running not in found:
                left = running.left - (self.now - running.since) * rate
                if left <= 1e-11 * max(self.now, running.left):
                    found.append(running)
        return found

    def _end(self, tasks: Sequence[int]) -> list[int]:
        """Ends tasks; returns those that may begin, as far as these are concerned."""
        ready: list[int] = []
        for number in tasks:
            self.ends[number] = self.now
            for later in self._waiters[number]:
                self._waiting[later] -= 1
                ready += [later] if not self._waiting[later] else []
            queue = self._queues[self.todo[number].stage, self.todo[number].stream]
            ready += [queue[0]] if queue else []
        return ready

    def _is_next(self, number: int) -> bool:
        """Whether its stream has come to it, and all that it waits for has ended."""
        at = self.todo[number].stage, self.todo[number].stream
        queue = self._queues[at]
        return not self._waiting[number] and bool(queue) and queue[0] == number and at[1] not in self._running[at[0]]

    def _begin(self, candidates: list[int]) -> set[int]:
        """Begins what can; what has no phases ends at once, and may let others begin. Returns the stages."""
        changed: set[int] = set()
        while candidates:
            number = candidates.pop()
            partner = self.todo[number].partner
            tasks = (number,) if partner is None else (number, partner)
            if not all(map(self._is_next, tasks)):
                continue
            ends = tuple((self.todo[one].stage, self.todo[one].stream) for one in tasks)
            before = [each for one, at in zip(tasks, ends, strict=True) for each in self._before[at]]
            waits = [each for one in tasks for each in self.todo[one].waits]
            # the last to end; the one before on the stream where several end together
            cause = max((*before, *waits), key=self.ends.__getitem__, default=None)
            for one, at in zip(tasks, ends, strict=True):
                self._queues[at].popleft()
                self._before[at] = (one,)
                self.starts[one], self.causes[one] = self.now, cause
            changed.update(stage for stage, _ in ends)
            if phases := self.todo[number].phases:
                running = _Running(tasks, ends, phases)
                for stage, stream in ends:
                    self._running[stage][stream] = running
                running.since = self.now
            else:
                candidates += self._end(tasks)
        return changed

    def _set_rates(self, stages: set[int]) -> None:
        """Rates of what runs in `stages`, where something has begun or ended."""
        for running in {id(one): one for stage in stages for one in self._running[stage].values()}.values():
            rate = min(self._rate(running, stage) for stage, _ in running.ends)
            if rate != running.rate:
                running.left -= (self.now - running.since) * running.rate
                running.since, running.rate = self.now, rate
                heapq.heappush(self._agenda, (self.now + running.left / rate, next(self._turn), running, rate))

    def _rate(self, running: _Running, stage: int) -> float:
        beside = self._running[stage].values()
        if running.resource in LINKS:
            return 1.0 / sum(one.resource == running.resource for one in beside)
        if (stage, "compute") in running.ends and len(beside) > 1:  # copies of that stream, too
            return 1.0 / (1.0 + self.contention)
        return 1.0

    def _stuck(self) -> str:
        heads = [self.todo[queue[0]] for queue in self._queues.values() if queue]
        named = "; ".join(f"stage {task.stage} at {task.op}" for task in heads[:4])
        return f"the stages wait for each other for ever: {named} (verify says why)"
