"""The fastest schedule in simulation that fits into memory.

For every builder on every mesh it can run on, and every prefetch:

    few recomputed layers leave little memory for weights that stay; many cost compute
    so for each number of recomputed layers: as many kept layers as fit, and that simulated
    a coarse sweep over the first number, then finer ones around the best

What cannot beat the best even if nothing ever waited is not simulated. Pipeline stages: search_stages.py.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from yafsdp_fn.planner import footprint
from yafsdp_fn.planner.analysis import work
from yafsdp_fn.planner.choices import Choice, by_seconds, fewest, last
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.plan import DoesNotFit
from yafsdp_fn.planner.search_stages import StagedSweep, staged_sweeps
from yafsdp_fn.planner.simulate import run
from yafsdp_fn.planner.space import Point, arguments, arrangements, layers
from yafsdp_fn.planner.stages_space import StagedPoint
from yafsdp_fn.planner.tasks import tasks
from yafsdp_fn.schedules import Program, Schedule, Trace, chained_order, remat, zero3
from yafsdp_fn.schedules.split import Assignment
from yafsdp_fn.schedules.stages.pipeline import Pipeline

PREFETCHES = (1, 2, 3)
SHOWN = 1.5
"""Builders and meshes that cannot come within this factor of the best are not looked at."""
NEARBY = 4
"""Where a sweep begins beside a known optimum, its first step is half of this."""
SWEEP = 6
"""Numbers of recomputed layers in the coarse sweep."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The schedule that `search` found. Pass it to `ya.train_step(schedule=...)`, on a state over `mesh`.

    mesh: arguments of `ya.mesh`; stages: of `ya.init`, where the best has pipeline stages
    runners_up: the best of the other builders and meshes, fastest first
    default: `zero3` with as few recomputed layers as fit, None where none do
    """

    best: Choice
    runners_up: tuple[Choice, ...]
    default: Choice | None
    trace: Trace
    cluster: Cluster
    budget: int

    def __call__(self, trace: Trace) -> Program | Pipeline:
        if trace.mesh != self.best.point.mesh:
            raise ValueError(
                f"this schedule was found for the mesh ({arguments(dict(self.best.point.mesh))}), the state is on "
                f"({arguments(dict(trace.mesh))}): build the state on ya.mesh({arguments(self.mesh)})"
            )
        return self.best.point.schedule()(trace)

    @property
    def mesh(self) -> dict[str, int]:
        return self.best.point.mesh_arguments

    @property
    def stages(self) -> Assignment | None:
        point = self.best.point
        return point.order.assignment(self.trace) if isinstance(point, StagedPoint) else None

    @property
    def program(self) -> Program | Pipeline:
        """The program for the trace that was searched for, on the mesh that was found."""
        return self.best.point.program(self.trace)

    def __str__(self) -> str:
        best = self.best
        lines = [f"{best.point}: {best.step_s:.4g} s a step, {best.peak_bytes / 2**30:.1f} GiB"]
        if self.default is not None and self.default.point != best.point:
            gain = 100 * (1 - best.step_s / self.default.step_s)
            lines.append(f"  {gain:.1f}% shorter than {self.default.point}: {self.default.step_s:.4g} s")
        others = [f"  {choice.point}: {choice.step_s:.4g} s, {choice.against(best)}" for choice in self.runners_up]
        return "\n".join([*lines, *others])


def search(
    trace: Trace,
    cluster: str | Cluster,
    *,
    memory: int | None = None,
    runners_up: int = 5,
    stages: Sequence[int] = (1,),
    ranks: int | None = None,
) -> Found:
    """The best schedule for `trace`, on any mesh of as many ranks, under `memory` bytes per rank.

    memory: by default that of the cluster; runners_up: how many to keep
    stages: numbers of pipeline stages to look at, 1 for none: the same microbatches, which the ranks of a stage share
    ranks: other than those that the trace is of; the step stays that of all batches together

    Raises DoesNotFit where nothing fits, ValueError where the microbatches cannot be shared out.
    """
    where = named(cluster)
    budget = where.memory_bytes if memory is None else memory
    world = trace.ranks * trace.replicas
    total = trace.microbatches * world
    sweeps: list[_Sweep | StagedSweep] = []
    if 1 in stages and total % (ranks or world) == 0:
        alone = trace if ranks is None else _shared(trace, ranks, total // ranks)
        # the first is zero3
        sweeps += [_Sweep(builder, alone.on(mesh), where, budget) for builder, mesh in arrangements(alone, where)]
    sweeps += staged_sweeps(trace, [n for n in stages if n > 1], ranks or world, where, budget)
    if not sweeps:
        raise ValueError(
            f"search(stages={tuple(stages)}): {total} microbatches cannot be shared out to {ranks or world} ranks; "
            "take more stages, more microbatches, or fewer ranks"
        )
    found: list[Choice] = []
    fastest = math.inf
    for sweep in sorted(sweeps, key=lambda sweep: sweep.bound):
        if sweep.bound < fastest * sweep.shown and (choice := sweep.best(fastest)) is not None:
            found.append(choice)
            fastest = min(fastest, choice.step_s)
    if not found:
        raise DoesNotFit(min((sweep.least() for sweep in sweeps), key=lambda m: m.peak_bytes).why_not(budget))
    best, *others = sorted(found, key=by_seconds)
    others = [c for c in others if c.point.builder != "hpz" or c.point.kept]  # else zero3 by another name
    default = sweeps[0].fewest_recomputed() if isinstance(sweeps[0], _Sweep) else None
    return Found(best, tuple(others[:runners_up]), default, trace, where, budget)


def _shared(trace: Trace, ranks: int, microbatches: int) -> Trace:
    """The step on other ranks, which share its microbatches."""
    order = chained_order(trace.visits, microbatches)
    return trace.on((("shard", ranks),))._replace(microbatches=microbatches, order=order)


def min_ckpt_layers(trace: Trace, budget: int, factory: Callable[..., Schedule] = zero3) -> int | None:
    """The fewest first layers that recompute in `budget` bytes per rank, None if not even all fit.

    factory: of the schedule, takes `remat`
    """
    return fewest(lambda n: footprint.memory(factory(remat=remat.first(n))(trace)).peak_bytes, layers(trace), budget)


class _Sweep:
    """One builder on the mesh of `trace`. What it has evaluated it knows."""

    shown = SHOWN

    def __init__(self, builder: str, trace: Trace, cluster: Cluster, budget: int) -> None:
        self.builder, self.trace, self.cluster, self.budget = builder, trace, cluster, budget
        self.layers = layers(trace)
        self._choice, self._peak = functools.cache(self._simulated), functools.cache(self._needed)
        least = self._point(kept=self.layers, prefetch=PREFETCHES[-1], defer=trace.microbatches > 1)
        program = self._program(least)
        self.bound = work(program, tasks(program, cluster), cluster).seconds

    def best(self, fastest: float = math.inf) -> Choice | None:
        """The fastest that fits, None where nothing does."""
        plain = self.builder == "ddp"  # gathers nothing
        found: list[Choice] = []
        for defer in (False, True) if self.trace.microbatches > 1 and not plain else (False,):
            nearby: Choice | None = None
            for prefetch in PREFETCHES[:1] if plain else PREFETCHES:
                nearby = self._over_remat(self._point(prefetch=prefetch, defer=defer), nearby)
                found += [] if nearby is None else [nearby]
        return min(found, key=by_seconds, default=None)

    def least(self) -> footprint.Memory:
        """What it takes when every layer recomputes and none is kept."""
        return footprint.memory(self._program(self._point(remat=self.layers)))

    def fewest_recomputed(self) -> Choice | None:
        """Without kept layers: as few recomputed ones as fit."""
        least = self._least_remat(self._point())
        return None if least is None else self._choice(self._point(remat=least))

    def _over_remat(self, point: Point, nearby: Choice | None) -> Choice | None:
        """The best number of recomputed layers: a coarse sweep, then ever finer steps around the best.

        nearby: the best of a neighbour, to begin from instead of the sweep
        """
        if (least := self._least_remat(point)) is None:
            return None
        if nearby is None:
            step = max(1, -(-(self.layers - least) // SWEEP))
            numbers = {*range(least, self.layers, step), self.layers}
        else:
            step, numbers = NEARBY, {max(least, nearby.point.remat)}
        found = min((self._filled(point, n) for n in numbers), key=by_seconds)
        while step > 1:
            step //= 2
            near = [n for n in (found.point.remat - step, found.point.remat + step) if least <= n <= self.layers]
            found = min((found, *(self._filled(point, n) for n in near)), key=by_seconds)
        return found

    def _filled(self, point: Point, recomputed: int) -> Choice:
        """With as many kept layers as fit beside so many recomputed ones, which do fit."""
        point = point._replace(remat=recomputed)
        if self.builder == "ddp":
            return self._choice(point)
        kept = last(lambda k: self._peak(point._replace(kept=k)), self.layers, self.budget)
        return self._choice(point._replace(kept=kept))

    def _least_remat(self, point: Point) -> int | None:
        return fewest(lambda n: self._peak(point._replace(remat=n)), self.layers, self.budget)

    def _needed(self, point: Point) -> int:
        return footprint.memory(self._program(point)).peak_bytes

    def _simulated(self, point: Point) -> Choice:
        program = self._program(point)
        todo = tasks(program, self.cluster)
        seconds = run(program, todo, self.cluster, str(point)).seconds
        alone = work(program, todo, self.cluster)
        return Choice(point, seconds, alone.compute_s, alone.comm_s, self._peak(point))

    def _program(self, point: Point) -> Program:
        return point.schedule()(self.trace)

    def _point(self, **options: Any) -> Point:
        return Point(self.builder, self.trace.mesh, **options)
