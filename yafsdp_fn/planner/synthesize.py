"""Writes programs that no builder has: what `search` found, changed visit by visit, unit by unit, and call by call.

    a step without stages    each visit keeps its graph, recomputes it, or offloads what it saves; each unit has a slot
                             of its own or shares one, is reduced once a step or in every microbatch, gathered again
                             from all ranks or inside the node; how far ahead gathers are issued
    a pipeline               the order of forwards, backwards of inputs and of weights on each stage (orders.py), under
                             what the stages' schedule leaves of the memory

    drafts: by what frees memory cheapest, and fills it with what saves most; then random changes of the best
    a draft that fits in prediction is built and simulated, the best is proved

The same seed and number of moves write the same program; seconds only stop it early.
"""

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from yafsdp_fn.planner import footprint
from yafsdp_fn.planner.bound import Bound, bound
from yafsdp_fn.planner.cluster import Cluster, Phase
from yafsdp_fn.planner.costs import groups, phases
from yafsdp_fn.planner.orders import Calls, Search
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.space import Order, Point
from yafsdp_fn.program.ops import Backward, Forward, Send
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import Assignment, Call
from yafsdp_fn.program.trace import Trace, UnitSpec
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import pipelines, remat
from yafsdp_fn.schedules.build import alternating_slots, build, own_slots
from yafsdp_fn.schedules.messages import UNIT, Pace

Units = frozenset[int]
Report = Callable[[str], None]
"""Called with a line, whenever there is something better."""


class Draft(NamedTuple):
    """A program of a step without stages: arguments of `build`, with a set where builders have a number.

    again, away: visits that recompute, and of these the ones whose carries wait on the host, fetched `ahead`
    kept: units with a weight slot of their own; others take turns in `width` slots, layers of one size together if
        `by_size`
    apart: units with a gradient slot of their own; deferred: of these, reduced once a step
    nearby: units that are gathered from the node after their first gather
    """

    again: frozenset[int]
    kept: Units
    apart: Units
    away: frozenset[int] = frozenset()
    ahead: int = 1
    width: int = 2
    by_size: bool = False
    deferred: Units = frozenset()
    nearby: Units = frozenset()
    prefetch: int = 1
    update: bool = False

    @staticmethod
    def of(point: Point, trace: Trace) -> "Draft":
        """The draft of a builder's program."""
        stacked = list(dict.fromkeys(u for v in trace.visits for u in v.units if trace.units[u].stack is not None))
        every = frozenset(range(len(trace.units)))
        others = every - frozenset(stacked)
        again = remat.first(point.remat)(trace)
        if point.builder == "ddp":
            return Draft(again, every, every, deferred=every, prefetch=0)
        hpz = point.builder == "hpz"
        kept = others | frozenset(stacked[len(stacked) - point.kept :] if point.kept and not hpz else ())
        return Draft(
            again,
            kept,
            every if point.defer else others,
            width=max(2, point.prefetch + 1),
            deferred=every if point.defer else frozenset(),
            nearby=frozenset(stacked[: point.kept] if hpz else ()),
            prefetch=point.prefetch,
        )

    def program(self, trace: Trace) -> Program:
        """The program for `trace`. Raises ValueError where a step cannot be so."""

        def again(_: Trace) -> frozenset[int]:
            return self.again

        away = remat.offload(lambda _: self.away, recompute=again, ahead=self.ahead)
        return build(
            trace,
            _slots(trace, self.kept, self.width, lambda unit: unit.gather_bytes if self.by_size else 0),
            _slots(trace, self.apart, 2, lambda unit: unit.reduce_bytes if self.by_size else 0),
            prefetch=self.prefetch,
            remat=away if self.away else again,
            defer=self.deferred & self.apart,
            secondary=self.nearby,
            update=self.update,
        )


def _slots(trace: Trace, own: Units, width: int, size: Callable[[UnitSpec], int]) -> dict[int, int]:
    """Unit -> slot: units of equal `size` that have none of their own take turns in `width` slots."""
    if own.issuperset(range(len(trace.units))) and width == 2:
        return own_slots(trace.units)
    plain = alternating_slots(trace.visits, trace.units, width=width)
    sizes = sorted({size(unit) for unit in trace.units})
    if len(sizes) == 1 and all(unit in own for unit in plain if trace.units[unit].stack is None):
        layers = [unit.id for unit in trace.units if unit.stack is not None]
        kept = [unit for unit in layers if unit in own]
        if kept == layers[len(layers) - len(kept) :]:  # as builders number them
            return alternating_slots(trace.visits, trace.units, width=width, resident=len(kept))
    slots: dict[int, int] = {}
    turn = dict.fromkeys(sizes, 0)
    for visit in trace.visits:
        for unit in visit.units:
            if unit in slots or unit in own:
                continue
            of = size(trace.units[unit])
            slots[unit] = sizes.index(of) * width + turn[of] % width
            turn[of] += 1
    for visit in trace.visits:  # units that a visit uses together are in different slots
        taken: set[int] = set()
        for unit in visit.units:
            if unit in slots and slots[unit] in taken:
                del slots[unit]
            taken.add(slots.get(unit, -1))
    alone = [unit.id for unit in trace.units if unit.id not in slots]
    return slots | {unit: len(sizes) * width + index for index, unit in enumerate(alone)}


@dataclasses.dataclass(frozen=True)
class Written:
    """A program that was written, and how. It is a schedule, and goes on with `more`.

    program: proved; step_s, peak_bytes: as simulated and predicted; least: that no program is below
    point, builder_s: the best builder's, with which it began
    differences: what it does otherwise, and what each saves
    draft: of a step without stages
    rows, made_of, pace: of a pipeline: its calls, the point that cuts it and says what stages do, how long calls take
    moves: programs that were looked at; early: whether seconds were over before all of them

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
    rows: tuple[tuple[Call, ...], ...] = ()
    draft: Draft | None = None
    made_of: Point | None = None
    pace: Pace = UNIT
    search: "Synthesis | None" = dataclasses.field(default=None, repr=False, compare=False)

    def __call__(self, trace: Trace) -> Program:
        if self.draft is not None:
            return self.draft.program(trace)
        if self.made_of is None:
            return self.point.schedule()(trace)
        rows = [[*row] for row in self.rows]
        return pipelines.staged(lambda *_: rows, self.made_of.sharding(), pace=self.pace)(trace)

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
        """Goes on for so many moves more, from where it was."""
        assert self.search is not None
        return self.search.run(moves, seconds=seconds, report=report)

    def __str__(self) -> str:
        saved = 1 - self.step_s / self.builder_s
        lines = [
            f"written: {self.step_s:.4g} s a step, {self.peak_bytes / 2**30:.1f} GiB, "
            f"{saved:.1%} shorter than {self.point} ({self.builder_s:.4g} s)",
            f"  {self.least.against(self.step_s)}",
            *(f"  {line}" for line in self.differences),
            f"  {self.moves} programs looked at" + ", stopped early by its seconds" * self.early,
        ]
        return "\n".join(lines)


class Synthesis:
    """The best program so far that begins with `points`, best builder first. It goes on where it was: see `run`."""

    def __init__(self, trace: Trace, points: Iterable[Point], cluster: Cluster, budget: int, seed: int = 0) -> None:
        self.points, self.cluster, self.budget = [*points], cluster, budget
        self.trace, self.whole = trace, self.points[0].whole(trace)
        self.rng, self.moves = random.Random(seed), 0
        first = self.points[0].program(trace)
        self.builder_s = simulate(first, cluster).seconds
        self.least = bound(self.whole, cluster, budget)
        self._work: _OfOne | _OfStages = (_OfOne if self.points[0].order is None else _OfStages)(self)

    def run(self, moves: int, *, seconds: float = math.inf, report: Report | None = None) -> Written:
        """Looks at so many programs more, fewer where the bound is met; `seconds` stop it early."""
        began, until = time.monotonic(), self.moves + moves
        early = False
        while self.moves < until and self._work.seconds > self.least.seconds * (1 + 1e-4):
            if early := time.monotonic() - began > seconds:
                break
            before = self._work.seconds
            self._work.move()
            if report is not None and self._work.seconds < before:
                gap = self.least.gap(self._work.seconds)
                saved = 1 - self._work.seconds / self.builder_s
                report(f"move {self.moves}: {self._work.seconds:.4g} s, {saved:+.1%} saved, {gap:.1%} above the bound")
        return self._work.written(early)


# ---- A step without stages.


class _OfOne:
    def __init__(self, owner: Synthesis) -> None:
        self.owner, self.trace = owner, owner.whole
        self.known: dict[Draft, tuple[float, int]] = {}
        self.first = Draft.of(owner.points[0], self.trace)
        self.best = self.now = self.first
        self.seconds = self.at = self.measured(self.first)[0]
        self.plan = self._greedy()
        cluster, places = owner.cluster, groups(self.trace, owner.cluster)
        self.layers = remat.layer_visits(self.trace)
        self.again_s, self.held = {}, {}
        for v in self.layers:
            twice = phases(Backward(v, (), ()), self.trace, cluster, places, True)
            once = phases(Backward(v, (), ()), self.trace, cluster, places, False)
            self.again_s[v] = sum(p.seconds for p in twice) - sum(p.seconds for p in once)
            self.held[v] = self.trace.visits[v].cost.inner_bytes
        self.units = sorted({u for v in self.trace.visits for u in v.units})
        kinds: dict[tuple[float, float], list[int]] = {}
        for v in self.layers:
            kinds.setdefault((self.again_s[v], self.held[v]), []).append(v)
        self.kinds = [frozenset(each) for each in kinds.values()]

    def measured(self, draft: Draft) -> tuple[float, int]:
        """Seconds and bytes; seconds are infinite where it does not fit, or cannot be."""
        if draft not in self.known:
            self.owner.moves += 1
            self.known[draft] = self._measured(draft)
        return self.known[draft]

    def fits(self, draft: Draft) -> bool:
        try:
            return footprint.predict_memory(draft.program(self.trace)).peak_bytes <= self.owner.budget
        except ValueError:
            return False

    def _measured(self, draft: Draft) -> tuple[float, int]:
        try:
            program = draft.program(self.trace)
            peak = footprint.predict_memory(program).peak_bytes
            if peak > self.owner.budget:
                return math.inf, peak
            verify(program)
        except (ValueError, Refused):
            return math.inf, 2**63
        return simulate(program, self.owner.cluster).seconds, peak

    def move(self) -> None:
        draft = next(self.plan, None) or self._changed(self.now)
        seconds, _ = self.measured(draft)
        heat = 0.003 * self.seconds * math.exp(-self.owner.moves / 500)
        if seconds <= self.at or (
            seconds < math.inf and self.owner.rng.random() < math.exp((self.at - seconds) / heat)
        ):
            self.now, self.at = draft, seconds
        if seconds < self.seconds or (seconds == self.seconds and len(draft.again) < len(self.best.again)):
            self.best, self.seconds = draft, seconds

    # ---- drafts by what is cheapest

    def _greedy(self) -> Iterator[Draft]:
        """Yields drafts: for several numbers of recomputed visits, those first that free most for their seconds. The
        rest goes to gradients that are reduced once, and then to weights that stay; or the other way round."""
        trace = self.trace
        cheap = sorted(self.layers, key=lambda v: (self.again_s[v] / max(self.held[v], 1), v))
        others = frozenset(unit.id for unit in trace.units if unit.stack is None)
        several = trace.microbatches > 1
        base = self.first
        for lean, by_size, (prefetch, width) in itertools.product(
            (False, True), (False, True), ((1, 2), (2, 2), (2, 3), (3, 2), (3, 4))
        ):
            own = others if not lean else frozenset()
            plain = Draft(
                frozenset(),
                own,
                own,
                width=width,
                by_size=by_size,
                prefetch=prefetch,
                nearby=base.nearby,
                update=base.update,
            )
            if not self.fits(plain._replace(again=frozenset(cheap))):
                continue
            few = self._fewest(partial(_recomputing, plain, cheap), len(cheap))
            counts = sorted({few, few + 1, few + 2, (3 * few + len(cheap)) // 4, (few + len(cheap)) // 2, len(cheap)})
            for count in [n for n in counts if n <= len(cheap)]:
                draft = plain._replace(again=frozenset(cheap[:count]))
                for fill in (("deferred", "kept"), ("kept", "deferred")) if several else (("kept",),):
                    filled = draft
                    for what in fill:
                        filled = self._filled(filled, what)
                        yield filled
        if trace.update_when != "never":
            yield self.best._replace(update=not self.best.update)

    def _fewest(self, made: Callable[[int], Draft], most: int) -> int:
        low, high = -1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(made(middle)) else (middle, high)
        return high

    def _filled(self, draft: Draft, what: str) -> Draft:
        """Returns it with as many units as fit that stay gathered, or are reduced once: small and late ones first."""
        size = "gather_bytes" if what == "kept" else "reduce_bytes"
        rest = [u for u in reversed(self.units) if u not in getattr(draft, what)]
        rest.sort(key=lambda u: getattr(self.trace.units[u], size))

        def made(count: int) -> Draft:
            some = frozenset(rest[:count])
            if what == "kept":
                return draft._replace(kept=draft.kept | some)
            return draft._replace(deferred=draft.deferred | some, apart=draft.apart | some)

        return made(len(rest) - self._fewest(lambda left: made(len(rest) - left), len(rest)))

    # ---- changes

    def _changed(self, draft: Draft) -> Draft:
        """One or two random changes; a change that takes memory is often paid for by one that frees some."""
        for _ in range(self.owner.rng.choice([1, 1, 2, 2, 3])):
            draft = self._change(draft)
        return draft

    def _change(self, draft: Draft) -> Draft:
        rng, trace = self.owner.rng, self.trace
        several = trace.microbatches > 1
        what = rng.choice(
            ["again", "again", "kept", "kept", "apart", "deferred", "prefetch", "width", "kind", "away", "nearby"]
        )
        match what:
            case "again" if self.layers:
                if rng.random() < 0.5 and draft.again and len(draft.again) < len(self.layers):
                    out = rng.choice(sorted(draft.again))
                    into = rng.choice(sorted(set(self.layers) - draft.again))
                    return draft._replace(again=draft.again - {out} | {into}, away=draft.away - {out})
                return self._toggled(draft, "again", rng.choice(self.layers))
            case "kind" if self.kinds:
                kind = rng.choice(self.kinds)
                again = draft.again - kind if rng.random() < 0.5 else draft.again | kind
                return draft._replace(again=again, away=draft.away & again)
            case "kept" | "apart":
                if rng.random() < 0.4 and (there := getattr(draft, what) & frozenset(self.units)):
                    out, into = rng.choice(sorted(there)), rng.choice(self.units)
                    return draft._replace(**{what: getattr(draft, what) - {out} | {into}})
                return self._toggled(draft, what, rng.choice(self.units))
            case "deferred" if several:
                unit = rng.choice(self.units)
                return self._toggled(draft._replace(apart=draft.apart | {unit}), "deferred", unit)
            case "prefetch":
                return draft._replace(prefetch=max(0, draft.prefetch + rng.choice([-1, 1])))
            case "width":
                if rng.random() < 0.4:
                    return draft._replace(by_size=not draft.by_size)
                return draft._replace(width=max(1, draft.width + rng.choice([-1, 1])))
            case "away" if draft.again and trace.split is None and rng.random() < 0.5:
                visit = rng.choice(sorted(draft.again))
                return self._toggled(draft._replace(ahead=rng.choice([1, 2])), "away", visit)
            case "update" if trace.update_when != "never":
                return draft._replace(update=not draft.update)
            case "nearby" if "local" in dict(trace.mesh):
                return self._toggled(draft, "nearby", rng.choice(self.units))
        return draft

    @staticmethod
    def _toggled(draft: Draft, what: str, number: int) -> Draft:
        return draft._replace(**{what: getattr(draft, what) ^ {number}})

    # ---- what came out

    def written(self, early: bool) -> Written:
        owner = self.owner
        self._simplify()
        program = verify(self.best.program(self.trace))
        differences = tuple(self._differences())
        peak = self.known[self.best][1]
        return Written(
            program,
            self.seconds,
            peak,
            owner.least,
            owner.points[0],
            owner.builder_s,
            differences,
            owner.moves,
            early,
            draft=self.best,
            search=owner,
        )

    def _simplify(self) -> None:
        """Takes back what saves nothing."""
        for field in Draft._fields:
            back = self.best._replace(**{field: getattr(self.first, field)})
            if (seconds := self.measured(back)[0]) <= self.seconds * (1 + 1e-5):
                self.best, self.seconds = back, min(seconds, self.seconds)
        self.seconds = self.measured(self.best)[0]

    def _differences(self) -> Iterator[str]:
        """Says what the best does otherwise than the builder's, and what taking it back would cost."""
        names, best, first = self.trace, self.best, self.first
        visits, units = [v.name for v in names.visits], [u.name for u in names.units]
        fields = {
            "again": ("recomputes", visits),
            "away": ("offloads", visits),
            "kept": ("gives slots of their own to", units),
            "apart": ("gives gradient slots of their own to", units),
            "deferred": ("reduces once a step", units),
            "nearby": ("gathers again inside the node", units),
        }
        for field, (does, listed) in fields.items():
            ours, theirs = getattr(best, field), getattr(first, field)
            if ours == theirs:
                continue
            parts = []
            if more := ours - theirs:
                parts.append(f"{does} {_several(more, listed)}")
            if less := theirs - ours:
                parts.append(f"no longer {does} {_several(less, listed)}")
            yield f"{'; '.join(parts)}: {self._without(field)}"
        for field, does in (
            ("prefetch", "gathers {} computes ahead, not {}"),
            ("width", "lets units take turns in {} slots, not {}"),
        ):
            if (ours := getattr(best, field)) != (theirs := getattr(first, field)):
                yield f"{does.format(ours, theirs)}: {self._without(field)}"
        if best.update != first.update:
            yield f"updates inside of the program, before the next step's first gathers: {self._without('update')}"
        if best.by_size != first.by_size:
            yield f"units of a size take turns among themselves: {self._without('by_size')}"

    def _without(self, field: str) -> str:
        changes = {field: getattr(self.first, field)}
        if field == "deferred":
            changes["apart"] = self.first.apart | (self.best.apart & self.first.deferred)
        back = self.best._replace(**changes)
        seconds, peak = self.known.get(back) or self._measured(back)
        if seconds < math.inf:
            return f"saves {max(0.0, seconds - self.seconds):.3g} s"
        over = peak - self.owner.budget
        return f"without it {over / 2**30:.2f} GiB would be missing" if over < 2**62 else "goes with the others"


def _recomputing(draft: Draft, cheap: list[int], count: int) -> Draft:
    return draft._replace(again=frozenset(cheap[:count]))


def _several(numbers: Iterable[int], names: list[str]) -> str:
    """Names; of three neighbours and more the first and the last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [
        f"{names[run[0]]} to {names[run[-1]]}" if len(run) > 2 else ", ".join(names[number] for number in run)
        for run in runs
    ]
    return ", ".join(shown[:6]) + f" and {sum(map(len, runs[6:]))} more" * (len(runs) > 6)


# ---- A pipeline.

TURN = 25
"""Moves of a search of orders before the next one has its turn."""
ROUNDS = 8
"""Turns of every search of orders, before those alone go on that have come to the fastest programs."""
FASTEST = 3
INSIDES = 2
"""Schedules of stages that are looked at, those of the best points."""


@dataclasses.dataclass
class _Cut:
    """A way to cut the step, a schedule for its stages, and a search of orders for both. scale: of the memory that the
    orders may fill, less where programs came out that did not fit"""

    point: Point
    whole: Trace
    builder: list[list[Call]]
    calls: Calls
    search: Search
    scale: float = 1.0
    seconds: float = math.inf


class _OfStages:
    def __init__(self, owner: Synthesis) -> None:
        self.owner, self.seconds, self.peak = owner, math.inf, 0
        first = owner.points[0]
        self.point, self.program = first, verify(first.program(owner.trace))
        self.rows: list[list[Call]] = []
        self.pace = UNIT
        self.seconds = simulate(self.program, owner.cluster).seconds
        self.peak = footprint.predict_memory(self.program).peak_bytes
        cuts = [cut for point in self._points() if (cut := self._cut(point)) is not None]
        self.cuts = [cut for cut in cuts if cut.search.least[0] < self.seconds]
        self.turn = 0

    def _points(self) -> Iterator[Point]:
        """The builders' points, with their layers recomputed or not, and cut in other shapes."""
        found: dict[Point, None] = {}
        insides = dict.fromkeys(p._replace(order=None) for p in self.owner.points)
        for inside in [*insides][:INSIDES]:
            of = next(p for p in self.owner.points if p._replace(order=None) == inside)
            order = of.order
            assert order is not None
            here = [(order.name, order.per_stage)] if order.name not in ("gpipe", "zero_bubble") else []
            shapes = [*here, ("v_shaped", 2), ("one_f_one_b", 1), *(("interleaved", v) for v in (2, 4))]
            for (name, per_stage), again in itertools.product(dict.fromkeys(shapes), dict.fromkeys((of.remat, 0))):
                if per_stage * order.stages <= len(self.owner.trace.visits):
                    shaped = order._replace(name=name, per_stage=per_stage)
                    found.setdefault(of._replace(order=shaped, remat=again))
        return iter(found)

    def _cut(self, point: Point) -> _Cut | None:
        owner = self.owner
        assert point.order is not None
        try:
            whole = point.whole(owner.trace)
            assert whole.split is not None
            rows = pipelines.ORDERS[point.order.name](whole.split, whole.microbatches)
            program = point.schedule()(whole)
        except ValueError:
            return None
        rooms = []
        for part in program.parts:
            memory = footprint.predict_memory(part)
            rooms.append(owner.budget - (memory.peak_bytes - memory.activations))
        if min(rooms) <= 0:
            return None
        calls = _calls(whole, owner.cluster, point, rooms)
        search = Search(calls, 1.0, starts=[rows], seed=owner.rng.randrange(2**32))
        return _Cut(point, whole, rows, calls, search)

    def move(self) -> None:
        if not self.cuts:
            self.owner.moves += 1
            return
        if self.turn == ROUNDS * len(self.cuts):
            self.cuts = sorted(self.cuts, key=lambda cut: cut.seconds)[:FASTEST]
        cut = self.cuts[self.turn % len(self.cuts)]
        self.turn += 1
        before, begun = cut.search.seconds, cut.search.moves
        cut.search.run(TURN)
        self.owner.moves += max(1, cut.search.moves - begun)
        if cut.search.seconds < before or (cut.seconds == math.inf and cut.search.seconds < math.inf):
            self._try(cut)

    def _try(self, cut: _Cut) -> None:
        assert cut.whole.split is not None
        rows = pipelines.whole_if_idle(cut.search.rows, cut.whole.split)
        try:
            program = pipelines.staged(lambda *_: rows, cut.point.sharding(), pace=cut.calls.pace)(cut.whole)
            peak = footprint.predict_memory(program).peak_bytes
            if peak > self.owner.budget:
                if cut.scale > 0.5:  # orders that hold less
                    cut.scale *= 0.94
                    cut.search = Search(
                        cut.calls, cut.scale, starts=[cut.builder], seed=self.owner.rng.randrange(2**32)
                    )
                return
            verify(program)
        except (ValueError, Refused):
            return
        seconds = simulate(program, self.owner.cluster).seconds
        cut.seconds = min(cut.seconds, seconds)
        if seconds < self.seconds:
            self.seconds, self.peak, self.program = seconds, peak, program
            self.point, self.rows, self.pace = cut.point, rows, cut.calls.pace

    def written(self, early: bool) -> Written:
        owner = self.owner
        least = owner.least if not self.rows else bound(self.program.trace, owner.cluster, owner.budget)
        return Written(
            self.program,
            self.seconds,
            self.peak,
            least,
            owner.points[0],
            owner.builder_s,
            tuple(self._differences()),
            owner.moves,
            early,
            rows=tuple(map(tuple, self.rows)),
            search=owner,
            made_of=self.point,
            pace=self.pace,
        )

    def _differences(self) -> Iterator[str]:
        if not self.rows:
            return
        first, ours = self.owner.points[0], self.point
        assert first.order is not None and ours.order is not None
        if (ours.order.name == "v_shaped") != (
            first.order.name == "v_shaped"
        ) or ours.order.per_stage != first.order.per_stage:
            yield f"{_shape(ours.order)}, not {_shape(first.order)}"
        if ours.remat != first.remat:
            yield f"recomputes the first {ours.remat} layers of a stage, not {first.remat}"
        theirs = Program(self.owner.whole, *self.owner.points[0].program(self.owner.trace).stages)
        before, now = simulate(theirs, self.owner.cluster), simulate(self.program, self.owner.cluster)
        yield f"bubble {now.bubble:.1%}, not {before.bubble:.1%}"
        for stage, row in enumerate(self.rows[:1] + self.rows[-1:]):
            kinds = {"forward": "F", "inputs": "I", "weights": "W", "backward": "B"}
            number = stage * (len(self.rows) - 1)
            words = " ".join(f"{kinds[call.kind]}{call.segment}.{call.microbatch}" for call in row[:24])
            yield f"stage {number}: {words}{' ...' * (len(row) > 24)}"


def _calls(whole: Trace, cluster: Cluster, point: Point, rooms: list[int]) -> Calls:
    """The calls of a step that is cut; memory in parts of what each stage has room for."""
    split = whole.split
    assert split is not None
    places = groups(whole, cluster)
    columns: list[list[float]] = [[], [], [], [], []]
    for segment, home in enumerate(split.homes):
        own = range(*split.segments[segment])
        layers = [v for s in split.of(home) for v in range(*split.segments[s]) if _layer(whole, v)]
        again = frozenset(layers[: point.remat])
        each = [0.0] * 5
        for v in own:
            cost = whole.visits[v].cost
            recompute = v in again
            each[0] += _seconds(phases(Forward(v, (), True), whole, cluster, places, False))
            each[1] += _seconds(phases(Backward(v, (), (), half="inputs"), whole, cluster, places, recompute))
            each[2] += _seconds(phases(Backward(v, (), (), half="weights"), whole, cluster, places, False))
            taken = sum(value.nbytes for value in cost.takes if recompute or value.number not in cost.unsaved)
            each[3] += (0 if recompute else cost.inner_bytes) + taken + cost.beside_bytes
            each[4] += cost.between_bytes
        each[3] = max(each[3:])
        for column, value in zip(columns, (*each[:3], each[3] / rooms[home], each[4] / rooms[home]), strict=True):
            column.append(value)
    crossing = [number for number in range(len(split.flows)) if len(set(split.ends(number, False))) > 1]
    message = max((_seconds(phases(Send(n, 0), whole, cluster, places, False)) for n in crossing), default=0.0)
    forward, inputs, weights, held, between = map(tuple, columns)
    return Calls(split.homes, whole.microbatches, forward, inputs, weights, message, held, between)


def _shape(order: Order) -> str:
    if order.per_stage == 1:
        return "1 segment a stage"
    return f"{order.per_stage} segments a stage, {'V-shaped' if order.name == 'v_shaped' else 'in a loop'}"


def _layer(trace: Trace, visit: int) -> bool:
    return any(trace.units[unit].stack is not None for unit in trace.visits[visit].units)


def _seconds(found: Iterable[Phase]) -> float:
    return sum(phase.seconds for phase in found)
