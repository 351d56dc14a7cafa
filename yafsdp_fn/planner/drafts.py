"""Drafts: programs of a step without stages, or of one stage, that no builder has; and a search for the best of them.

Draft        each visit keeps its graph, recomputes it, or offloads what it saves; each unit has a slot of its own or
             shares one, is reduced once a step or in every microbatch, gathered again from all ranks or inside the
             node; how far ahead gathers are issued; whether updates are in the program
Changes      random changes of a draft
OneStage     drafts by what frees memory cheapest, and fills it with what saves most; then changes of the best
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from yafsdp_fn.planner import footprint
from yafsdp_fn.planner.bound import seconds_of
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.costs import groups, phases
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.space import Point
from yafsdp_fn.program.ops import Backward
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Trace, UnitSpec
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import remat
from yafsdp_fn.schedules.build import alternating_slots, build, own_slots

Units = frozenset[int]
Seen = tuple[float, tuple[int, ...]]
"""The seconds of a program, infinite where it does not fit or cannot be, and the peak of each stage."""
Look = Callable[[Callable[[], Seen]], Seen]
"""Gives what a function finds, counted as a move: the function is called, unless a file has what it found."""


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


def differences(ours: Draft, theirs: Draft, trace: Trace) -> Iterator[tuple[str, str]]:
    """Yields the fields in which two drafts differ, and what the first does otherwise, in words."""
    visits, units = [v.name for v in trace.visits], [u.name for u in trace.units]
    for field, does, names in (
        ("again", "recomputes", visits),
        ("away", "offloads", visits),
        ("kept", "gives slots of their own to", units),
        ("apart", "gives gradient slots of their own to", units),
        ("deferred", "reduces once a step", units),
        ("nearby", "gathers again inside the node", units),
    ):
        here, there = getattr(ours, field), getattr(theirs, field)
        more, less = _several(here - there, names), _several(there - here, names)
        if here != there:
            yield field, "; ".join([f"{does} {more}"] * bool(more) + [f"no longer {does} {less}"] * bool(less))
    for field, words in (
        ("prefetch", "gathers {} computes ahead, not {}"),
        ("width", "lets units take turns in {} slots, not {}"),
    ):
        if getattr(ours, field) != getattr(theirs, field):
            yield field, words.format(getattr(ours, field), getattr(theirs, field))
    if ours.update != theirs.update:
        yield "update", "updates inside of the program, before the next step's first gathers"
    if ours.by_size != theirs.by_size:
        yield "by_size", "units of a size take turns among themselves"


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


class Changes:
    """Random changes of drafts for `trace`, a whole step or a stage's part of one.

    layers: visits that may recompute; again_s, held: seconds and bytes of their graphs; kinds: layers that are alike
    """

    def __init__(self, trace: Trace, cluster: Cluster, rng: random.Random) -> None:
        self.trace, self.rng, places = trace, rng, groups(trace, cluster)
        self.layers = remat.layer_visits(trace)
        self.again_s, self.held = dict[int, float](), dict[int, int]()
        kinds: dict[tuple[float, int], list[int]] = {}
        for v in self.layers:
            twice, once = (phases(Backward(v, (), ()), trace, cluster, places, again) for again in (True, False))
            self.again_s[v] = seconds_of(twice) - seconds_of(once)
            self.held[v] = trace.visits[v].cost.inner_bytes
            kinds.setdefault((self.again_s[v], self.held[v]), []).append(v)
        self.units = sorted({u for v in trace.visits for u in v.units})
        self.kinds = [frozenset(each) for each in kinds.values()]

    def of(self, draft: Draft) -> Draft:
        """One or two random changes; a change that takes memory is often paid for by one that frees some."""
        for _ in range(self.rng.choice([1, 1, 2, 2, 3])):
            draft = self._change(draft)
        return draft

    def _change(self, draft: Draft) -> Draft:
        rng, trace = self.rng, self.trace
        several = trace.microbatches > 1
        what = rng.choice(
            [
                "again",
                "again",
                "kept",
                "kept",
                "apart",
                "deferred",
                "prefetch",
                "width",
                "kind",
                "away",
                "nearby",
                "update",
            ]
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


def seen(make: Callable[[], Program], cluster: Cluster, budget: int) -> Seen:
    """Returns what the program that `make` builds comes to: proved, and simulated where it fits into `budget`."""
    try:
        program = make()
        peaks = peaks_of(program)
        if max(peaks) > budget:
            return math.inf, peaks
        verify(program)
    except (ValueError, Refused):
        return math.inf, ()
    return simulate(program, cluster).seconds, peaks


def peaks_of(program: Program) -> tuple[int, ...]:
    """The predicted peak of each stage, in bytes."""
    return tuple(footprint.predict_memory(part).peak_bytes for part in program.parts)


# ---- A step without stages.


class OneStage:
    """The best draft so far for a step without stages, which begins with the program of `point`."""

    def __init__(
        self, point: Point, trace: Trace, cluster: Cluster, budget: int, rng: random.Random, look: Look
    ) -> None:
        self.trace, self.cluster, self.budget, self.rng, self.look = trace, cluster, budget, rng, look
        self.changes = Changes(trace, cluster, rng)
        self.known: dict[Draft, Seen] = {}
        self.best = self.now = self.first = Draft.of(point, trace)
        self.seconds = self.at = self.measured(self.first)[0]
        self.plan, self.moves = self._greedy(), 0

    def measured(self, draft: Draft) -> Seen:
        if draft not in self.known:
            self.known[draft] = self.look(partial(self._found, draft))
        return self.known[draft]

    def fits(self, draft: Draft) -> bool:
        try:
            return footprint.predict_memory(draft.program(self.trace)).peak_bytes <= self.budget
        except ValueError:
            return False

    def _found(self, draft: Draft) -> Seen:
        return seen(partial(draft.program, self.trace), self.cluster, self.budget)

    def move(self) -> None:
        draft = next(self.plan, None) or self.changes.of(self.now)
        seconds, _ = self.measured(draft)
        self.moves += 1
        heat = 0.003 * self.seconds * math.exp(-self.moves / 500)
        if seconds <= self.at or (seconds < math.inf and self.rng.random() < math.exp((self.at - seconds) / heat)):
            self.now, self.at = draft, seconds
        if seconds < self.seconds or (seconds == self.seconds and len(draft.again) < len(self.best.again)):
            self.best, self.seconds = draft, seconds

    def _greedy(self) -> Iterator[Draft]:
        """Yields drafts: for several numbers of recomputed visits, those first that free most for their seconds. The
        rest goes to gradients that are reduced once, and then to weights that stay; or the other way round."""
        trace = self.trace
        of = self.changes
        cheap = sorted(of.layers, key=lambda v: (of.again_s[v] / max(of.held[v], 1), v))
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
            few = self._fewest(lambda n, plain=plain: plain._replace(again=frozenset(cheap[:n])), len(cheap))  # type: ignore[misc]
            counts = sorted({few, few + 1, few + 2, (3 * few + len(cheap)) // 4, (few + len(cheap)) // 2, len(cheap)})
            for count in [n for n in counts if n <= len(cheap)]:
                draft = plain._replace(again=frozenset(cheap[:count]))
                for fill in (("deferred", "kept"), ("kept", "deferred")) if several else (("kept",),):
                    filled = draft
                    for what in fill:
                        filled = self._filled(filled, what)
                        yield filled

    def _fewest(self, made: Callable[[int], Draft], most: int) -> int:
        low, high = -1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(made(middle)) else (middle, high)
        return high

    def _filled(self, draft: Draft, what: str) -> Draft:
        """Returns it with as many units as fit that stay gathered, or are reduced once: small and late ones first."""
        size = "gather_bytes" if what == "kept" else "reduce_bytes"
        rest = [u for u in reversed(self.changes.units) if u not in getattr(draft, what)]
        rest.sort(key=lambda u: getattr(self.trace.units[u], size))

        def made(count: int) -> Draft:
            some = frozenset(rest[:count])
            if what == "kept":
                return draft._replace(kept=draft.kept | some)
            return draft._replace(deferred=draft.deferred | some, apart=draft.apart | some)

        return made(len(rest) - self._fewest(lambda left: made(len(rest) - left), len(rest)))

    def result(self) -> dict[str, Any]:
        """The best program, proved, in the fields of `Written`. What saves nothing is taken back."""
        best, enough = self.best, self.seconds * (1 + 1e-5)
        for field in Draft._fields:
            back = best._replace(**{field: getattr(self.first, field)})
            best = back if self._known(back)[0] <= enough else best
        seconds, (peak,) = self._known(best)
        said = [
            f"{words}: {self._without(best, seconds, field)}"
            for field, words in differences(best, self.first, self.trace)
        ]
        program = verify(best.program(self.trace))
        return {"program": program, "step_s": seconds, "peak_bytes": peak, "differences": tuple(said), "draft": best}

    def _known(self, draft: Draft) -> Seen:
        return self.known.get(draft) or self._found(draft)

    def _without(self, best: Draft, seconds: float, field: str) -> str:
        """Says what taking a field back would cost."""
        changes = {field: getattr(self.first, field)}
        if field == "deferred":
            changes["apart"] = self.first.apart | (best.apart & self.first.deferred)
        slower, peak = self._known(best._replace(**changes))
        if slower < math.inf:
            return f"saves {max(0.0, slower - seconds):.3g} s"
        return (
            f"without it {(peak[0] - self.budget) / 2**30:.2f} GiB would be missing" if peak else "goes with the others"
        )
