"""Configurations that no builder makes, of a step without stages or of one stage of a pipeline.

StageConfig   each visit keeps its graph, recomputes it, or offloads its carry; each unit has a slot of its own or
              shares one, is reduced once a step or in every microbatch, gathered again from all ranks or inside the
              node; how far ahead gathers are issued; whether updates are in the program
Design        a synthesized program: the configurations of its stages, and the order of their calls
Changes       random changes of a configuration
"""

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from yafsdp_fn.pipelines import orders
from yafsdp_fn.pipelines.messages import UNIT, Pace
from yafsdp_fn.planner import footprint
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.costs import Costs
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.space import Point
from yafsdp_fn.program.ops import Backward
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import CallRows
from yafsdp_fn.program.trace import Trace, UnitSpec
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import remat
from yafsdp_fn.schedules.build import alternating_slots, build, visited

Numbers = frozenset[int]
"""Numbers of visits or of units."""


class StageConfig(NamedTuple):
    """Arguments of `build` for a stage, with a set where builders have a number.

    recomputed: visits; offloaded: those of them whose carries wait on the host
    resident: units with a weight slot of their own; others take turns in `width` slots, those of one size together if
        `by_size`
    own_grads: units with a gradient slot of their own, beside those that are `deferred`: reduced once a step
    secondary: units that are gathered from the node after their first gather
    """

    recomputed: Numbers
    resident: Numbers
    own_grads: Numbers
    offloaded: Numbers = frozenset()
    width: int = 2
    by_size: bool = False
    deferred: Numbers = frozenset()
    secondary: Numbers = frozenset()
    prefetch: int = 1
    update: bool = False

    @staticmethod
    def of(point: Point, trace: Trace) -> "StageConfig":
        """Returns the configuration of a builder's program."""
        units = frozenset(range(len(trace.units)))
        layers = [unit for unit in visited(trace) if trace.units[unit].stack is not None]
        others = units.difference(layers)
        recomputed = remat.first(point.remat)(trace)
        if point.builder == "ddp":
            return StageConfig(recomputed, units, units, deferred=units, prefetch=0)
        hpz = point.builder == "hpz"
        return StageConfig(
            recomputed,
            others if hpz else others.union(layers[len(layers) - point.kept :]),
            others,
            width=max(2, point.prefetch + 1),
            deferred=units if point.defer else frozenset(),
            secondary=frozenset(layers[: point.kept] if hpz else ()),
            prefetch=point.prefetch,
        )

    def program(self, trace: Trace) -> Program:
        """Returns the program for `trace`. Raises ValueError where no schedule can do what the configuration asks."""

        def recomputed(_: Trace) -> Numbers:
            return self.recomputed

        offloaded = self.offloaded & self.recomputed
        offload = remat.offload(lambda _: offloaded, recompute=recomputed)
        return build(
            trace,
            _slots(trace, self.resident, self.width, lambda unit: unit.gather_bytes * self.by_size),
            _slots(trace, self.own_grads | self.deferred, 2, lambda unit: unit.reduce_bytes * self.by_size),
            prefetch=self.prefetch,
            remat=offload if offloaded else recomputed,
            defer=self.deferred,
            secondary=self.secondary,
            update=self.update,
        )


class Design(NamedTuple):
    """A program that was written, as a schedule.

    point: its mesh and its cut into stages; configs: of each stage, none where all is as the builder has it
    rows, pace: of a pipeline: the calls of its stages, and how long these take
    """

    point: Point
    configs: tuple[StageConfig, ...] = ()
    rows: CallRows = ()
    pace: Pace = UNIT

    def __call__(self, trace: Trace) -> Program:
        if not self.configs:
            return self.point.schedule()(trace)
        if not self.rows:
            return self.configs[0].program(trace)

        def inside(part: Trace) -> Program:
            return self.configs[part.stage or 0].program(part)

        return orders.staged(lambda *_: self.rows, inside, pace=self.pace)(trace)


def _slots(trace: Trace, own: Numbers, width: int, size: Callable[[UnitSpec], int]) -> dict[int, int]:
    """Returns unit -> slot: units of equal `size` that have no slot of their own take turns in `width` slots."""
    sizes = {unit.id: size(unit) for unit in trace.units if unit.id not in own}
    slots: dict[int, int] = {}
    for nbytes in sorted({*sizes.values()}) or [0]:
        turns = [unit for unit in sizes if sizes[unit] == nbytes]
        units = [unit._replace(stack="turns" if unit.id in turns else None) for unit in trace.units]
        found = alternating_slots(trace.visits, tuple(units), width=width)
        first = max(slots.values(), default=-1) + 1
        slots |= {unit: first + slot for unit, slot in found.items() if unit in turns or first == 0}
    return slots


class Changes:
    """Random changes of configurations for `trace`, a whole step or a stage's part of one.

    sets: fields -> the numbers that may be in them; fields: these and others that may change
    """

    def __init__(self, trace: Trace, rng: random.Random) -> None:
        self.trace = trace
        self.rng = rng
        layers = remat.layer_visits(trace)
        units = sorted(visited(trace))
        self.sets = {"resident": units, "own_grads": units}
        if layers:
            self.sets["recomputed"] = layers
        if trace.microbatches > 1:
            self.sets["deferred"] = units
        if "local" in dict(trace.mesh):
            self.sets["secondary"] = units
        if trace.split is None and layers:
            self.sets["offloaded"] = layers
        self.fields = [*self.sets, "prefetch", "width", "by_size"]
        if trace.update_when != "never":
            self.fields.append("update")

    def of(self, config: StageConfig) -> StageConfig:
        """Makes one to three changes; a change that takes memory is often paid for by one that frees some."""
        for _ in range(self.rng.choice([1, 1, 2, 2, 3])):
            config = self._changed(config)
        return config

    def _changed(self, config: StageConfig) -> StageConfig:
        field = self.rng.choice(self.fields)
        value = getattr(config, field)
        changed: Any
        if field in self.sets:
            changed = self._of_set(value, self.sets[field])
        elif isinstance(value, bool):
            changed = not value
        else:
            changed = max(int(field == "width"), value + self.rng.choice([-1, 1]))
        return config._replace(**{field: changed})

    def _of_set(self, chosen: Numbers, members: list[int]) -> Numbers:
        """Adds or removes a number, or puts one in the place of another."""
        one = {self.rng.choice(members)}
        others = sorted(chosen.intersection(members) - one)
        if others and self.rng.random() < 0.4:
            return chosen - {self.rng.choice(others)} | one
        return chosen ^ one

    # ---- configurations to begin with

    def starts(self, config: StageConfig, cluster: Cluster, budget: int) -> Iterator[StageConfig]:
        """Yields configurations that fill the memory: for several numbers of recomputed visits, those first that free
        most of it for their seconds, the rest goes to gradients that are reduced once and to weights that stay."""
        layers = self._cheapest(cluster)
        most = len(layers)
        fills = ("resident", "deferred") if "deferred" in self.sets else ("resident",)
        turns = ((1, 2), (2, 2), (2, 3), (3, 2), (3, 4))
        outside = frozenset(unit.id for unit in self.trace.units if unit.stack is None)

        def fits(tried: StageConfig) -> bool:
            try:
                return max(peaks_of(tried.program(self.trace))) <= budget
            except ValueError:
                return False

        for own, by_size, (prefetch, width) in itertools.product((outside, frozenset[int]()), (False, True), turns):
            plain = config._replace(
                resident=own,
                own_grads=own,
                deferred=frozenset(),
                width=width,
                by_size=by_size,
                prefetch=prefetch,
            )
            lists = [plain._replace(recomputed=frozenset(layers[:count])) for count in range(most + 1)]
            if not fits(lists[most]):
                continue
            few = bisect_left(lists, True, hi=most, key=fits)
            counts = {few, few + 1, few + 2, (3 * few + most) // 4, (few + most) // 2, most}
            for count in sorted(counts.intersection(range(most + 1))):
                for fields in itertools.permutations(fills):
                    filled = lists[count]
                    for field in fields:
                        filled = self._filled(filled, field, fits)
                    yield filled

    def _cheapest(self, cluster: Cluster) -> list[int]:
        """Lists visits that may recompute, those that free most memory for their seconds first."""
        costs = Costs(self.trace, cluster)
        price: dict[int, float] = {}
        for v in self.sets.get("recomputed", []):
            backward = Backward(v, (), ())
            again = costs.seconds(backward, recompute=True) - costs.seconds(backward)
            price[v] = again / max(self.trace.visits[v].cost.inner_bytes, 1)
        return sorted(price, key=price.__getitem__)

    def _filled(self, config: StageConfig, field: str, fits: Callable[[StageConfig], bool]) -> StageConfig:
        """Adds as many units to a set as fit, small and late ones first."""
        size = "gather_bytes" if field == "resident" else "reduce_bytes"
        late_first = self.sets[field][::-1]
        late_first.sort(key=lambda unit: getattr(self.trace.units[unit], size))
        filled = [config]
        for unit in late_first:
            chosen = getattr(filled[-1], field)
            if unit not in chosen:
                filled.append(filled[-1]._replace(**{field: chosen | {unit}}))
        return filled[bisect_left(filled, True, lo=1, key=lambda each: not fits(each)) - 1]


# ---- What a program comes to.


class Outcome(NamedTuple):
    """The seconds of a program, infinite where it does not fit or cannot be, and the peak of each stage."""

    seconds: float
    peaks: tuple[int, ...]


NOTHING = Outcome(math.inf, ())
"""The outcome where there is no program."""


def outcome_of(make: Callable[[], Program], cluster: Cluster, budget: int) -> Outcome:
    """Builds a program, and proves and simulates it where it fits into `budget`."""
    try:
        program = make()
        peaks = peaks_of(program)
        if max(peaks) > budget:
            return Outcome(math.inf, peaks)
        verify(program)
    except (ValueError, Refused):
        return NOTHING
    return Outcome(simulate(program, cluster).seconds, peaks)


def peaks_of(program: Program) -> tuple[int, ...]:
    """Returns the predicted peak of each stage, in bytes."""
    return tuple(footprint.predict_memory(part).peak_bytes for part in program.by_stage)
