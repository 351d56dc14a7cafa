"""Orders of calls for pipelines, written by search: forwards, backwards of inputs and of weights on each stage.

    CallGraph            the seconds of each call, and the memory that a microbatch holds meanwhile
    evaluate         runs rows of calls: each begins as soon as its stage is free and its input has come
    Search           lists calls greedily, then moves calls on the critical path of the best rows

An evaluation takes a millisecond or two, since it knows calls and messages alone: programs are built, proved and
simulated from the rows that come out of it (synthesize.py).
"""

import heapq
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from yafsdp_fn.pipelines.messages import Pace
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.costs import Costs
from yafsdp_fn.program.ops import Backward, Forward, Send
from yafsdp_fn.program.split import Call, Kind
from yafsdp_fn.program.trace import Trace

Rows = Sequence[Sequence[Call]]
"""The calls of each stage, in order."""
KINDS: tuple[Kind, ...] = ("forward", "inputs", "weights")


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
        return Pace(self._seconds, self.message)

    def _seconds(self, call: Call) -> float:
        if call.kind == "backward":
            return self.inputs[call.segment] + self.weights[call.segment]
        seconds = {"forward": self.forward, "inputs": self.inputs, "weights": self.weights}
        return seconds[call.kind][call.segment]


class OrderRun(NamedTuple):
    """The result of a run. seconds: until the last call ends; memory: the most that each stage holds"""

    seconds: float
    memory: tuple[float, ...]


def evaluate(calls: CallGraph, rows: Rows) -> OrderRun:
    """Runs rows, in which a backward may be whole. Raises ValueError where calls wait for each other."""
    simulator = Simulator(calls)
    return simulator.run(simulator.codes(rows))


# ---- Calls are numbered by kind, segment and microbatch: a line has those of one kind and segment.
#
#     code = line * microbatches + microbatch          line = kind * segments + segment


class Simulator:
    """Runs rows of codes.

    seconds, takes: of each call; takes: memory, less than nothing where it frees some
    source: distance from a code to that of the call in another segment whose output it takes, 0 where there is none;
        delay: seconds of the message from there
    ends: when each call of the last run ended; causes: the call after which it could begin, -1 for none
    """

    def __init__(self, calls: CallGraph) -> None:
        self.calls = calls
        m = calls.microbatches
        count = len(calls.homes)
        self.size = count * m
        # of each line
        seconds = [*calls.forward, *calls.inputs, *calls.weights]
        between = map(operator.sub, calls.between, calls.held)
        takes = [*calls.held, *between, *map(operator.neg, calls.between)]
        gaps = [calls.message * (a != b) for a, b in itertools.pairwise(calls.homes)]
        nothing = [0] * count
        delay = [0.0, *gaps, *gaps, 0.0, *nothing]
        others = count - 1
        source = [0, *[-m] * others, *[m] * others, 0, *nothing]
        # of each call
        self.seconds = [value for value in seconds for _ in range(m)]
        self.takes: list[float] = [value for value in takes for _ in range(m)]
        self.delay = [value for value in delay for _ in range(m)]
        self.source = [value for value in source for _ in range(m)]
        self.ends: list[float] = []
        self.causes: list[int] = []

    def codes(self, rows: Rows) -> list[list[int]]:
        """Returns rows as codes. A whole backward is its first half, which takes as long as both."""
        calls = self.calls
        for call in itertools.chain.from_iterable(rows):
            if call.kind == "backward":
                code = self.code(call)
                self.seconds[code] = calls.inputs[call.segment] + calls.weights[call.segment]
                self.takes[code] = -calls.held[call.segment]
        return [[self.code(call) for call in row] for row in rows]

    def code(self, call: Call) -> int:
        kind = 1 if call.kind == "backward" else KINDS.index(call.kind)
        return kind * self.size + call.segment * self.calls.microbatches + call.microbatch

    def call(self, code: int) -> Call:
        kind, left = divmod(code, self.size)
        return Call(KINDS[kind], *divmod(left, self.calls.microbatches))

    def run(self, rows: Sequence[Sequence[int]]) -> OrderRun:
        """Runs rows. Raises ValueError where calls wait for each other."""
        seconds = self.seconds
        delay = self.delay
        source = self.source
        self.ends = ends = [-1.0] * (3 * self.size)
        self.causes = causes = [-1] * (3 * self.size)
        begun = [0] * len(rows)
        clock = [0.0] * len(rows)
        waiting: dict[int, int] = {}  # call -> the stage that waits for it
        ready = [*range(len(rows))]
        while ready:
            stage = ready.pop()
            now = clock[stage]
            row = rows[stage]
            for k in range(begun[stage], len(row)):
                code = row[k]
                cause = row[k - 1] if k else -1
                if source[code]:
                    other = code + source[code]
                    if ends[other] < 0:
                        waiting[other] = stage
                        break
                    arrives = ends[other] + delay[code]
                    if arrives > now:
                        now = arrives
                        cause = other
                now += seconds[code]
                ends[code] = now
                causes[code] = cause
                begun[stage] = k + 1
                if code in waiting:
                    ready.append(waiting.pop(code))
            clock[stage] = now
        if waiting:
            raise ValueError(f"the calls wait for each other: stage {next(iter(waiting.values()))} for ever")
        return OrderRun(max(clock), tuple(map(self.memory, rows)))

    def memory(self, row: Sequence[int]) -> float:
        """Returns the most that the calls of a row hold at once."""
        return max(itertools.accumulate(self.takes[code] for code in row))


# ---- Lists calls greedily: a free stage takes the last line of those whose input has come, so backwards before
# forwards. A backward of weights is put off where little else is to come.

PATIENCE = 0.2
"""The part of a backward of weights for which it is put off when something else comes meanwhile."""
AHEAD = (2.0, 1.0, math.inf)
"""Microbatches under way on a segment, of those of 1F1B: a list is written for each."""


def _listed(simulator: Simulator, ahead: float, memory: float) -> list[list[int]] | None:
    """Lists rows. Returns None where memory leaves no way on. ahead: as in `AHEAD`"""
    calls = simulator.calls
    m = simulator.calls.microbatches
    count = len(calls.homes)
    own = [calls.of(stage) for stage in range(calls.stages)]
    caps = [max(1.0, ahead * (count - s) * calls.stages / count) for s in range(count)]  # microbatches under way
    done = [0] * (3 * count)  # calls of each line
    ends: dict[int, float] = {}
    used = [0.0] * calls.stages
    free = [0.0] * calls.stages
    rows: list[list[int]] = [[] for _ in own]
    agenda = [(0.0, stage) for stage in range(calls.stages)]
    while agenda:
        now, stage = heapq.heappop(agenda)
        if now < free[stage]:
            continue
        best = -1
        soonest = math.inf
        blocked = False
        for s in own[stage]:
            under_way = done[s] - done[count + s]
            lines = [s] * (done[s] < m and under_way < caps[s]) + [count + s] * (under_way > 0)
            for line in lines:
                code = line * m + done[line]
                source = simulator.source[code]
                arrives = 0.0
                if source:
                    arrives = ends.get(code + source, math.inf) + simulator.delay[code]
                if arrives > now:
                    soonest = min(soonest, arrives)
                elif used[stage] + simulator.takes[code] > memory:
                    blocked = True
                else:
                    best = max(best, line)
        if best < 0:
            waiting = {s: done[count + s] - done[2 * count + s] for s in own[stage]}  # backwards of weights
            late = max(waiting, key=waiting.__getitem__)
            if waiting[late] > 0 and (blocked or soonest - now >= PATIENCE * calls.weights[late]):
                best = 2 * count + late
        if best >= 0:
            code = best * m + done[best]
            rows[stage].append(code)
            done[best] += 1
            used[stage] += simulator.takes[code]
            free[stage] = ends[code] = soonest = now + simulator.seconds[code]
            step = 1 if best < count else -1  # to the segment that takes its output
            following = best % count + step
            if best < 2 * count and 0 <= following < count:
                home = calls.homes[following]
                arrives = ends[code] + simulator.delay[(best + step) * m]
                heapq.heappush(agenda, (max(free[home], arrives), home))
        if soonest < math.inf:
            heapq.heappush(agenda, (soonest, stage))
    return rows if sum(done) == 3 * simulator.size else None


# ---- Search: lists at first, then moves of calls on the critical path.


class Search:
    """The best rows so far for `calls` within `memory` on each stage. `run` continues the search.

    starts: rows to begin with, such as those of builders; rows that do not fit are left out
    The same seed and number of moves find the same rows, on any machine.

    rows: the best; seconds: of these; moves: how many were tried; simulator: of rows
    """

    def __init__(self, calls: CallGraph, memory: float, *, starts: Iterable[Rows] = (), seed: int = 0) -> None:
        self.calls = calls
        self.memory = memory * (1 + 1e-9)
        self.seconds = math.inf
        self.moves = 0
        self.simulator = Simulator(calls)
        self._random = random.Random(seed)
        self._best: list[list[int]] = []
        self._path: list[tuple[int, int]] = []  # the critical one of these: stages and places
        self._ahead = iter(AHEAD)
        for rows in starts:
            self._offer([self._halved(row) for row in rows])

    @property
    def rows(self) -> list[list[Call]]:
        return [[self.simulator.call(code) for code in row] for row in self._best]

    def run(self, moves: int) -> None:
        """Tries so many moves more: greedy lists at first, then moves of calls."""
        for _ in range(moves):
            ahead = next(self._ahead, None)
            rows = self._moved() if ahead is None else _listed(self.simulator, ahead, self.memory)
            if rows is not None:
                self._offer(rows)
            self.moves += 1

    def _halved(self, row: Iterable[Call]) -> list[int]:
        """Returns a row as codes; a whole backward gives those of its two halves."""
        codes = []
        for call in row:
            codes.append(self.simulator.code(call))
            if call.kind == "backward":
                codes.append(codes[-1] + self.simulator.size)
        return codes

    def _offer(self, rows: list[list[int]]) -> None:
        """Adopts rows that are no slower than the best, unless they wait for each other or do not fit."""
        try:
            run = self.simulator.run(rows)
        except ValueError:
            return
        seconds = max(map(self.length, rows))
        if seconds <= self.seconds and max(run.memory) <= self.memory:
            self.seconds = seconds
            self._best = rows
            self._path = self._critical_path(rows)

    def length(self, row: Sequence[int]) -> float:
        """Returns the seconds of a row in the last run: what is searched for is the order whose longest row is
        shortest."""
        return self.simulator.ends[row[-1]]

    def _moved(self) -> list[list[int]] | None:
        """Returns the best rows with a call on the critical path in another place: a backward of weights later, into a
        gap. None where it would pass another half of its pass or another microbatch of its line."""
        if not self._best:
            return None
        rng = self._random
        size = self.simulator.size
        stage, at = rng.choice(self._path)
        row = self._best[stage]
        code = row[at]
        far = rng.choice([1, 2, 3, 5, 8, 13, 21, 34])
        if code < 2 * size:  # others wait for it
            far = rng.choice([1, 1, 1, 2, 2, 3, 5, 8]) * rng.choice([-1, -1, 1])
        to = min(len(row) - 1, max(0, at + far))
        passed = row[to:at] if to < at else row[at + 1 : to + 1]
        if not passed:
            return None
        m = self.calls.microbatches
        for other in passed:
            if other % size == code % size or other // m == code // m:
                return None
        changed = [*row]
        changed.insert(to, changed.pop(at))
        return [*self._best[:stage], changed, *self._best[stage + 1 :]]

    def _critical_path(self, rows: list[list[int]]) -> list[tuple[int, int]]:
        """Returns the calls on the critical path of the last run, which was of `rows`, as stages and places."""
        places: dict[int, tuple[int, int]] = {}
        for stage, row in enumerate(rows):
            places |= {code: (stage, at) for at, code in enumerate(row)}
        code = max(rows, key=self.length)[-1]
        path = []
        while code >= 0:
            path.append(places[code])
            code = self.simulator.causes[code]
        return path
