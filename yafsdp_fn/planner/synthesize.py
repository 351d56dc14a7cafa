"""Writes programs that no builder has: what `search` found, changed visit by visit, unit by unit, and call by call.

    a step without stages    a draft (drafts.py), changed
    a pipeline               each cut into stages begins with the rows of each order that lies so, and with as few
                             recomputed layers on each stage as fit; then by turns
                                 the order of forwards, backwards of inputs and of weights (orders.py), in the memory
                                 that stages have left
                                 a change of one stage's draft: what it recomputes, gathers again, reduces, updates
    a program that fits in prediction is proved and simulated; the fastest is kept

The same seed and number of moves write the same program; seconds only stop it early. `Written.save` puts a search into
a file, from which it goes on.
"""

import dataclasses
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from yafsdp_fn.planner.bound import Bound, bound, seconds_of
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.costs import groups, phases
from yafsdp_fn.planner.drafts import Changes, Draft, OneStage, Seen, differences, peaks_of, seen
from yafsdp_fn.planner.orders import Calls, Search, evaluate
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.space import Order, Point
from yafsdp_fn.program.ops import Backward, Forward, Send
from yafsdp_fn.program.program import Program, part_of
from yafsdp_fn.program.split import Assignment, Call
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import pipelines, remat
from yafsdp_fn.schedules.builders import Schedule
from yafsdp_fn.schedules.messages import UNIT, Pace
from yafsdp_fn.util import disk, strict_json
from yafsdp_fn.util.schema import Within, shown, typed_at
from yafsdp_fn.util.words import counted

Report = Callable[[str], None]
"""Called with a line, whenever there is something better."""
Rows = Sequence[Sequence[Call]]
Moves, Seconds = Annotated[int, Within(0, 10**6)], Annotated[float, Within(0, 1e12)] | None
Peaks = tuple[Annotated[int, Within(0, 2**60)], ...]
"""Fields of a file of a search."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A program that was written, and how. It is a schedule, and goes on with `more`.

    program: proved; step_s, peak_bytes: as simulated and predicted; least: that no program is below
    point, builder_s: the best builder's, with which it began
    differences: what it does otherwise, and what each saves
    draft: of a step without stages
    drafts, rows, made_of, pace: of a pipeline: what stages do, their calls, the point that cuts it, how long calls take
    moves: changes that were tried; early: whether seconds were over before all of them

    >>> written = ya.planner.search(trace, "a100-80g", synthesize=60, moves=4).written
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
    draft: Draft | None = None
    drafts: tuple[Draft, ...] = ()
    rows: tuple[tuple[Call, ...], ...] = ()
    made_of: Point | None = None
    pace: Pace = UNIT
    search: "Synthesis | None" = dataclasses.field(default=None, repr=False, compare=False)

    def __call__(self, trace: Trace) -> Program:
        if self.draft is not None:
            return self.draft.program(trace)
        if not self.rows:
            return self.point.schedule()(trace)
        return _staged(self.rows, self.drafts, self.pace)(trace)

    @property
    def mesh(self) -> dict[str, int]:
        """The arguments of `ya.mesh` for it."""
        return (self.made_of or self.point).mesh_arguments

    @property
    def stages(self) -> Assignment | None:
        """The argument of `ya.init` and `ya.shard`, where it has pipeline stages."""
        order = (self.made_of or self.point).order
        return None if order is None or self.search is None else order.assignment(self.search.trace)

    def more(self, moves: int, *, seconds: float = math.inf, report: Report | None = None) -> "Written":
        """Goes on for so many moves more, from where it was: k and then m come to what k + m do."""
        assert self.search is not None
        return self.search.run(moves, seconds=seconds, report=report)

    def save(self, path: str | Path) -> None:
        """Writes the search to a file (JSON), for `ya.planner.search(..., resume=path)` of the same step."""
        assert self.search is not None
        self.search.save(path)

    def __str__(self) -> str:
        saved = 1 - self.step_s / self.builder_s
        lines = [
            f"written: {self.step_s:.4g} s a step, {self.peak_bytes / 2**30:.1f} GiB, "
            f"{saved:.1%} shorter than {self.point} ({self.builder_s:.4g} s)",
            f"  {self.least.against(self.step_s)}",
            *(f"  {line}" for line in self.differences),
            f"  {counted(self.moves, 'move')}" + ", stopped early by its seconds" * self.early,
        ]
        return "\n".join(lines)


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
        self.points, self.cluster, self.budget, self.trace = [*points], cluster, budget, trace
        whole = self.points[0].whole(trace)
        self.builder_s = simulate(self.points[0].program(trace), cluster).seconds
        self.least = bound(whole, cluster, budget)
        self.moves, self._seen = 0, list[Seen]()
        self.seed, moves, known = (seed, 0, list[Seen]()) if resume is None else self._kept(Path(resume))
        self._resume, self._replay, rng = resume, deque(known), random.Random(self.seed)
        if self.points[0].order is None:
            self._work: OneStage | _Stages = OneStage(self.points[0], whole, cluster, budget, rng, self.look)
        else:
            self._work = _Stages(self, rng)
        if resume is not None:
            self._go(moves, math.inf, None)  # what programs come to is in the file
            self._check_resumed()
            self._resume = None

    def _check_resumed(self) -> None:
        """Raises ValueError where the search that a file tells of is not this one, or its best program takes other
        seconds or bytes."""
        if self._replay:
            raise ValueError(
                f"{self._resume}: a search of this version does not look at the programs of the file: begin anew"
            )
        try:
            best = self._work.result()
            found = simulate(best["program"], self.cluster).seconds, max(peaks_of(best["program"]))
        except (ValueError, Refused) as error:
            raise ValueError(f"{self._resume}: seen: the best program of the file is none: {error}") from error
        if found != (said := (best["step_s"], best["peak_bytes"])):
            raise ValueError(
                f"{self._resume}: seen: its best program takes {found[0]:.6g} s and {found[1]:,} bytes, not "
                f"{said[0]:.6g} s and {said[1]:,}: begin anew"
            )

    def look(self, find: Callable[[], Seen]) -> Seen:
        """Returns what `find` finds, or has found when the file was written."""
        if self._resume is not None and not self._replay:
            raise ValueError(f"{self._resume}: seen: expected as many programs as its moves look at: begin anew")
        self._seen.append(self._replay.popleft() if self._replay else find())
        return self._seen[-1]

    def run(self, moves: int, *, seconds: float = math.inf, report: Report | None = None) -> Written:
        """Tries so many moves more, fewer where the bound is met; `seconds` stop it early."""
        early = self._go(moves, seconds, report)
        found = self._work.result()
        return Written(
            **found,
            least=bound(found["program"].trace, self.cluster, self.budget),
            point=self.points[0],
            builder_s=self.builder_s,
            moves=self.moves,
            early=early,
            search=self,
        )

    def _go(self, moves: int, seconds: float, report: Report | None) -> bool:
        began, until, work = time.monotonic(), self.moves + moves, self._work
        while self.moves < until and work.seconds > self.least.seconds * (1 + 1e-4):
            if time.monotonic() - began > seconds:
                return True
            before = work.seconds
            work.move()
            self.moves += 1
            if report is not None and work.seconds < before:
                gap, saved = self.least.gap(work.seconds), 1 - work.seconds / self.builder_s
                report(f"move {self.moves}: {work.seconds:.4g} s, {saved:+.1%} saved, {gap:.1%} above the bound")
        return False

    # ---- files: a search is its seed, and what the programs that it looked at came to

    def _of(self) -> dict[str, Any]:
        """Returns what a search must have in common with a file's to go on from it."""
        return {"begins with": [*map(str, self.points)], "its seconds": self.builder_s, "bytes": self.budget}

    def save(self, path: str | Path) -> None:
        """Writes what the search has seen, as JSON."""
        seen = [[None if math.isinf(seconds) else seconds, *peaks] for seconds, peaks in self._seen]
        kept = {"version": 1, **self._of(), "seed": self.seed, "moves": self.moves, "seen": seen}
        disk.replace(Path(path), f"{json.dumps(kept)}\n".encode())

    def _kept(self, path: Path) -> tuple[int, int, list[Seen]]:
        """Reads a file of `save`: the seed, how many moves there were, and what they have seen."""
        try:
            kept = strict_json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON that Written.save writes: {error}") from error
        if not isinstance(kept, dict) or kept.get("version") != 1:
            raise ValueError(f"{path}: expected what Written.save writes, version 1")
        for what, ours in self._of().items():
            if kept.get(what) != ours:
                raise ValueError(
                    f"{path} is of another search, whose {what!r} is {shown(kept.get(what))}, here {ours}: go on "
                    "from it with the same step, cluster, memory, stages and runners-up"
                )
        try:
            seed, moves = typed_at("seed", int, kept.get("seed")), typed_at("moves", Moves, kept.get("moves"))
            rows = kept.get("seen")
            if not isinstance(rows, list):
                raise ValueError(f"seen: expected a list, got {shown(rows)}")
            return seed, moves, [self._read(f"seen[{at}]", row) for at, row in enumerate(rows)]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def _read(self, place: str, row: Any) -> Seen:
        """Reads what a program came to: the file's seconds, null where it does not fit, and bytes of each stage."""
        order = self.points[0].order
        stages = 1 if order is None else order.stages
        if not isinstance(row, list) or len(row) not in (1, 1 + stages) or (len(row) == 1 and row[0] is not None):
            raise ValueError(f"{place}: expected seconds and the bytes of {stages} stages, got {shown(row)}")
        seconds = typed_at(f"{place}[0]", Seconds, row[0])
        return math.inf if seconds is None else seconds, typed_at(f"{place}[1:]", Peaks, row[1:])


# ---- A pipeline.

INSIDES = 2
"""Schedules of stages with which cuts begin, those of the best points."""
CUTS, FASTEST = 6, 3
"""Cuts that take turns, those that begin with the fastest programs; and how many of them go on after `ROUNDS` turns."""
ROUNDS = 8
TURN = 100
"""Moves of orders in a turn, which takes about as long as a program is built and simulated."""


@dataclasses.dataclass
class _Cut:
    """A way to cut the step, and its best program so far. rooms: bytes that calls may fill on each stage, as `_calls`
    counts them; search: for orders within them"""

    point: Point
    whole: Trace
    drafts: tuple[Draft, ...]
    rows: Rows
    seconds: float
    peaks: tuple[int, ...]
    changes: list[Changes]
    rooms: list[float] = dataclasses.field(default_factory=list)
    search: Search | None = None


class _Stages:
    """The best program so far for a pipeline."""

    def __init__(self, owner: Synthesis, rng: random.Random) -> None:
        self.owner, self.rng, self.turn = owner, rng, 0
        self.seconds = owner.builder_s
        self.best: _Cut | None = None
        self.plan, self.cuts = self._points(), list[_Cut]()

    def _points(self) -> Iterator[Point]:
        """Yields what to begin with: the builders' own orders, then others, on cuts of other shapes."""
        found: dict[Point, None] = {}
        for inside in [*dict.fromkeys(p._replace(order=None, remat=0) for p in self.owner.points)][:INSIDES]:
            order = next(p.order for p in self.owner.points if p._replace(order=None, remat=0) == inside)
            assert order is not None
            shapes = [(order.name, order.per_stage), *((name, 2) for name in pipelines.V_SHAPED)]
            shapes += [("one_f_one_b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4)]
            for name, per_stage in shapes:
                if per_stage * order.stages <= len(self.owner.trace.visits):
                    found.setdefault(inside._replace(order=order._replace(name=name, per_stage=per_stage)))
        return iter(found)

    def move(self) -> None:
        if (point := next(self.plan, None)) is not None:
            self._begin(point)
            return
        if self.turn in (0, ROUNDS * CUTS):
            self.cuts = sorted(self.cuts, key=lambda cut: cut.seconds)[: FASTEST if self.turn else CUTS]
        if not self.cuts:
            return
        turn, which = divmod(self.turn, len(self.cuts))
        self.turn += 1
        if turn % 2:
            self._change(self.cuts[which])
        else:
            self._order(self.cuts[which])

    def _begin(self, point: Point) -> None:
        """Begins a cut with as few recomputed layers on each stage as fit, the first ones of its segments."""
        owner, order = self.owner, point.order
        assert order is not None
        try:
            whole = point.whole(owner.trace)
            assert whole.split is not None
            rows = pipelines.ORDERS[order.name](whole.split, whole.microbatches)
            parts = [part_of(whole, stage, row) for stage, row in enumerate(rows)]
            plain = [Draft.of(point._replace(order=None), part) for part in parts]
        except ValueError:
            return
        layers = [remat.layer_visits(part) for part in parts]

        def drafts(counts: Sequence[int]) -> tuple[Draft, ...]:
            again = (frozenset(each[:count]) for each, count in zip(layers, counts, strict=True))
            return tuple(draft._replace(again=visits) for draft, visits in zip(plain, again, strict=True))

        few, most = [-1] * len(parts), [*map(len, layers)]
        while any(high - low > 1 for low, high in zip(few, most, strict=True)):
            middle = [(low + high) // 2 if high - low > 1 else high for low, high in zip(few, most, strict=True)]
            peaks = peaks_of(self._program(whole, drafts(middle), rows))
            for stage, peak in enumerate(peaks):
                (most if peak <= owner.budget else few)[stage] = middle[stage]
        cut = _Cut(point, whole, drafts(most), rows, math.inf, (), [Changes(p, owner.cluster, self.rng) for p in parts])
        if self._look(cut, cut.drafts, rows):
            self.cuts.append(cut)

    def _program(self, whole: Trace, drafts: Sequence[Draft], rows: Rows) -> Program:
        return _staged(rows, drafts, _calls(whole, self.owner.cluster, drafts).pace)(whole)

    def _look(self, cut: _Cut, drafts: tuple[Draft, ...], rows: Rows) -> bool:
        """Tells whether a program is better than the cut's best, which it then is: faster, or in less memory. One that
        does not fit leaves orders less room on its stages."""
        assert cut.whole.split is not None
        rows = pipelines.whole_if_idle([[*row] for row in rows], cut.whole.split)
        make = partial(self._program, cut.whole, drafts, rows)
        seconds, peaks = self.owner.look(partial(seen, make, self.owner.cluster, self.owner.budget))
        if seconds == math.inf or (seconds, sum(peaks)) >= (cut.seconds, sum(cut.peaks)):
            if seconds == math.inf and peaks and drafts == cut.drafts and cut.search is not None:
                rooms = self._rooms(cut, rows, peaks)
                cut.rooms = [min(old, 0.999 * new) for old, new in zip(cut.rooms, rooms, strict=True)]
                cut.search = self._search(cut)
            return False
        again = drafts != cut.drafts or cut.search is None
        cut.drafts, cut.rows, cut.seconds, cut.peaks = drafts, rows, seconds, peaks
        if again:
            cut.rooms = self._rooms(cut, rows, peaks)
            cut.search = self._search(cut)
        if seconds < self.seconds:
            self.seconds, self.best = seconds, dataclasses.replace(cut)
        return True

    def _rooms(self, cut: _Cut, rows: Rows, peaks: Sequence[int]) -> list[float]:
        """Returns what calls of rows hold, and what is left beside the peaks of their program."""
        held = evaluate(_calls(cut.whole, self.owner.cluster, cut.drafts), rows).memory
        return [max(1.0, mine + self.owner.budget - peak) for mine, peak in zip(held, peaks, strict=True)]

    def _search(self, cut: _Cut) -> Search:
        calls = _calls(cut.whole, self.owner.cluster, cut.drafts)
        held, between = (
            tuple(nbytes / cut.rooms[home] for nbytes, home in zip(column, calls.homes, strict=True))
            for column in (calls.held, calls.between)
        )
        calls = calls._replace(held=held, between=between)
        return Search(calls, 1.0, starts=[cut.rows], seed=self.rng.randrange(2**32))

    def _order(self, cut: _Cut) -> None:
        assert cut.search is not None
        search = cut.search
        before = search.seconds
        search.run(TURN)
        if search.seconds < before:
            self._look(cut, cut.drafts, search.rows)

    def _change(self, cut: _Cut) -> None:
        """Changes the draft of a stage; where updates are is for all stages alike."""
        stage = self.rng.randrange(len(cut.drafts))
        drafts = [*cut.drafts]
        drafts[stage] = cut.changes[stage].of(drafts[stage])
        self._look(cut, tuple(draft._replace(update=drafts[stage].update) for draft in drafts), cut.rows)

    def result(self) -> dict[str, Any]:
        """The best program, proved, in the fields of `Written`."""
        owner, cut = self.owner, self.best
        if cut is None:
            program = verify(owner.points[0].program(owner.trace))
            return {
                "program": program,
                "step_s": self.seconds,
                "peak_bytes": max(peaks_of(program)),
                "differences": (),
            }
        program = verify(self._program(cut.whole, cut.drafts, cut.rows))
        return {
            "program": program,
            "step_s": cut.seconds,
            "peak_bytes": max(cut.peaks),
            "differences": tuple(self._differences(cut, program)),
            "drafts": cut.drafts,
            "rows": tuple(map(tuple, cut.rows)),
            "made_of": cut.point,
            "pace": _calls(cut.whole, owner.cluster, cut.drafts).pace,
        }

    def _differences(self, cut: _Cut, program: Program) -> Iterator[str]:
        first, ours = self.owner.points[0], cut.point
        assert first.order is not None and ours.order is not None
        shapes = [_shape(order) for order in (ours.order, first.order)]
        if shapes[0] != shapes[1]:
            yield f"{shapes[0]}, not {shapes[1]}"
        again = [len(draft.again) for draft in cut.drafts]
        if any(count != first.remat for count in again):
            yield f"recomputes {', '.join(map(str, again))} layers of its stages, not {first.remat}"
        alike: dict[str, list[int]] = {}
        for stage, (draft, changes) in enumerate(zip(cut.drafts, cut.changes, strict=True)):
            theirs = Draft.of(first._replace(order=None), changes.trace)._replace(again=draft.again)
            for _, words in differences(draft, theirs, changes.trace):
                alike.setdefault(words, []).append(stage)
        for words, stages in alike.items():
            where = "every stage" if len(stages) == len(cut.drafts) else f"stage {', '.join(map(str, stages))}"
            yield f"{where} {words}"
        before, now = (
            simulate(first.program(self.owner.trace), self.owner.cluster),
            simulate(program, self.owner.cluster),
        )
        yield f"bubble {now.bubble:.1%}, not {before.bubble:.1%}"
        kinds = {"forward": "F", "inputs": "I", "weights": "W", "backward": "B"}
        for stage in (0, len(cut.rows) - 1):
            row = cut.rows[stage]
            words = " ".join(f"{kinds[call.kind]}{call.segment}.{call.microbatch}" for call in row[:24])
            yield f"stage {stage}: {words}{' ...' * (len(row) > 24)}"


def _staged(rows: Rows, drafts: Sequence[Draft], pace: Pace) -> Schedule:
    """The schedule of rows, whose stages do what drafts say."""

    def inside(part: Trace) -> Program:
        assert part.stage is not None
        return drafts[part.stage].program(part)

    return pipelines.staged(lambda *_: [[*row] for row in rows], inside, pace=pace)


def _calls(whole: Trace, cluster: Cluster, drafts: Sequence[Draft]) -> Calls:
    """The calls of a step that is cut; memory in bytes."""
    split = whole.split
    assert split is not None
    places = groups(whole, cluster)
    columns: list[list[float]] = [[], [], [], [], []]
    for segment, home in enumerate(split.homes):
        each = [0.0] * 5
        for v in split.visits(segment):
            cost = whole.visits[v].cost
            recompute = v in drafts[home].again
            each[0] += seconds_of(phases(Forward(v, (), True), whole, cluster, places, False))
            each[1] += seconds_of(phases(Backward(v, (), (), half="inputs"), whole, cluster, places, recompute))
            each[2] += seconds_of(phases(Backward(v, (), (), half="weights"), whole, cluster, places, False))
            taken = sum(value.nbytes for value in cost.takes if recompute or value.number not in cost.unsaved)
            each[3] += (0 if recompute else cost.inner_bytes) + taken + cost.beside_bytes
            each[4] += cost.between_bytes
        for column, value in zip(columns, each, strict=True):
            column.append(value)
    crossing = [number for number in range(len(split.flows)) if len(set(split.ends(number, False))) > 1]
    message = max((seconds_of(phases(Send(n, 0), whole, cluster, places, False)) for n in crossing), default=0.0)
    forward, inputs, weights, held, between = map(tuple, columns)
    return Calls(split.homes, whole.microbatches, forward, inputs, weights, message, held, between)


def _shape(order: Order) -> str:
    if order.per_stage == 1:
        return "1 segment a stage"
    return f"{order.per_stage} segments a stage, {'V-shaped' if order.name in pipelines.V_SHAPED else 'in a loop'}"
