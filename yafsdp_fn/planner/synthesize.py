"""Writes programs that no builder has: what `search` found, changed visit by visit, unit by unit, and call by call.

    a step without stages    a configuration (stage_config.py), changed
    a pipeline               the points' orders, with as few recomputed layers on each stage as fit; of the fastest, by
                             turns
                                 the order of forwards, backwards of inputs and of weights (orders.py), in the memory
                                 that stages have left
                                 a change of one stage's configuration: what it recomputes, gathers again, reduces
    a program that fits in prediction is proved and simulated; the fastest is kept

The same seed and number of moves write the same program; seconds only stop it early.
"""

import dataclasses
import functools
import math
import operator
import random
import time
from collections.abc import Callable, Iterable, Sequence

from yafsdp_fn.pipelines import orders
from yafsdp_fn.planner.bound import Bound, bound
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.footprint import gib
from yafsdp_fn.planner.orders import CallGraph, Rows, Search, evaluate
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
from yafsdp_fn.program.split import Assignment
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


class Synthesis:
    """The best program so far that begins with `points`, best builder first. It goes on where it was: see `run`.

    whole: the step of the first point; builder: the outcome of its program; least: its bound
    best, outcome: what was found
    """

    def __init__(self, trace: Trace, points: Sequence[Point], cluster: Cluster, budget: int, seed: int) -> None:
        self.trace = trace
        self.points = points
        self.cluster = cluster
        self.budget = budget
        self.rng = random.Random(seed)
        self.moves = 0
        first = points[0]
        self.whole = first.whole(trace)
        self.least = bound(self.whole, cluster, budget)
        builder = first.schedule()(self.whole)
        self.builder = self.outcome = Outcome(simulate(builder, cluster).seconds, peaks_of(builder))
        self.best = Design(first)

    def move(self) -> None:
        """Tries one program more."""
        raise NotImplementedError

    def result(self) -> tuple[Design, Outcome]:
        """Returns the best program and its outcome."""
        return self.best, self.outcome

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
            self.move()
            self.moves += 1
            now = self.outcome.seconds
            if report is not None and now < before:
                gap = self.least.gap(now)
                saved = 1 - now / self.builder.seconds
                report(f"move {self.moves}: {now:.4g} s, {saved:+.1%} saved, {gap:.1%} above the bound")
        design, found = self.result()
        program = verify(design(design.point.whole(self.trace)))
        return Synthesized(
            program=program,
            step_s=found.seconds,
            peak_bytes=max(found.peaks),
            least=bound(program.trace, self.cluster, self.budget),
            point=self.points[0],
            builder_s=self.builder.seconds,
            moves=self.moves,
            early=early,
            design=design,
            search=self,
        )


def synthesis(trace: Trace, points: Sequence[Point], cluster: Cluster, budget: int, seed: int = 0) -> Synthesis:
    """Begins a search with these points, all on stages or all without. budget: bytes per rank"""
    kind = StepSynthesis if points[0].order is None else PipelineSynthesis
    return kind(trace, points, cluster, budget, seed)


# ---- A step without stages.


class StepSynthesis(Synthesis):
    """The best configuration so far. `now`: the one that is changed next"""

    def __init__(self, trace: Trace, points: Sequence[Point], cluster: Cluster, budget: int, seed: int) -> None:
        super().__init__(trace, points, cluster, budget, seed)
        self.changes = Changes(self.whole, self.rng)
        self.measured = functools.cache(
            lambda config: outcome_of(lambda: config.program(self.whole), cluster, budget),
        )
        self.config = self.now = self.first = StageConfig.of(points[0], self.whole)
        self.outcome = self.measured(self.first)
        self.now_s = self.outcome.seconds

    def move(self) -> None:
        """Measures one configuration more. A slower one may be the next to be changed, the less the longer it goes."""
        config = self.changes.of(self.now)
        found = self.measured(config)
        seconds = found.seconds
        heat = 0.003 * self.outcome.seconds * math.exp(-(self.moves + 1) / 500)
        slower = seconds - self.now_s
        if slower <= 0 or (seconds < math.inf and self.rng.random() < math.exp(-slower / heat)):
            self.now = config
            self.now_s = seconds
        simpler = len(config.recomputed) < len(self.config.recomputed)
        if seconds < self.outcome.seconds or (seconds == self.outcome.seconds and simpler):
            self.config = config
            self.outcome = found

    def result(self) -> tuple[Design, Outcome]:
        """Returns the best program without changes that save nothing."""
        best = self.config
        enough = self.outcome.seconds * (1 + 1e-5)
        for field in StageConfig._fields:
            without = best._replace(**{field: getattr(self.first, field)})
            best = without if self.measured(without).seconds <= enough else best
        return Design(self.points[0], (best,)), self.measured(best)


# ---- A pipeline.

TURN = 250
"""Moves of orders in a turn, which takes about as long as a program is built and simulated."""


@dataclasses.dataclass
class CutCandidate:
    """A way to cut the step, and its best program so far.

    room: memory that calls may fill on each stage, as `CallGraph` counts it; search: for orders within it
    """

    design: Design
    whole: Trace
    changes: list[Changes]
    outcome: Outcome = NOTHING
    room: Sequence[float] = ()
    search: Search | None = None


class PipelineSynthesis(Synthesis):
    """The best program so far. starts: points to begin with; cut: the one whose program is the fastest then"""

    def __init__(self, trace: Trace, points: Sequence[Point], cluster: Cluster, budget: int, seed: int) -> None:
        super().__init__(trace, points, cluster, budget, seed)
        self.starts = iter(dict.fromkeys(point._replace(remat=0) for point in points))
        self.cut: CutCandidate | None = None

    def move(self) -> None:
        """Begins with a point, while there are others; then changes the order or a configuration, by turns."""
        point = next(self.starts, None)
        if point is not None:
            self._begin(point)
        elif self.cut is not None and self.moves % 2:
            self._change(self.cut)
        elif self.cut is not None:
            self._reorder(self.cut)

    def _begin(self, point: Point) -> None:
        """Begins a cut with as few recomputed layers on each stage as fit, the first ones of its segments."""
        order = point.order
        assert order is not None
        whole = point.whole(self.trace)
        rows = order.rows(whole)
        parts = [stage_trace(whole, stage, row) for stage, row in enumerate(rows)]
        configs = [StageConfig.of(point._replace(order=None), part) for part in parts]
        cut = CutCandidate(Design(point), whole, [Changes(part, self.rng) for part in parts])
        layers = [remat.layer_visits(part) for part in parts]
        few = [-1] * len(parts)
        enough = [*map(len, layers)]
        while any(high - low > 1 for low, high in zip(few, enough, strict=True)):
            counts = [(low + high + 1) // 2 for low, high in zip(few, enough, strict=True)]
            tried = _recomputing(configs, layers, counts)
            for stage, peak in enumerate(peaks_of(self._design(cut, tried, rows)(whole))):
                if peak <= self.budget:
                    enough[stage] = counts[stage]
                else:
                    few[stage] = counts[stage]
        fits = self._try(cut, _recomputing(configs, layers, enough), rows)
        if fits and (self.cut is None or cut.outcome < self.cut.outcome):
            self.cut = cut

    def _design(self, cut: CutCandidate, configs: tuple[StageConfig, ...], rows: Rows) -> Design:
        return cut.design._replace(
            configs=configs, rows=tuple(map(tuple, rows)), pace=self._calls(cut.whole, configs).pace
        )

    def _calls(self, whole: Trace, configs: Iterable[StageConfig]) -> CallGraph:
        recomputed = frozenset[int]().union(*(config.recomputed for config in configs))
        return CallGraph.of_step(whole, self.cluster, recomputed)

    def _try(self, cut: CutCandidate, configs: tuple[StageConfig, ...], rows: Rows) -> bool:
        """Adopts a program as the cut's best if it is faster, or in less memory; returns whether it did. One that does
        not fit leaves orders less room on its stages."""
        whole = cut.whole
        same = configs == cut.design.configs
        rows = orders.whole_if_idle([[*row] for row in rows], orders.split_of(whole))
        design = self._design(cut, configs, rows)
        found = outcome_of(lambda: design(whole), self.cluster, self.budget)
        held = evaluate(self._calls(whole, configs), rows).memory
        room = [max(1.0, mine + self.budget - peak) for mine, peak in zip(held, found.peaks, strict=False)]
        if (found.seconds, sum(found.peaks)) >= (cut.outcome.seconds, sum(cut.outcome.peaks)):
            if math.isinf(found.seconds) and room and same and cut.search is not None:
                less = [min(old, 0.999 * new) for old, new in zip(cut.room, room, strict=True)]
                self._search(cut, less)
            return False
        cut.design = design
        cut.outcome = found
        if not same or cut.search is None:
            self._search(cut, room)
        if found.seconds < self.outcome.seconds:
            self.best = design
            self.outcome = found
        return True

    def _search(self, cut: CutCandidate, room: Sequence[float]) -> None:
        """Begins a search for orders of the cut's configurations within `room`."""
        calls = self._calls(cut.whole, cut.design.configs)
        parts = [1 / room[home] for home in calls.homes]  # memory in parts of the room of its stage
        calls = calls._replace(
            held=tuple(map(operator.mul, calls.held, parts)),
            between=tuple(map(operator.mul, calls.between, parts)),
        )
        seed = self.rng.randrange(2**32)
        cut.room = room
        cut.search = Search(calls, 1.0, starts=[cut.design.rows], seed=seed)

    def _reorder(self, cut: CutCandidate) -> None:
        search = cut.search
        assert search is not None
        before = search.seconds
        search.run(TURN)
        if search.seconds < before:
            self._try(cut, cut.design.configs, search.rows)

    def _change(self, cut: CutCandidate) -> None:
        """Changes the configuration of a stage; all stages update at the same place."""
        configs = [*cut.design.configs]
        stage = self.rng.randrange(len(configs))
        configs[stage] = cut.changes[stage].of(configs[stage])
        update = configs[stage].update
        self._try(cut, tuple(config._replace(update=update) for config in configs), cut.design.rows)


def _recomputing(
    configs: Sequence[StageConfig], layers: Sequence[Sequence[int]], counts: Sequence[int]
) -> tuple[StageConfig, ...]:
    """Returns the configurations with so many recomputed layers, the first ones."""
    each = zip(configs, layers, counts, strict=True)
    return tuple(config._replace(recomputed=frozenset(those[:count])) for config, those, count in each)
