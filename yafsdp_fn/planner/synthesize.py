"""Writes programs that no builder has: what `search` found, changed visit by visit, unit by unit, and call by call.

    a step without stages    a configuration (stage_config.py), changed
    a pipeline               each cut into stages begins with the rows of each order of that shape, and with as few
                             recomputed layers on each stage as fit; then by turns
                                 the order of forwards, backwards of inputs and of weights (orders.py), in the memory
                                 that stages have left
                                 a change of one stage's configuration: what it recomputes, gathers again, reduces
    a program that fits in prediction is proved and simulated; the fastest is kept

The same seed and number of moves write the same program; seconds only stop it early.
`Synthesized.save` puts a search into
a file, from which it goes on.
"""

import dataclasses
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from yafsdp_fn.planner.bound import Bound, bound
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.orders import CallGraph, Rows, Search, evaluate
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.space import Order, Point
from yafsdp_fn.planner.stage_config import (
    NOTHING,
    Changes,
    Design,
    Outcome,
    StageConfig,
    StepWithoutStages,
    differences,
    outcome,
    peaks_of,
)
from yafsdp_fn.program.program import Program, stage_trace
from yafsdp_fn.program.split import Assignment
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import pipelines, remat
from yafsdp_fn.util import disk, strict_json
from yafsdp_fn.util.schema import Limits, shown, typed
from yafsdp_fn.util.words import counted

Report = Callable[[str], None]
"""Called with a line, whenever there is something better."""


@dataclasses.dataclass(frozen=True)
class Synthesized:
    """A program that synthesis made. It is a schedule; `more` continues the search.

    program: proved; step_s, peak_bytes: as simulated and predicted; least: the bound of its step
    point, builder_s: the best builder, from which the search began, and the seconds of its step
    differences: from that builder's program, and what each saves
    design: its configurations and orders, as a schedule
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
    differences: tuple[str, ...]
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
        order = self.design.point.order
        return None if order is None else order.assignment(self.search.trace)

    def more(self, moves: int, *, seconds: float = math.inf, report: Report | None = None) -> "Synthesized":
        """Continues the search for `moves` more. k and then m moves give the same program as k + m at once."""
        return self.search.run(moves, seconds=seconds, report=report)

    def save(self, path: str | Path) -> None:
        """Writes the search to a file (JSON), for `ya.planner.search(..., resume=path)` of the same step."""
        self.search.save(path)

    def __str__(self) -> str:
        saved = 1 - self.step_s / self.builder_s
        builder = f"{self.point} ({self.builder_s:.4g} s)"
        against = f"{saved:.1%} shorter than {builder}" if saved > 0 else f"nothing shorter than {builder} was found"
        lines = [
            f"written: {self.step_s:.4g} s a step, {self.peak_bytes / 2**30:.1f} GiB, {against}",
            f"  {self.least.against(self.step_s)}",
            *(f"  {line}" for line in self.differences),
            f"  {counted(self.moves, 'move')}" + ", stopped early by its seconds" * self.early,
        ]
        return "\n".join(lines)


# ---- Files: a search is its seed, and what the programs came to that it has measured.

VERSION = 2


class StoredOutcome(NamedTuple):
    """An outcome in a file: no seconds where the program does not fit."""

    seconds: Annotated[float, Limits(0, 1e12)] | None
    peaks: tuple[Annotated[int, Limits(0, 2**60)], ...]


class File(NamedTuple):
    """A search. points, builder_s, budget: equal for the search that continues it."""

    version: int
    points: tuple[str, ...]
    builder_s: float
    budget: int
    seed: int
    moves: Annotated[int, Limits(0, 10**6)]
    seen: tuple[StoredOutcome, ...]

    @staticmethod
    def read(path: Path) -> "File":
        try:
            given = strict_json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON that Synthesized.save writes: {error}") from error
        if not isinstance(given, dict) or given.get("version") != VERSION:
            raise ValueError(f"{path}: expected what Synthesized.save writes, version {VERSION}")
        try:
            return typed(File, given)  # type: ignore[no-any-return]
        except ValueError as error:
            raise ValueError(f"{path}: {str(error).lstrip('.: ')}") from error


class Synthesis:
    """The best program so far that begins with `points`, best builder first. It goes on where it was: see `run`.

    resume: a file of `save`, where the search is to go on. Raises ValueError where that is of another search.
    """

    def __init__(
        self,
        trace: Trace,
        points: Iterable[Point],
        cluster: Cluster,
        budget: int,
        seed: int = 0,
        resume: str | Path | None = None,
    ) -> None:
        self.points = [*points]
        self.cluster = cluster
        self.budget = budget
        self.trace = trace
        first = self.points[0]
        whole = first.whole(trace)
        builder = first.schedule()(whole)
        self.builder = Outcome(simulate(builder, cluster).seconds, peaks_of(builder))
        self.least = bound(whole, cluster, budget)
        self.moves = 0
        self.seed = seed
        self._seen = list[Outcome]()
        self._file = resume
        self._replay = deque[Outcome]()
        if resume is not None:
            file = self._same(File.read(Path(resume)))
            self.seed = file.seed
            self._replay += [Outcome(math.inf if s is None else s, peaks) for s, peaks in file.seen]
        rng = random.Random(self.seed)
        self._work: StepWithoutStages | Pipelines
        if first.order is None:
            self._work = StepWithoutStages(first, whole, cluster, budget, rng, self.measure)
        else:
            self._work = Pipelines(self, rng)
        if resume is not None:
            self._go(file.moves, math.inf, None)  # what programs come to is in the file
            self._check_resumed()
            self._file = None

    def measure(self, make: Callable[[], Program]) -> Outcome:
        """Returns the result for the program that `make` builds: from the file, or measured now."""
        if self._file is not None and not self._replay:
            raise ValueError(f"{self._file}: seen: expected as many programs as its moves measure: begin anew")
        found = self._replay.popleft() if self._replay else outcome(make, self.cluster, self.budget)
        self._seen.append(found)
        return found

    def run(self, moves: int, *, seconds: float = math.inf, report: Report | None = None) -> Synthesized:
        """Tries so many moves more, fewer where the bound is met; `seconds` stop it early."""
        early = self._go(moves, seconds, report)
        program, design, found, said = self._result()
        return Synthesized(
            program,
            found.seconds,
            max(found.peaks),
            bound(program.trace, self.cluster, self.budget),
            self.points[0],
            self.builder.seconds,
            said,
            self.moves,
            early,
            design,
            self,
        )

    def _result(self) -> tuple[Program, Design, Outcome, tuple[str, ...]]:
        """Returns the best program, proved, and how it came about."""
        design, found, said = self._work.result()
        return verify(design(design.point.whole(self.trace))), design, found, said

    def _go(self, moves: int, seconds: float, report: Report | None) -> bool:
        """Moves, and tells whether seconds were over first."""
        began = time.monotonic()
        until = self.moves + moves
        work = self._work
        now = work.outcome.seconds
        while self.moves < until and now > self.least.seconds * (1 + 1e-4):
            if time.monotonic() - began > seconds:
                return True
            before = now
            work.move()
            self.moves += 1
            now = work.outcome.seconds
            if report is not None and now < before:
                gap = self.least.gap(now)
                saved = 1 - now / self.builder.seconds
                report(f"move {self.moves}: {now:.4g} s, {saved:+.1%} saved, {gap:.1%} above the bound")
        return False

    def save(self, path: str | Path) -> None:
        """Writes what the search has seen, as JSON."""
        seen = [StoredOutcome(None if math.isinf(seconds) else seconds, peaks) for seconds, peaks in self._seen]
        points = tuple(map(str, self.points))
        file = File(VERSION, points, self.builder.seconds, self.budget, self.seed, self.moves, tuple(seen))
        disk.replace(Path(path), f"{json.dumps(file._asdict())}\n".encode())

    def _same(self, file: File) -> File:
        """Returns a file of this search. Raises ValueError for one of another step, cluster, memory, stages or
        runners-up."""
        ours = {"points": tuple(map(str, self.points)), "builder_s": self.builder.seconds, "budget": self.budget}
        for field, value in ours.items():
            theirs = getattr(file, field)
            if theirs != value:
                raise ValueError(
                    f"{self._file} is of another search, whose {field!r} is {shown(theirs)}, here {value}: go on "
                    "from it with the same step, cluster, memory, stages and runners-up"
                )
        stages = len(self.builder.peaks)
        for at, (seconds, peaks) in enumerate(file.seen):
            if len(peaks) != stages and (peaks or seconds is not None):
                raise ValueError(
                    f"{self._file}: seen[{at}].peaks: expected the bytes of {stages} stages, got {shown(peaks)}"
                )
        return file

    def _check_resumed(self) -> None:
        """Raises ValueError where the file is of another version's search, or its best program takes other seconds or
        bytes."""
        if self._replay:
            raise ValueError(
                f"{self._file}: a search of this version does not measure the programs of the file: begin anew"
            )
        try:
            program, _, said, _ = self._result()
        except (ValueError, Refused) as error:
            raise ValueError(f"{self._file}: seen: the best program of the file is none: {error}") from error
        found = Outcome(simulate(program, self.cluster).seconds, peaks_of(program))
        if found != said:
            raise ValueError(
                f"{self._file}: seen: its best program takes {found.seconds:.6g} s and {max(found.peaks):,} bytes, not "
                f"{said.seconds:.6g} s and {max(said.peaks):,}: begin anew"
            )


# ---- A pipeline.

INSIDES = 2
"""Schedules of stages with which cuts begin, those of the best points."""
CUTS = 6
FASTEST = 3
"""Cuts that take turns, those that begin with the fastest programs; and how many of them go on after `ROUNDS` turns."""
ROUNDS = 8
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


class Pipelines:
    """The best program so far for a pipeline."""

    def __init__(self, owner: Synthesis, rng: random.Random) -> None:
        self.owner = owner
        self.rng = rng
        self.turn = 0
        self.best = Design(owner.points[0])
        self.outcome = owner.builder
        self.starts = self._starts()
        self.cuts = list[CutCandidate]()

    def _starts(self) -> Iterator[Point]:
        """Yields points to begin with: the builders' own orders, then others, on cuts of other shapes."""
        orders = dict[Point, Order]()  # of the first point with each schedule of stages
        for point in self.owner.points:
            if point.order is not None:
                orders.setdefault(point._replace(order=None, remat=0), point.order)
        found = dict[Point, None]()
        for inside, order in [*orders.items()][:INSIDES]:
            shapes = [(order.name, order.per_stage), *((name, 2) for name in pipelines.V_SHAPED)]
            shapes += [("one_f_one_b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4)]
            for name, per_stage in shapes:
                if per_stage * order.stages <= len(self.owner.trace.visits):
                    found[inside._replace(order=order._replace(name=name, per_stage=per_stage))] = None
        return iter(found)

    def move(self) -> None:
        """Begins a cut, while there are others; then changes the order or a configuration of one, by turns."""
        point = next(self.starts, None)
        if point is not None:
            self._begin(point)
            return
        if self.turn in (0, ROUNDS * CUTS):
            self.cuts = sorted(self.cuts, key=lambda cut: cut.outcome)[: FASTEST if self.turn else CUTS]
        if not self.cuts:
            return
        turn, which = divmod(self.turn, len(self.cuts))
        self.turn += 1
        if turn % 2:
            self._change(self.cuts[which])
        else:
            self._reorder(self.cuts[which])

    def _begin(self, point: Point) -> None:
        """Begins a cut with as few recomputed layers on each stage as fit, the first ones of its segments."""
        order = point.order
        assert order is not None
        try:
            whole = point.whole(self.owner.trace)
            rows = pipelines.ORDERS[order.name](pipelines.split_of(whole), whole.microbatches)
            parts = [stage_trace(whole, stage, row) for stage, row in enumerate(rows)]
            configs = [StageConfig.of(point._replace(order=None), part) for part in parts]
        except ValueError:
            return
        cut = CutCandidate(Design(point), whole, [Changes(part, self.owner.cluster, self.rng) for part in parts])
        layers = [remat.layer_visits(part) for part in parts]
        few = [-1] * len(parts)
        enough = [*map(len, layers)]
        while any(high - low > 1 for low, high in zip(few, enough, strict=True)):
            counts = [(low + high + 1) // 2 for low, high in zip(few, enough, strict=True)]
            tried = _recomputing(configs, layers, counts)
            for stage, peak in enumerate(peaks_of(self._design(cut, tried, rows)(whole))):
                if peak <= self.owner.budget:
                    enough[stage] = counts[stage]
                else:
                    few[stage] = counts[stage]
        if self._try(cut, _recomputing(configs, layers, enough), rows):
            self.cuts.append(cut)

    def _design(self, cut: CutCandidate, configs: tuple[StageConfig, ...], rows: Rows) -> Design:
        return cut.design._replace(
            configs=configs, rows=tuple(map(tuple, rows)), pace=self._calls(cut.whole, configs).pace
        )

    def _calls(self, whole: Trace, configs: Iterable[StageConfig]) -> CallGraph:
        recomputed = frozenset[int]().union(*(config.recomputed for config in configs))
        return CallGraph.of_step(whole, self.owner.cluster, recomputed)

    def _try(self, cut: CutCandidate, configs: tuple[StageConfig, ...], rows: Rows) -> bool:
        """Adopts a program as the cut's best if it is faster, or in less memory; returns whether it did. One that does
        not fit leaves orders less room on its stages."""
        whole = cut.whole
        same = configs == cut.design.configs
        rows = pipelines.whole_if_idle([[*row] for row in rows], pipelines.split_of(whole))
        design = self._design(cut, configs, rows)
        found = self.owner.measure(lambda: design(whole))
        held = evaluate(self._calls(whole, configs), rows).memory
        room = [max(1.0, mine + self.owner.budget - peak) for mine, peak in zip(held, found.peaks, strict=False)]
        if (found.seconds, sum(found.peaks)) >= (cut.outcome.seconds, sum(cut.outcome.peaks)):
            if math.isinf(found.seconds) and room and same and cut.search is not None:
                self._search(cut, [min(old, 0.999 * new) for old, new in zip(cut.room, room, strict=True)])
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
        held = tuple(nbytes * part for nbytes, part in zip(calls.held, parts, strict=True))
        between = tuple(nbytes * part for nbytes, part in zip(calls.between, parts, strict=True))
        seed = self.rng.randrange(2**32)
        cut.room = room
        cut.search = Search(calls._replace(held=held, between=between), 1.0, starts=[cut.design.rows], seed=seed)

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

    def result(self) -> tuple[Design, Outcome, tuple[str, ...]]:
        """Returns the best program, its outcome, and what it does otherwise than the best builder's."""
        return self.best, self.outcome, tuple(self._differences() if self.best.configs else ())

    def _differences(self) -> Iterator[str]:
        first = self.owner.points[0]
        ours = self.best
        owner = self.owner
        shapes = _shape(ours.point), _shape(first)
        if shapes[0] != shapes[1]:
            yield f"{shapes[0]}, not {shapes[1]}"
        again = [len(config.recomputed) for config in ours.configs]
        if any(count != first.remat for count in again):
            yield f"recomputes {', '.join(map(str, again))} layers of its stages, not {first.remat}"
        program = ours(ours.point.whole(owner.trace))
        alike: dict[str, list[str]] = {}
        for part, config in zip(program.by_stage, ours.configs, strict=True):
            theirs = StageConfig.of(first, part.trace)._replace(recomputed=config.recomputed)
            for _, words in differences(config, theirs, part.trace):
                alike.setdefault(words, []).append(f"{part.trace.stage}")
        for words, stages in alike.items():
            where = "every stage" if len(stages) == len(again) else f"stage {', '.join(stages)}"
            yield f"{where} {words}"
        before = simulate(first.program(owner.trace), owner.cluster)
        yield f"bubble {simulate(program, owner.cluster).bubble:.1%}, not {before.bubble:.1%}"
        kinds = {"forward": "F", "inputs": "I", "weights": "W", "backward": "B"}
        for stage in (0, len(ours.rows) - 1):
            row = ours.rows[stage]
            words = " ".join(f"{kinds[kind]}{segment}.{microbatch}" for kind, segment, microbatch in row[:24])
            yield f"stage {stage}: {words}{' ...' * (len(row) > 24)}"


def _recomputing(
    configs: Sequence[StageConfig], layers: Sequence[Sequence[int]], counts: Sequence[int]
) -> tuple[StageConfig, ...]:
    """Returns the configurations with so many recomputed layers, the first ones."""
    each = zip(configs, layers, counts, strict=True)
    return tuple(config._replace(recomputed=frozenset(those[:count])) for config, those, count in each)


def _shape(point: Point) -> str:
    order = point.order
    assert order is not None
    if order.per_stage == 1:
        return "1 segment a stage"
    return f"{order.per_stage} segments a stage, {'V-shaped' if order.name in pipelines.V_SHAPED else 'in a loop'}"
