"""Orders of calls for pipelines, written by search: forwards, backwards of inputs and of weights on each stage.

    CallGraph        the seconds of each call, and the memory that a microbatch holds meanwhile
    evaluate         runs rows of calls: each begins as soon as its stage is free and its input has come
    listed           lists calls greedily, by preferences
    Search           changes the preferences of the best list

A list takes milliseconds, since it knows calls and messages alone: programs are built, proved and simulated from the
rows that come out of it (synthesize.py).
"""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from yafsdp_fn.pipelines.messages import Pace
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.costs import Costs
from yafsdp_fn.program.ops import Backward, Forward, Send
from yafsdp_fn.program.split import Call
from yafsdp_fn.program.trace import Trace

Rows = Sequence[Sequence[Call]]
"""The calls of each stage, in order."""


class CallGraph(NamedTuple):
    """The calls of a step. Each segment takes the output of the one before.

    homes: segment -> stage; forward, inputs, weights: seconds of each segment's calls
    message: seconds from one stage to another
    held: memory of its stage that a microbatch of a segment holds, in any unit, from the begin of its forward to that
        of its backward of inputs; between: from then to the end of its backward of weights, more where it recomputes
    """

    homes: tuple[int, ...]
    microbatches: int
    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    message: float
    held: tuple[float, ...]
    between: tuple[float, ...]

    @staticmethod
    def of_step(trace: Trace, cluster: Cluster, recomputed: frozenset[int] = frozenset()) -> "CallGraph":
        """Returns the calls of a step that is cut, with memory in bytes. recomputed: visits"""
        split = trace.split
        assert split is not None
        seconds = Costs(trace, cluster).seconds

        def kept(visit: int) -> int:
            cost = trace.visits[visit].cost
            if visit in recomputed:
                return sum(value.nbytes for value in cost.takes) + cost.beside_bytes
            saved = [value.nbytes for value in cost.takes if value.number not in cost.unsaved]
            return sum(saved) + cost.beside_bytes + cost.inner_bytes

        def by_segment(of_visit: Callable[[int], float]) -> tuple[float, ...]:
            return tuple(sum(map(of_visit, range(*ends))) for ends in split.segments)

        messages = [Send(number, 0) for number in range(len(split.flows))]
        return CallGraph(
            homes=split.homes,
            microbatches=trace.microbatches,
            forward=by_segment(lambda v: seconds(Forward(v, (), True))),
            inputs=by_segment(lambda v: seconds(Backward(v, (), (), half="inputs"), v in recomputed)),
            weights=by_segment(lambda v: seconds(Backward(v, (), (), half="weights"))),
            message=max((seconds(op) for op in messages if split.crosses(op.message)), default=0.0),
            held=by_segment(kept),
            between=by_segment(lambda v: trace.visits[v].cost.between_bytes),
        )

    @property
    def stages(self) -> int:
        return max(self.homes) + 1

    def of(self, stage: int) -> list[int]:
        """Returns the segments of `stage`."""
        return [segment for segment, home in enumerate(self.homes) if home == stage]

    @property
    def pace(self) -> Pace:
        """The order of messages follows from it."""
        return Pace(self.seconds, self.message)

    def seconds(self, call: Call) -> float:
        """Returns the seconds of a call, of a whole backward those of its halves."""
        segment = call.segment
        if call.kind == "forward":
            return self.forward[segment]
        if call.kind == "weights":
            return self.weights[segment]
        return self.inputs[segment] + self.weights[segment] * (call.kind == "backward")

    def takes(self, call: Call) -> float:
        """Returns the memory that a call takes, less than nothing where it frees some."""
        segment = call.segment
        if call.kind == "forward":
            return self.held[segment]
        if call.kind == "weights":
            return -self.between[segment]
        return self.between[segment] * (call.kind == "inputs") - self.held[segment]

    def source(self, call: Call) -> int | None:
        """Returns the segment whose call in the same direction gives what this one takes; None where there is none."""
        if call.kind == "weights":
            return None
        found = call.segment - 1 if call.kind == "forward" else call.segment + 1
        return found if 0 <= found < len(self.homes) else None

    def arrives(self, call: Call, ends: "Ends") -> float:
        """Returns when what a call takes is there, given when others have ended: never, if its source has not."""
        source = self.source(call)
        if source is None:
            return 0.0
        crosses = self.homes[source] != self.homes[call.segment]
        return ends.get((call.kind == "forward", source, call.microbatch), math.inf) + self.message * crosses


Ends = dict[tuple[bool, int, int], float]
"""The end of each forward (True) and backward, by segment and microbatch; of a backward in halves, that of inputs."""


class OrderRun(NamedTuple):
    """The result of a run of rows. seconds: until the last call ends; memory: the most that each stage holds

    begins, ends: of each stage, those of its first call and of its last
    """

    seconds: float
    memory: tuple[float, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]


def evaluate(calls: CallGraph, rows: Rows) -> OrderRun:
    """Runs rows, in which a backward may be whole. Raises ValueError where calls wait for each other."""
    ends: Ends = {}
    begins = [0.0] * len(rows)
    clock = [0.0] * len(rows)
    left = [deque(row) for row in rows]
    goes_on = True
    while goes_on:
        goes_on = False
        for stage, row in enumerate(left):
            while row and calls.arrives(row[0], ends) < math.inf:
                call = row.popleft()
                begin = max(clock[stage], calls.arrives(call, ends))
                if call == rows[stage][0]:
                    begins[stage] = begin
                clock[stage] = begin + calls.seconds(call)
                if call.kind != "weights":
                    ends[call.kind == "forward", call.segment, call.microbatch] = clock[stage]
                goes_on = True
    stuck = [stage for stage, row in enumerate(left) if row]
    if stuck:
        raise ValueError(f"the calls wait for each other: stage {stuck[0]} for ever")
    memory = tuple(max(itertools.accumulate(map(calls.takes, row))) for row in rows)
    return OrderRun(max(clock), memory, tuple(begins), tuple(clock))


# ---- Lists calls greedily: a free stage takes the last segment's of those whose input has come, backwards before
# forwards. A backward of weights is put off where something else is soon to come.


class Preferences(NamedTuple):
    """The preferences of a list, by segment.

    ahead: the most microbatches under way, at least one
    patience: the part of a backward of weights for which it is put off when something else comes meanwhile
    """

    ahead: tuple[float, ...]
    patience: tuple[float, ...]


class Listed(NamedTuple):
    """A list of calls. begins, ends: as of `OrderRun`"""

    rows: list[list[Call]]
    begins: list[float]
    ends: list[float]


def listed(calls: CallGraph, prefers: Preferences, memory: float) -> Listed | None:
    """Lists rows. Returns None where memory leaves no way on."""
    own = [calls.of(stage) for stage in range(calls.stages)]
    done: Counter[tuple[str, int]] = Counter()  # calls of a kind and segment
    ends: Ends = {}
    used = [0.0] * calls.stages
    free = [0.0] * calls.stages
    begins = [math.inf] * calls.stages
    rows: list[list[Call]] = [[] for _ in own]
    agenda = [(0.0, stage) for stage in range(calls.stages)]
    while agenda:
        now, stage = heapq.heappop(agenda)
        if now < free[stage]:
            continue
        # what may come next
        candidates: list[Call] = []
        for segment in own[stage]:
            forwards, backwards = done["forward", segment], done["inputs", segment]
            if forwards < calls.microbatches and forwards - backwards < prefers.ahead[segment]:
                candidates.append(Call("forward", segment, forwards))
            if forwards > backwards:
                candidates.append(Call("inputs", segment, backwards))
        best: Call | None = None
        soonest = math.inf
        blocked = False
        for call in sorted(candidates, key=lambda call: (call.kind == "inputs", call.segment)):
            arrives = calls.arrives(call, ends)
            if arrives > now:
                soonest = min(soonest, arrives)
            elif used[stage] + calls.takes(call) > memory:
                blocked = True
            else:
                best = call
        if best is None:
            late = max(own[stage], key=lambda segment: done["inputs", segment] - done["weights", segment])
            long = soonest - now >= prefers.patience[late] * calls.weights[late]
            if done["inputs", late] > done["weights", late] and (blocked or long):
                best = Call("weights", late, done["weights", late])
        if best is not None:
            rows[stage].append(best)
            done[best.kind, best.segment] += 1
            used[stage] += calls.takes(best)
            begins[stage] = min(begins[stage], now)
            free[stage] = soonest = now + calls.seconds(best)
            if best.kind != "weights":
                ends[best.kind == "forward", best.segment, best.microbatch] = soonest
                # who takes its output
                target = best.segment + (1 if best.kind == "forward" else -1)
                if 0 <= target < len(calls.homes):
                    home = calls.homes[target]
                    arrives = calls.arrives(best._replace(segment=target), ends)
                    heapq.heappush(agenda, (max(free[home], arrives), home))
        if soonest < math.inf:
            heapq.heappush(agenda, (soonest, stage))
    whole = sum(map(len, rows)) == 3 * len(calls.homes) * calls.microbatches
    return Listed(rows, begins, free) if whole else None


# ---- Search: lists at first by what is usually good, then by other preferences.

AHEAD = (2.0, 1.0, math.inf)
"""Microbatches under way on a segment, of those of 1F1B: a list is made for each at first."""
PATIENCE = 0.2
PATIENCES = (0.0, 0.1, PATIENCE, 0.5, 1.0)
"""Patience at first, and what it is changed to."""


class Search:
    """The best rows so far for `calls` within `memory` on each stage. `run` continues the search.

    starts: rows to begin with, such as those of builders; rows that do not fit are left out
    The same seed and number of moves find the same rows, on any machine.

    rows: the best; seconds: of these; moves: how many lists were made
    """

    def __init__(self, calls: CallGraph, memory: float, *, starts: Iterable[Rows] = (), seed: int = 0) -> None:
        self.calls = calls
        self.memory = memory * (1 + 1e-9)
        self.rows: Rows = []
        self.seconds = math.inf
        self.moves = 0
        self._random = random.Random(seed)
        self._first = iter([self._usual(ahead) for ahead in AHEAD])
        self._best = self._usual(1.0)  # the preferences of the best list, and its seconds
        self._best_s = math.inf
        for rows in starts:
            with suppress(ValueError):  # they wait for each other
                run = evaluate(calls, rows)
                if max(run.memory) <= self.memory:
                    self._offer(rows, run)

    def run(self, moves: int) -> None:
        """Makes so many lists more."""
        for _ in range(moves):
            prefers = next(self._first, None) or self._changed()
            self.moves += 1
            found = listed(self.calls, prefers, self.memory)
            if found is None:
                continue
            seconds = self._offer(found.rows, found)
            if seconds <= self._best_s:
                self._best = prefers
                self._best_s = seconds

    def _offer(self, rows: Rows, run: OrderRun | Listed) -> float:
        """Adopts rows that are no slower than the best; returns their seconds."""
        seconds = max(map(self.length, run.begins, run.ends))
        if seconds <= self.seconds:
            self.seconds = seconds
            self.rows = rows
        return seconds

    def length(self, begin: float, end: float) -> float:
        """Returns the length of a row: what is searched for is the order whose longest row is shortest."""
        return end

    def _usual(self, ahead: float) -> Preferences:
        """Returns the preferences with so many microbatches under way, of those of 1F1B."""
        count = len(self.calls.homes)
        of_1f1b = [(count - segment) * self.calls.stages / count for segment in range(count)]
        return Preferences(tuple(max(1.0, ahead * most) for most in of_1f1b), (PATIENCE,) * count)

    def _changed(self) -> Preferences:
        """Returns the preferences of the best list with one to three changes."""
        ahead = [*self._best.ahead]
        patience = [*self._best.patience]
        for _ in range(self._random.choice([1, 1, 2, 3])):
            segment = self._random.randrange(len(ahead))
            if self._random.random() < 0.6:
                more = self._random.choice([-2, -1, 1, 2])
                ahead[segment] = max(1.0, min(ahead[segment], self.calls.microbatches) + more)
            else:
                patience[segment] = self._random.choice(PATIENCES)
        return Preferences(tuple(ahead), tuple(patience))
