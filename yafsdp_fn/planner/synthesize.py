"""Writes programs that no builder has: what `search` found, changed visit by visit, unit by unit, and call by call.

    begin     with each point, with as few recomputed layers as fit, on each stage where there are stages; the fastest
              one goes on, of cuts into stages several, which take turns
    change    the configuration (stage_config.py) of a stage, or of the step without stages: what it recomputes,
              gathers again, reduces
    reorder   by turns with that, in a pipeline: its forwards, backwards of inputs and of weights (orders.py), in the
              memory that stages have left

    a program that fits in prediction is proved and simulated; the fastest is kept

The same seed and number of moves write the same program; seconds only stop it early.
"""

import dataclasses
import math
import operator
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from yafsdp_fn.pipelines import orders
from yafsdp_fn.planner.bound import Bound, bound
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.footprint import gib
from yafsdp_fn.planner.orders import CallGraph, Search, evaluate
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.space import Point
from yafsdp_fn.planner.stage_config import (
    NOTHING,
    Changes,
    Design,
    Outcome,
    StageConfig,
    outcome_of,
    peaks_of,
)
from yafsdp_fn.program.program import Program, stage_trace
from yafsdp_fn.program.split import Assignment, CallRows
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import remat
from yafsdp_fn.util.words import counted

Report = Callable[[str], None]
"""Called with a line, whenever there is something better."""


@dataclasses.dataclass(frozen=True)
class Synthesized:
    """A program that synthesis made. It is a schedule; `more` continues the search.

    program: proved; step_s, peak_bytes: as simulated and predicted; least: the bound of its step
    point, builder_s: the best builder, from which the search began, and the seconds of its step
    design: its configurations and orders, as a schedule: `design.configs`, a field for each choice, and `design.rows`
    moves: changes that were tried; early: whether the time was over before all of them

    >>> written = ya.planner.search(trace, "a100-80g", synthesize=60, moves=4).synthesized
    >>> written.step_s <= written.builder_s
    True
    """

    program: Program
    step_s: float
    peak_bytes: int
    least: Bound
    point: Point
    builder_s: float
    moves: int
    early: bool
    design: Design
    search: "Synthesis" = dataclasses.field(repr=False, compare=False)

    def __call__(self, trace: Trace) -> Program:
        return self.design(trace)

    @property
    def mesh(self) -> dict[str, int]:
        """The arguments of `ya.mesh` for it."""
        return self.design.point.mesh_arguments

    @property
    def stages(self) -> Assignment | None:
        """The argument of `ya.init` and `ya.shard`, where it has pipeline stages."""
        return self.design.point.assignment(self.search.trace)

    def more(self, moves: int, *, seconds: float = math.inf, report: Report | None = None) -> "Synthesized":
        """Continues the search for `moves` more. k and then m moves give the same program as k + m at once."""
        return self.search.run(moves, seconds=seconds, report=report)

    def __str__(self) -> str:
        saved = 1 - self.step_s / self.builder_s
        builder = f"{self.point} ({self.builder_s:.4g} s)"
        against = f"{saved:.1%} shorter than {builder}" if saved > 0 else f"nothing shorter than {builder} was found"
        lines = [
            f"written: {self.step_s:.4g} s a step, {gib(self.peak_bytes)} GiB, {against}",
            f"  {self.least.against(self.step_s)}",
            f"  {counted(self.moves, 'move')}" + ", stopped early by its seconds" * self.early,
        ]
        return "\n".join(lines)


TURN = 25
"""Moves of orders in a turn, which takes about as long as a program is built and simulated."""
CUTS = 6
FASTEST = 3
"""Cuts into stages that take turns, those that begin with the fastest programs; and how many of them go on after
`ROUNDS` turns."""
ROUNDS = 8


@dataclasses.dataclass
class Candidate:
    """The step on a point's mesh and cut, and its best program so far.

    changes: of the configuration of each stage, of the one without stages
    now, now_s: the configurations that are changed next, which may be slower than the best ones, and their seconds
    room: memory that calls may fill on each stage, as `CallGraph` counts it; search: for orders within it. Without
        stages there is neither
    starts: configurations that are tried before random changes, without stages
    """

    design: Design
    whole: Trace
    changes: list[Changes]
    outcome: Outcome = NOTHING
    now: tuple[StageConfig, ...] = ()
    now_s: float = math.inf
    room: Sequence[float] = ()
    search: Search | None = None
    starts: Iterator[StageConfig] = dataclasses.field(default_factory=lambda: iter(()))


class Synthesis:
    """The best program so far that begins with `points`, all on stages or all without, best builder first. It goes on
    where it was: see `run`.

    builder: the outcome of the first point's program; least: the bound of its step; best, outcome: what was found
    candidates: those that go on, of steps without stages one, whose programs were the fastest as they began
    """

    def __init__(self, trace: Trace, points: Sequence[Point], cluster: Cluster, budget: int, seed: int = 0) -> None:
        self.trace = trace
        self.points = points
        self.cluster = cluster
        self.budget = budget
        self.rng = random.Random(seed)
        self.moves = 0
        first = points[0]
        whole = first.whole(trace)
        self.least = bound(whole, cluster, budget)
        builder = first.schedule()(whole)
        self.builder = self.outcome = Outcome(simulate(builder, cluster).seconds, peaks_of(builder))
        self.best = Design(first)
        self._starts = iter(dict.fromkeys(point._replace(remat=0) for point in points))
        self._turns = 0
        self.candidates: list[Candidate] = []

    def run(self, moves: int, *, seconds: float = math.inf, report: Report | None = None) -> Synthesized:
        """Tries so many moves more, fewer where the bound is met; `seconds` stop it early."""
        began = time.monotonic()
        until = self.moves + moves
        early = False
        while self.moves < until and self.outcome.seconds > self.least.seconds * (1 + 1e-4):
            early = time.monotonic() - began > seconds
            if early:
                break
            before = self.outcome.seconds
            self._move()
            self.moves += 1
            now = self.outcome.seconds
            if report is not None and now < before:
                gap = self.least.gap(now)
                saved = 1 - now / self.builder.seconds
                report(f"move {self.moves}: {now:.4g} s, {saved:+.1%} saved, {gap:.1%} above the bound")
        program = verify(self.best(self.best.point.whole(self.trace)))
        return Synthesized(
            program=program,
            step_s=self.outcome.seconds,
            peak_bytes=max(self.outcome.peaks),
            least=bound(program.trace, self.cluster, self.budget),
            point=self.points[0],
            builder_s=self.builder.seconds,
            moves=self.moves,
            early=early,
            design=self.best,
            search=self,
        )

    # ---- moves

    def _move(self) -> None:
        """Begins with a point, while there are others; then changes the configuration of a candidate, on stages its
        order by turns."""
        point = next(self._starts, None)
        if point is not None:
            self._begin(point)
            return
        if self._turns in (0, ROUNDS * CUTS):
            self.candidates.sort(key=lambda candidate: candidate.outcome)
            go_on = 1 if self.points[0].order is None else FASTEST if self._turns else CUTS
            del self.candidates[go_on:]
        if not self.candidates:
            return
        turn, which = divmod(self._turns, len(self.candidates))
        self._turns += 1
        candidate = self.candidates[which]
        if candidate.search is not None and turn % 2 == 0:
            self._reorder(candidate, candidate.search)
        else:
            self._change(candidate)

    def _begin(self, point: Point) -> None:
        """Begins with as few recomputed layers on each stage as fit, the first ones of its segments."""
        whole = point.whole(self.trace)
        rows: CallRows = [] if point.order is None else point.order.rows(whole)
        parts = [stage_trace(whole, stage, row) for stage, row in enumerate(rows)] or [whole]
        configs = [StageConfig.of(point._replace(order=None), part) for part in parts]
        candidate = Candidate(Design(point), whole, [Changes(part, self.rng) for part in parts])
        layers = [remat.layer_visits(part) for part in parts]
        few = [-1] * len(parts)
        enough = [*map(len, layers)]
        while any(high - low > 1 for low, high in zip(few, enough, strict=True)):
            counts = [(low + high + 1) // 2 for low, high in zip(few, enough, strict=True)]
            tried = _recomputing(configs, layers, counts)
            for stage, peak in enumerate(peaks_of(self._design(candidate, tried, rows)(whole))):
                if peak <= self.budget:
                    enough[stage] = counts[stage]
                else:
                    few[stage] = counts[stage]
        candidate.now = _recomputing(configs, layers, enough)
        candidate.now_s = self._try(candidate, candidate.now, rows)
        if candidate.now_s < math.inf:
            self.candidates.append(candidate)
            if not rows:
                candidate.starts = candidate.changes[0].starts(candidate.now[0], self.cluster, self.budget)

    def _change(self, candidate: Candidate) -> None:
        """Changes the configuration of a stage; all stages update at the same place. What is slower may be changed
        next, the less the longer it goes."""
        configs = [*candidate.now]
        stage = self.rng.randrange(len(configs))
        configs[stage] = next(candidate.starts, None) or candidate.changes[stage].of(configs[stage])
        update = configs[stage].update
        changed = tuple(config._replace(update=update) for config in configs)
        seconds = self._try(candidate, changed, candidate.design.rows)
        slower = seconds - candidate.now_s
        heat = 0.003 * self.outcome.seconds * math.exp(-(self.moves + 1) / 500)
        if slower <= 0 or (seconds < math.inf and self.rng.random() < math.exp(-slower / heat)):
            candidate.now = changed
            candidate.now_s = seconds

    def _reorder(self, candidate: Candidate, search: Search) -> None:
        before = search.seconds
        search.run(TURN)
        if search.seconds < before:
            self._try(candidate, candidate.design.configs, search.rows)

    # ---- what a move comes to

    def _try(self, candidate: Candidate, configs: tuple[StageConfig, ...], rows: CallRows) -> float:
        """Adopts a program as the candidate's best if it is faster, or in less memory; returns its seconds."""
        whole = candidate.whole
        same = configs == candidate.design.configs
        if rows:
            rows = orders.whole_if_idle(rows, orders.split_of(whole))
        design = self._design(candidate, configs, rows)
        found = outcome_of(lambda: design(whole), self.cluster, self.budget)
        before = candidate.outcome
        better = (found.seconds, sum(found.peaks)) < (before.seconds, sum(before.peaks))
        if better:
            candidate.design = design
            candidate.outcome = found
            if found.seconds < self.outcome.seconds:
                self.best = design
                self.outcome = found
        if rows and better and not same:
            self._search(candidate, self._room(whole, design, found.peaks))
        elif rows and same and found.peaks and math.isinf(found.seconds):
            # it does not fit: orders of the same configurations have less room
            room = self._room(whole, design, found.peaks)
            self._search(candidate, [min(old, 0.999 * new) for old, new in zip(candidate.room, room, strict=True)])
        return found.seconds

    def _room(self, whole: Trace, design: Design, peaks: Sequence[int]) -> list[float]:
        """Returns the memory that calls may fill on each stage: what they hold in a program with these peaks, and what
        that leaves of the budget."""
        held = evaluate(self._calls(whole, design.configs), design.rows).memory
        return [max(1.0, mine + self.budget - peak) for mine, peak in zip(held, peaks, strict=True)]

    def _search(self, candidate: Candidate, room: Sequence[float]) -> None:
        """Begins a search for orders of the candidate's configurations within `room`."""
        calls = self._calls(candidate.whole, candidate.design.configs)
        parts = [1 / room[home] for home in calls.homes]  # memory in parts of the room of its stage
        calls = calls._replace(
            held=tuple(map(operator.mul, calls.held, parts)),
            between=tuple(map(operator.mul, calls.between, parts)),
        )
        seed = self.rng.randrange(2**32)
        candidate.room = room
        candidate.search = Search(calls, 1.0, starts=[candidate.design.rows], seed=seed)

    def _design(self, candidate: Candidate, configs: tuple[StageConfig, ...], rows: CallRows) -> Design:
        design = candidate.design._replace(configs=configs)
        if not rows:
            return design
        pace = self._calls(candidate.whole, configs).pace
        return design._replace(rows=rows, pace=pace)

    def _calls(self, whole: Trace, configs: Iterable[StageConfig]) -> CallGraph:
        recomputed = frozenset[int]().union(*(config.recomputed for config in configs))
        return CallGraph.of_step(whole, self.cluster, recomputed)


def _recomputing(
    configs: Sequence[StageConfig], layers: Sequence[Sequence[int]], counts: Sequence[int]
) -> tuple[StageConfig, ...]:
    """Returns the configurations with so many recomputed layers, the first ones."""
    each = zip(configs, layers, counts, strict=True)
    return tuple(config._replace(recomputed=frozenset(those[:count])) for config, those, count in each)
