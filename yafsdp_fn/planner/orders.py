"""Orders of calls for pipelines, written by search: forwards, backwards of inputs and of weights on each stage.

    Calls            what each call takes, and what a microbatch holds of memory meanwhile
    evaluate         when all calls of rows end, each as soon as its stage is free and what it takes has come
    least            no rows are faster under a memory
    Search           lists calls greedily by rules, then moves those on the critical path; the best rows so far

An evaluation takes a millisecond or two, since it knows calls and messages alone: programs are built, proved and
simulated from the rows that come out of it (synthesize.py).
"""

import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from yafsdp_fn.program.split import Call, Kind
from yafsdp_fn.schedules.messages import Pace

Rows = Sequence[Sequence[Call]]
KINDS: tuple[Kind, ...] = ("forward", "inputs", "weights")


class Calls(NamedTuple):
    """The calls of a step. Segments follow each other: one takes what the one before has made.

    homes: segment -> stage; forward, inputs, weights: seconds of each segment's calls
    message: seconds from one stage to another
    held: what a microbatch of a segment holds of its stage's memory, in any unit, from the begin of its forward to that
        of its backward of inputs; between: from then to the end of its backward of weights, more where a graph is made
        again
    """

    homes: tuple[int, ...]
    microbatches: int
    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    message: float
    held: tuple[float, ...]
    between: tuple[float, ...]

    @property
    def stages(self) -> int:
        return max(self.homes) + 1

    def of(self, stage: int) -> list[int]:
        """The segments of `stage`."""
        return [segment for segment, home in enumerate(self.homes) if home == stage]

    def work(self, stage: int) -> float:
        """Seconds of all calls of `stage`."""
        return self.microbatches * sum(self.forward[s] + self.inputs[s] + self.weights[s] for s in self.of(stage))

    @property
    def pace(self) -> Pace:
        """The order of messages follows from it."""
        return Pace(self._seconds, self.message)

    def _seconds(self, call: Call) -> float:
        seconds = {"forward": self.forward, "inputs": self.inputs, "weights": self.weights}.get(call.kind)
        return self.inputs[call.segment] + self.weights[call.segment] if seconds is None else seconds[call.segment]

    def gap(self, segment: int) -> float:
        """Seconds of the message between `segment` and the next one."""
        return self.message if self.homes[segment] != self.homes[segment + 1] else 0.0


class Run(NamedTuple):
    """Rows, run. seconds: until the last call ends; span: of the stage that takes longest, from its first call to its
    last; memory: the most that each stage holds"""

    seconds: float
    span: float
    memory: tuple[float, ...]

    def bubble(self, calls: Calls) -> float:
        """The part of `span` in which the busiest stage's calls do not run: as zero-bubble papers count it."""
        return 1 - max(map(calls.work, range(calls.stages))) / self.span


def evaluate(calls: Calls, rows: Rows, *, unawaited: Sequence[Call] = ()) -> Run:
    """Runs rows, in which a backward may be whole. unawaited: calls that begin without what another segment sends them.
    Raises ValueError where they wait for each other."""
    board = _Board(calls)
    for call in unawaited:
        board.need[board.code(call)] = -1
    return board.run([[board.code(call) for call in row] for row in rows])


def least(calls: Calls, memory: float, *, span: bool = False) -> tuple[float, str]:
    """The least seconds of any rows within `memory` on each stage, and the term that says so; nothing is recomputed.

    span: of the stage that takes longest, from its first call to its last
    """
    found: dict[str, float] = {}
    m, count = calls.microbatches, len(calls.homes)
    begins, turns = [0.0] * count, [0.0] * count
    for segment in range(1, count):
        begins[segment] = begins[segment - 1] + calls.forward[segment - 1] + calls.gap(segment - 1)
    turns[-1] = begins[-1] + calls.forward[-1]
    for segment in reversed(range(count - 1)):
        turns[segment] = turns[segment + 1] + calls.inputs[segment + 1] + calls.gap(segment)
    for stage in range(calls.stages):
        own, work = calls.of(stage), calls.work(stage)
        head = begins[own[0]]
        found[f"the work of stage {stage}"] = work + head * (not span)
        room, done = memory, 0.0
        for segment in sorted(own, key=lambda s: calls.held[s] / calls.forward[s]):
            times = min(m, room / calls.held[segment]) if calls.held[segment] else m
            room -= times * calls.held[segment]
            done += times * calls.forward[segment]
        turn = min(turns[segment] for segment in own) - head * span
        found[f"the fill of stage {stage}"] = turn + work - done
        kept = sum(
            calls.held[s] * (turns[s] + calls.inputs[s] - begins[s]) + calls.between[s] * calls.weights[s] for s in own
        )
        found[f"the memory of stage {stage}"] = m * kept / memory + head * (not span)
    by, most = max(found.items(), key=lambda term: term[1])
    return most, by


# ---- Calls as numbers: kind * segments * microbatches + segment * microbatches + microbatch.


class _Board:
    """Runs rows of numbers. ends: of the last run, number -> when the call ended; before: the call that let it begin"""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.size = len(calls.homes) * calls.microbatches
        self.seconds: list[float] = []
        self.need: list[int] = []  # the call of another segment that a call takes of, -1 for none
        self.delay: list[float] = []
        self.stage: list[int] = []
        m, last = calls.microbatches, len(calls.homes) - 1
        both = [a + b for a, b in zip(calls.inputs, calls.weights, strict=True)]
        for kind, seconds in enumerate((calls.forward, calls.inputs, calls.weights, both)):
            for segment, home in enumerate(calls.homes):
                other, gap = -1, 0.0
                if kind == 0 and segment > 0:
                    other, gap = (segment - 1) * m, calls.gap(segment - 1)
                elif kind in (1, 3) and segment < last:
                    other, gap = self.size + (segment + 1) * m, calls.gap(segment)
                self.need += [other + k if other >= 0 else -1 for k in range(m)]
                self.seconds += [seconds[segment]] * m
                self.delay += [gap] * m
                self.stage += [home] * m
        held, between = calls.held, calls.between
        each = [
            *held,
            *(b - h for h, b in zip(held, between, strict=True)),
            *(-b for b in between),
            *(-h for h in held),
        ]
        self.takes = [nbytes for nbytes in each for _ in range(m)]  # memory that it adds; what it frees, at its end
        self.ends: list[float] = []
        self.before: list[int] = []

    def code(self, call: Call) -> int:
        kind = KINDS.index(call.kind) if call.kind != "backward" else len(KINDS)
        return kind * self.size + call.segment * self.calls.microbatches + call.microbatch

    def call(self, code: int) -> Call:
        kind, left = divmod(code, self.size)
        return Call((*KINDS, "backward")[kind], *divmod(left, self.calls.microbatches))

    def run(self, rows: Sequence[Sequence[int]]) -> Run:
        need, delay, seconds, size = self.need, self.delay, self.seconds, self.size
        self.ends = ends = [-1.0] * (4 * size)
        self.before = before = [-1] * (4 * size)
        at, clock, waiting = [0] * len(rows), [0.0] * len(rows), dict[int, int]()
        todo = [*range(len(rows))]
        while todo:
            stage = todo.pop()
            row, k, now = rows[stage], at[stage], clock[stage]
            while k < len(row):
                code = row[k]
                cause = row[k - 1] if k else -1
                if (other := need[code]) >= 0:
                    if (came := ends[other]) < 0:
                        waiting[other] = stage
                        break
                    if (came := came + delay[code]) > now:
                        now, cause = came, other
                now += seconds[code]
                ends[code], before[code] = now, cause
                if code >= 3 * size:
                    code -= 2 * size  # who waits, waits for gradients of inputs
                    ends[code] = now
                    before[code] = cause
                if code < 2 * size and code in waiting:
                    todo.append(waiting.pop(code))
                k += 1
            at[stage], clock[stage] = k, now
        if waiting:
            raise ValueError(f"the calls wait for each other: stage {next(iter(waiting.values()))} for ever")
        firsts = [ends[row[0]] - seconds[row[0]] for row in rows]
        span = max(end - first for end, first in zip(clock, firsts, strict=True))
        return Run(max(clock), span, tuple(map(self.memory, rows)))

    def memory(self, row: Sequence[int]) -> float:
        """The most that the calls of a row hold at once."""
        now = most = 0.0
        takes = self.takes
        for code in row:
            now += takes[code]
            most = max(most, now)
        return most


# ---- Lists calls greedily: a stage that is free takes, of what has come, what its rules like best.


class _Rules(NamedTuple):
    """Rules of a list.

    caps: stage -> segment -> the most microbatches under way
    patience: stage -> the part of a backward of weights for which it is put off when something else comes meanwhile
    likes: stage -> segment -> how much a forward is liked, and a backward: what has come and is liked best is next
    """

    caps: list[dict[int, float]]
    patience: list[float]
    likes: list[dict[int, tuple[float, float]]]


def _listed(board: _Board, rules: _Rules, memory: float) -> list[list[int]] | None:
    """Rows by rules, None where memory leaves no way on."""
    calls, m, size = board.calls, board.calls.microbatches, board.size
    count, own = len(calls.homes), [calls.of(stage) for stage in range(calls.stages)]
    done = [0] * (3 * count)  # calls of each kind and segment
    # what later segments of a stage need to go on with one microbatch
    reserve = [sum(calls.held[t] for t in own[calls.homes[s]] if t > s) for s in range(count)]
    # what a graph that is made again takes more, one at a time at least
    again = [max(0.0, calls.between[s] - calls.held[s]) for s in range(count)]
    reserve = [reserve[s] + max(again[t] for t in own[calls.homes[s]]) for s in range(count)]
    ends = [math.inf] * (2 * size)
    used, free = [0.0] * calls.stages, [0.0] * calls.stages
    rows: list[list[int]] = [[] for _ in range(calls.stages)]
    agenda = [(0.0, stage) for stage in range(calls.stages)]
    while agenda:
        now, stage = heapq.heappop(agenda)
        if now < free[stage]:
            continue
        best, liked, soonest, blocked = -1, -math.inf, math.inf, False
        for s in own[stage]:
            forwards, inputs = done[s], done[count + s]
            for kind, may in enumerate((forwards < m and forwards - inputs < rules.caps[stage][s], inputs < forwards)):
                if not may:
                    continue
                code = kind * size + s * m + (inputs if kind else forwards)
                other = board.need[code]
                comes = ends[other] + board.delay[code] if other >= 0 else 0.0
                if comes > now:
                    soonest = min(soonest, comes)
                elif used[stage] + (again[s] if kind else calls.held[s] + reserve[s]) > memory + 1e-9:
                    blocked = True
                elif (likes := rules.likes[stage][s][kind]) > liked:
                    best, liked = code, likes
        pending = [s for s in own[stage] if done[2 * count + s] < done[count + s]]
        if best < 0 and pending:
            s = max(pending, key=lambda s: done[count + s] - done[2 * count + s])
            if blocked or soonest - now >= rules.patience[stage] * calls.weights[s]:
                best = 2 * size + s * m + done[2 * count + s]
        if best < 0:
            if soonest < math.inf:
                heapq.heappush(agenda, (soonest, stage))
            continue
        rows[stage].append(best)
        done[best // m] += 1
        used[stage] += board.takes[best]
        free[stage] = end = now + board.seconds[best]
        heapq.heappush(agenda, (end, stage))
        if best < 2 * size:
            ends[best] = end
            kind, s = divmod(best // m, count)
            if 0 <= (following := s + 1 - 2 * kind) < count:
                home = calls.homes[following]
                heapq.heappush(agenda, (max(free[home], end + board.delay[following * m + kind * size]), home))
    return rows if sum(done) == 3 * size else None


# ---- Search: rules at first, then moves of calls on the critical path.

Report = Callable[["Search"], None]
"""Called with a search whenever it has found better rows."""


class Search:
    """The best rows so far for `calls` within `memory` on each stage. It goes on where it was: see `run`.

    starts: rows to begin with, those of builders say; what does not fit is left out
    span: what is to be short is the longest span of a stage from its first call to its last, not the whole
    The same seed and numbers of moves come to the same rows, on any machine.

    rows: the best; seconds: of these; moves: how many were tried; least: seconds that no rows are below, and why
    """

    def __init__(self, calls: Calls, memory: float, *, starts: Sequence[Rows] = (), seed: int = 0, span: bool = False):
        self.calls, self.limit, self.span = calls, memory * (1 + 1e-9), span
        self.least = least(calls, memory, span=span)
        self.seconds, self.moves = math.inf, 0
        self._board, self._random = _Board(calls), random.Random(seed)
        self._best: list[list[int]] = []
        self._plain = self._all_plain()
        self._rules = math.inf, next(self._all_plain())
        self._now: tuple[float, list[list[int]]] = (math.inf, [])
        self._path: list[tuple[int, int]] = []  # the critical one of `_now`
        for rows in starts:
            self._offer(_halved(self._board, rows))

    @property
    def rows(self) -> list[list[Call]]:
        return [[self._board.call(code) for code in row] for row in self._best]

    @property
    def done(self) -> bool:
        """Nothing is faster."""
        return self.seconds <= self.least[0] * (1 + 1e-6)

    def run(self, moves: int, *, seconds: float = math.inf, report: Report | None = None) -> bool:
        """Tries so many moves more, fewer where the bound is met. Returns False where `seconds` were over first."""
        end, until = time.monotonic() + seconds, self.moves + moves
        while self.moves < until and not self.done:
            if time.monotonic() > end:
                return False
            before = self.seconds
            # a third of the moves are of rules; each of their rows is a start for the others
            (self._list if self.moves % 1000 < 333 or not self._best else self._move)()
            self.moves += 1
            if report is not None and self.seconds < before:
                report(self)
        return True

    def _measure(self, rows: list[list[int]]) -> float:
        """Seconds of rows, infinite where they do not fit or wait for each other."""
        try:
            run = self._board.run(rows)
        except ValueError:
            return math.inf
        fits = max(run.memory) <= self.limit
        return (run.span if self.span else run.seconds) if fits else math.inf

    def _offer(self, rows: list[list[int]]) -> float:
        seconds = self._measure(rows)
        if seconds < self.seconds:
            self.seconds, self._best = seconds, [[*row] for row in rows]
        return seconds

    # ---- rules

    def _list(self) -> None:
        """Lists rows by plain rules, one after the other, and then by changes of the best ones."""
        rules = next(self._plain, None) or self._changed(self._rules[1])
        rows = _listed(self._board, rules, self.limit)
        seconds = math.inf if rows is None else self._offer(rows)
        if seconds <= self._rules[0]:
            self._rules = seconds, rules
            if rows is not None and seconds < self._now[0]:
                self._now, self._path = (seconds, rows), []

    def _all_plain(self) -> Iterator[_Rules]:
        """Yields rules: as many microbatches under way as are on their way back, or more; backwards of weights at once
        or put off; of several segments the first ones or the last ones sooner."""
        calls, last = self.calls, len(self.calls.homes) - 1
        signs = [(0.0, 0.0)] if last < calls.stages else list(itertools.product((-1.0, 1.0), repeat=2))
        for slope, wait, more, (f, b) in itertools.product((2.0, 1.0, 1.5, math.inf), (0.25, 0.5, 1.0), (0, 1), signs):
            caps, likes = list[dict[int, float]](), list[dict[int, tuple[float, float]]]()
            for own in map(calls.of, range(calls.stages)):
                caps.append({s: max(1.0, slope * (last - s + 1) * calls.stages / (last + 1) + more) for s in own})
                likes.append({s: (1.0 + f * s / (last + 1), 10.0 + b * s / (last + 1)) for s in own})
            yield _Rules(caps, [wait] * calls.stages, likes)

    def _changed(self, rules: _Rules) -> _Rules:
        rng, stages = self._random, self.calls.stages
        caps, likes = [dict(each) for each in rules.caps], [dict(each) for each in rules.likes]
        patience = [*rules.patience]
        what, number, by, wait = rng.randrange(3), rng.random(), rng.choice([-2, -1, 1, 2]), rng.gauss(0, 0.3)
        sooner = rng.gauss(0, 3), rng.gauss(0, 3)
        for stage in range(stages) if rng.random() < 0.3 else [rng.randrange(stages)]:
            s = [*caps[stage]][int(number * len(caps[stage]))]
            if what == 0:
                caps[stage][s] = max(1.0, caps[stage][s] + by)
            elif what == 1:
                patience[stage] = min(1.2, max(0.0, patience[stage] + wait))
            else:
                likes[stage][s] = likes[stage][s][0] + sooner[0], likes[stage][s][1] + sooner[1]
        return _Rules(caps, patience, likes)

    # ---- moves

    def _move(self) -> None:
        """Moves one call: what the critical path waits for goes behind something else, or backwards of weights into a
        gap. Now and then a worse one is taken, the less the longer the search goes on."""
        rng, board = self._random, self._board
        if not self._now[1] or self.moves % 1000 == 333:
            self._now, self._path = (self._measure(self._best), [[*row] for row in self._best]), []
        seconds, rows = self._now
        if not self._path or self.moves % 100 == 33:
            self._measure(rows)
            self._path = self._critical(rows)
        stage, at, to = self._choice(rows)
        row = rows[stage]
        # one call, or those of its kind and segment in some microbatches that follow each other
        alike = range(row[at], row[at] + 1)
        if rng.random() < 0.3:
            first = row[at] // self.calls.microbatches * self.calls.microbatches
            ends = sorted(rng.choices(range(self.calls.microbatches), k=2))
            alike = range(first + ends[0], first + ends[1] + 1)
        changed = self._moved(row, reversed(alike) if to > at else alike, to - at)
        if changed == row or board.memory(changed) > self.limit:
            return
        others = [*rows]
        others[stage] = changed
        new = self._offer(others)
        heat = 2e-3 * seconds / (1 + self.moves / 500)
        if new <= seconds or (new < math.inf and rng.random() < math.exp((seconds - new) / heat)):
            self._now = new, others
            self._path = self._critical(others)

    def _choice(self, rows: list[list[int]]) -> tuple[int, int, int]:
        """The stage and place of a call, and the place where it is to go."""
        rng, size = self._random, self._board.size
        if self._path and rng.random() < 0.8:
            stage, at = rng.choice(self._path)
            if rows[stage][at] >= 2 * size:
                far = rng.choice([1, 2, 3, 5, 8, 13, 21, 34])
            else:
                far = rng.choice([1, 1, 1, 2, 2, 3, 5, 8]) * rng.choice([-1, -1, 1])
        else:
            stage = rng.randrange(len(rows))
            at = rng.randrange(len(rows[stage]))
            far = rng.choice([-8, -3, -2, -1, 1, 2, 3, 8, 20])
        return stage, at, min(len(rows[stage]) - 1, max(0, at + far))

    def _moved(self, row: list[int], codes: Iterable[int], far: int) -> list[int]:
        """The row with calls moved so far, those that may."""
        row = [*row]
        for code in codes:
            at = row.index(code)
            to = min(len(row) - 1, max(0, at + far))
            if self._in_order(row, at, to):
                row.insert(to, row.pop(at))
        return row

    def _in_order(self, row: list[int], at: int, to: int) -> bool:
        """Tells whether a call may go so far: not past another half of its own pass, nor past its kind of other
        microbatches."""
        size, m, code = self._board.size, self.calls.microbatches, row[at]
        same = code % size
        for other in row[to:at] if to < at else row[at + 1 : to + 1]:
            if other % size == same or other // m == code // m:
                return False
        return True

    def _critical(self, rows: list[list[int]]) -> list[tuple[int, int]]:
        """The calls on the critical path of the last run, as stage and place."""
        board = self._board
        place = {code: (stage, at) for stage, row in enumerate(rows) for at, code in enumerate(row)}
        lasts = [row[-1] for row in rows]
        if self.span:
            code = max(rows, key=lambda row: board.ends[row[-1]] - board.ends[row[0]] + board.seconds[row[0]])[-1]
        else:
            code = max(lasts, key=board.ends.__getitem__)
        found = []
        while code >= 0:
            found.append(place[code])
            code = board.before[code]
        return found


def _halved(board: _Board, rows: Rows) -> list[list[int]]:
    """Rows as numbers, whole backwards as two halves that follow each other."""
    out: list[list[int]] = []
    for row in rows:
        codes = [board.code(call) for call in row]
        halves = [[code - 2 * board.size, code - board.size] if code >= 3 * board.size else [code] for code in codes]
        out.append([code for each in halves for code in each])
    return out
