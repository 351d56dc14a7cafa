"""Orders of calls for pipelines, written by search: forwards, backwards of inputs and of weights on each stage.

    CallGraph        the seconds of each call, and the memory that a microbatch holds meanwhile
    evaluate         runs rows of calls: each begins as soon as its stage is free and its input has come
    listed           lists calls greedily, by preferences
    Search           changes the preferences of the best list, and shifts calls on the critical path of the best rows

A list takes milliseconds and a shift less, since they know calls and messages alone: programs are built, proved and
simulated from the rows that come out of it (synthesize.py).
"""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from yafsdp_fn.pipelines.messages import Pace
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.costs import Costs
from yafsdp_fn.program.ops import Backward, Forward, Send
from yafsdp_fn.program.split import Call, CallRows, Kind
from yafsdp_fn.program.trace import Trace

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
        split = trace.cut
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


class OrderRun(NamedTuple):
    """The result of a run of rows. seconds: until the last call ends; memory: the most that each stage holds

    begins, ends: of each stage, those of its first call and of its last
    """

    seconds: float
    memory: tuple[float, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]


NONE = -1
ABSENT = -2
"""Numbers of no call: the source of one that takes no output, and of one whose source is not among the calls."""


class NumberedCalls:
    """Calls by number, so that orders of them run fast.

    calls: the call of each number; numbers: of each call; seconds, takes: of each number, as in `graph`
    sources: the call whose output each takes; delays: seconds of the message from there
    causes: of the last run: the call after which each could begin, its source or the one before it on its stage
    """

    def __init__(self, graph: CallGraph, calls: Iterable[Call]) -> None:
        self.graph = graph
        self.calls = [*calls]
        self.numbers = {call: number for number, call in enumerate(self.calls)}
        self.seconds = [*map(graph.seconds, self.calls)]
        self.takes = [*map(graph.takes, self.calls)]
        self.sources: list[int] = []
        self.delays: list[float] = []
        self.causes: list[int] = []
        outputs = {
            (call.kind == "forward", call.segment, call.microbatch): number
            for call, number in self.numbers.items()
            if call.kind != "weights"
        }
        for call in self.calls:
            segment = graph.source(call)
            source = NONE
            crosses = False
            if segment is not None:
                source = outputs.get((call.kind == "forward", segment, call.microbatch), ABSENT)
                crosses = graph.homes[segment] != graph.homes[call.segment]
            self.sources.append(source)
            self.delays.append(graph.message * crosses)

    def rows_of(self, rows: CallRows) -> list[list[int]]:
        """Returns rows of calls as rows of numbers."""
        return [[self.numbers[call] for call in row] for row in rows]

    def no_ends(self) -> list[float]:
        """Returns the end of each call before any has begun, and after them those of `ABSENT` and `NONE`."""
        return [*[math.inf] * len(self.calls), math.inf, 0.0]

    def arrives(self, number: int, ends: Sequence[float]) -> float:
        """Returns when what a call takes is there: never, if its source has not ended."""
        return ends[self.sources[number]] + self.delays[number]

    def run(self, rows: Sequence[Sequence[int]]) -> OrderRun:
        """Runs rows. Raises ValueError where calls wait for each other."""
        ends = self.no_ends()
        self.causes = [NONE] * len(self.calls)
        begins = [0.0] * len(rows)
        clock = [0.0] * len(rows)
        begun = [0] * len(rows)
        waiting: dict[int, int] = {}  # call -> the stage that waits for it
        ready = [*range(len(rows))]
        while ready:
            stage = ready.pop()
            row = rows[stage]
            now = clock[stage]
            for at in range(begun[stage], len(row)):
                number = row[at]
                arrives = self.arrives(number, ends)
                if arrives == math.inf:
                    waiting[self.sources[number]] = stage
                    break
                if arrives > now:
                    now = arrives
                    self.causes[number] = self.sources[number]
                elif at:
                    self.causes[number] = row[at - 1]
                if at == 0:
                    begins[stage] = now
                now += self.seconds[number]
                ends[number] = now
                begun[stage] = at + 1
                if number in waiting:
                    ready.append(waiting.pop(number))
            clock[stage] = now
        if waiting:
            raise ValueError(f"the calls wait for each other: stage {next(iter(waiting.values()))} for ever")
        return OrderRun(max(clock), tuple(map(self.memory, rows)), tuple(begins), tuple(clock))

    def memory(self, row: Sequence[int]) -> float:
        """Returns the most that the calls of a row hold at once."""
        return max(itertools.accumulate(self.takes[number] for number in row))


def evaluate(calls: CallGraph, rows: CallRows) -> OrderRun:
    """Runs rows, in which a backward may be whole. Raises ValueError where calls wait for each other."""
    numbered = NumberedCalls(calls, itertools.chain.from_iterable(rows))
    return numbered.run(numbered.rows_of(rows))


# ---- Lists calls greedily: a free stage takes the last segment's of those whose input has come, backwards before
# forwards. A backward of weights is put off where something else is soon to come.


class Preferences(NamedTuple):
    """The preferences of a list, by segment.

    ahead: the most microbatches under way, at least one
    patience: the part of a backward of weights for which it is put off when something else comes meanwhile
    """

    ahead: tuple[float, ...]
    patience: tuple[float, ...]


def listed(numbered: NumberedCalls, prefers: Preferences, memory: float) -> list[list[int]] | None:
    """Lists rows of numbers. Returns None where memory leaves no way on. numbered: all calls of a step, forwards first,
    then backwards of inputs"""
    calls = numbered.graph
    own = [calls.of(stage) for stage in range(calls.stages)]
    done: Counter[tuple[str, int]] = Counter()  # calls of a kind and segment
    ends = numbered.no_ends()
    used = [0.0] * calls.stages
    free = [0.0] * calls.stages
    rows: list[list[int]] = [[] for _ in own]
    agenda = [(0.0, stage) for stage in range(calls.stages)]
    while agenda:
        now, stage = heapq.heappop(agenda)
        if now < free[stage]:
            continue
        # what may come next
        candidates: list[Call] = []
        for segment in own[stage]:
            forwards = done["forward", segment]
            backwards = done["inputs", segment]
            if forwards < calls.microbatches and forwards - backwards < prefers.ahead[segment]:
                candidates.append(Call("forward", segment, forwards))
            if forwards > backwards:
                candidates.append(Call("inputs", segment, backwards))
        best: int | None = None
        soonest = math.inf
        blocked = False
        for number in sorted(numbered.numbers[call] for call in candidates):
            arrives = numbered.arrives(number, ends)
            if arrives > now:
                soonest = min(soonest, arrives)
            elif used[stage] + numbered.takes[number] > memory:
                blocked = True
            else:
                best = number
        if best is None:
            late = max(own[stage], key=lambda segment: done["inputs", segment] - done["weights", segment])
            long = soonest - now >= prefers.patience[late] * calls.weights[late]
            if done["inputs", late] > done["weights", late] and (blocked or long):
                best = numbered.numbers[Call("weights", late, done["weights", late])]
        if best is not None:
            call = numbered.calls[best]
            rows[stage].append(best)
            done[call.kind, call.segment] += 1
            used[stage] += numbered.takes[best]
            free[stage] = ends[best] = soonest = now + numbered.seconds[best]
            # who takes its output
            target = call.segment + (1 if call.kind == "forward" else -1)
            if call.kind != "weights" and 0 <= target < len(calls.homes):
                home = calls.homes[target]
                arrives = numbered.arrives(numbered.numbers[call._replace(segment=target)], ends)
                heapq.heappush(agenda, (max(free[home], arrives), home))
        if soonest < math.inf:
            heapq.heappush(agenda, (soonest, stage))
    whole = sum(map(len, rows)) == len(numbered.calls)
    return rows if whole else None


# ---- Search: lists at first by what is usually good, then by other preferences; and calls of the best rows in other
# places.

AHEAD = (2.0, 1.0, math.inf)
"""Microbatches under way on a segment, of those of 1F1B: a list is made for each at first."""
PATIENCE = 0.2
PATIENCES = (0.0, 0.1, PATIENCE, 0.5, 1.0)
"""Patience at first, and what it is changed to."""
SHIFTS = 60
"""Calls that are shifted, one after the other, after each list."""
LATER = (1, 2, 3, 5, 8, 13, 21, 34)
NEARBY = (-8, -5, -3, -2, -2, -1, -1, -1, 1, 1, 2, 3)
"""Distances by which a backward of weights is shifted, to a later gap, and other calls, for which calls wait."""


class Search:
    """The best rows so far for `calls` within `memory` on each stage. `run` continues the search.

    starts: rows to begin with, such as those of builders; rows that do not fit are left out
    The same seed and number of moves find the same rows, on any machine.

    seconds: of the best rows; moves: how many lists were made, with shifts of calls after each
    """

    def __init__(self, calls: CallGraph, memory: float, *, starts: Iterable[CallRows] = (), seed: int = 0) -> None:
        self.calls = calls
        self.memory = memory * (1 + 1e-9)
        self.seconds = math.inf
        self.moves = 0
        every = itertools.product(KINDS, range(len(calls.homes)), range(calls.microbatches))
        self._numbered = NumberedCalls(calls, itertools.starmap(Call, every))
        self._rows: list[list[int]] = []  # the best ones, by numbers
        self._path: list[int] = []  # the critical one of these
        self._random = random.Random(seed)  # of lists, which are the same with shifts between them as without
        self._shifts = random.Random(seed)
        self._first = iter([self._usual(ahead) for ahead in AHEAD])
        self._best = self._usual(1.0)  # the preferences of the best list, and its seconds
        self._best_s = math.inf
        for rows in starts:
            self._offer(self._numbered.rows_of([_in_halves(row) for row in rows]))

    @property
    def rows(self) -> CallRows:
        """The best rows."""
        return [[self._numbered.calls[number] for number in row] for row in self._rows]

    def run(self, moves: int) -> None:
        """Makes so many lists more, and shifts calls after each."""
        for _ in range(moves):
            self._list(next(self._first, None) or self._changed())
            for _ in range(SHIFTS):
                self._shift()
            self.moves += 1

    def length(self, begin: float, end: float) -> float:
        """Returns the length of a row: what is searched for is the order whose longest row is shortest."""
        return end

    def _offer(self, rows: list[list[int]]) -> float:
        """Adopts rows that are no slower than the best; returns their seconds, infinite where they do not fit or wait
        for each other."""
        if max(map(self._numbered.memory, rows)) > self.memory:
            return math.inf
        try:
            run = self._numbered.run(rows)
        except ValueError:
            return math.inf
        lengths = [*map(self.length, run.begins, run.ends)]
        seconds = max(lengths)
        if seconds <= self.seconds:
            self.seconds = seconds
            self._rows = rows
            self._path = self._waited_for(rows[lengths.index(seconds)][-1])
        return seconds

    # ---- lists

    def _list(self, prefers: Preferences) -> None:
        rows = listed(self._numbered, prefers, self.memory)
        if rows is None:
            return
        seconds = self._offer(rows)
        if seconds <= self._best_s:
            self._best = prefers
            self._best_s = seconds

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

    # ---- calls in other places

    def _shift(self) -> None:
        """Offers the best rows with a call of the critical path in another place of its row, unless it would pass
        another half of its pass or another microbatch of its kind and segment."""
        if not self._rows:
            return
        moved = self._shifts.choice(self._path)
        call = self._numbered.calls[moved]
        stage = self.calls.homes[call.segment]
        row = self._rows[stage]
        at = row.index(moved)
        to = at + self._shifts.choice(LATER if call.kind == "weights" else NEARBY)
        to = min(max(to, 0), len(row) - 1)
        passed = row[to:at] if to < at else row[at + 1 : to + 1]
        for number in passed:
            kind, segment, microbatch = self._numbered.calls[number]
            if segment == call.segment and (kind == call.kind or microbatch == call.microbatch):
                return
        if passed:
            shifted = [*row]
            shifted.insert(to, shifted.pop(at))
            self._offer([*self._rows[:stage], shifted, *self._rows[stage + 1 :]])

    def _waited_for(self, last: int) -> list[int]:
        """Returns the calls for which `last` waited in the last run, one for the other, and itself."""
        path: list[int] = []
        while last != NONE:
            path.append(last)
            last = self._numbered.causes[last]
        return path


def _in_halves(row: Iterable[Call]) -> list[Call]:
    """Returns a row with two halves in place of each whole backward."""
    halves: list[Call] = []
    for call in row:
        if call.kind == "backward":
            halves += (call._replace(kind="inputs"), call._replace(kind="weights"))
        else:
            halves.append(call)
    return halves
