"""The fastest schedule in simulation that fits into memory.

For every builder on every mesh it can run on, and every prefetch:

    few recomputed layers leave little memory for weights that stay; many cost compute
    so for each number of recomputed layers: as many kept layers as fit, and that simulated
    a coarse sweep over the first number, then finer ones around the best

What cannot beat the best even if nothing ever waited is not simulated.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from yafsdp_fn.planner import footprint
from yafsdp_fn.planner.analysis import work
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.plan import DoesNotFit
from yafsdp_fn.planner.simulate import run, tasks
from yafsdp_fn.planner.space import Point, arguments, arrangements, layers
from yafsdp_fn.schedules import Program, Schedule, Trace, remat, zero3

PREFETCHES = (1, 2, 3)
SHOWN = 1.5
"""Builders and meshes that cannot come within this factor of the best are not looked at."""
NEARBY = 4
"""Where a sweep begins beside a known optimum, its first step is half of this."""
SWEEP = 6
"""Numbers of recomputed layers in the coarse sweep."""


class Choice(NamedTuple):
    """A point of the space and what it comes to. Seconds as `Work` and `Timeline` have them; bytes per rank."""

    point: Point
    step_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int

    def against(self, best: "Choice") -> str:
        """Why it is slower than `best`."""
        more = {"compute": self.compute_s - best.compute_s, "communication": self.comm_s - best.comm_s}
        reasons = [f"{what} {seconds:+.3g} s" for what, seconds in more.items() if seconds > 1e-3 * best.step_s]
        slower = 100 * (self.step_s / best.step_s - 1)
        return f"+{slower:.1f}%: {' and '.join(reasons) or 'the same work, with more waiting'}"


@dataclasses.dataclass(frozen=True)
class Found:
    """The schedule that `search` found. Pass it to `ya.train_step(schedule=...)`, on a state over `mesh`.

    mesh: arguments of `ya.mesh`; runners_up: the best of the other builders and meshes, fastest first
    default: `zero3` with as few recomputed layers as fit, None where none do
    """

    best: Choice
    runners_up: tuple[Choice, ...]
    default: Choice | None
    trace: Trace
    cluster: Cluster
    budget: int

    def __call__(self, trace: Trace) -> Program:
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
    def program(self) -> Program:
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


def search(trace: Trace, cluster: str | Cluster, *, memory: int | None = None, runners_up: int = 5) -> Found:
    """The best schedule for `trace`, on any mesh of as many ranks, under `memory` bytes per rank.

    memory: by default that of the cluster; runners_up: how many to keep
    Raises DoesNotFit where nothing fits.
    """
    where = named(cluster)
    budget = where.memory_bytes if memory is None else memory
    # the first is zero3
    sweeps = [_Sweep(builder, trace.on(mesh), where, budget) for builder, mesh in arrangements(trace, where)]
    found: list[Choice] = []
    fastest = math.inf
    for sweep in sorted(sweeps, key=lambda sweep: sweep.bound):
        if sweep.bound < fastest * SHOWN and (choice := sweep.best()) is not None:
            found.append(choice)
            fastest = min(fastest, choice.step_s)
    if not found:
        raise DoesNotFit(min((sweep.least() for sweep in sweeps), key=lambda m: m.peak_bytes).why_not(budget))
    best, *others = sorted(found, key=_seconds)
    others = [c for c in others if c.point.builder != "hpz" or c.point.kept]  # else zero3 by another name
    default = sweeps[0].fewest_recomputed()
    return Found(best, tuple(others[:runners_up]), default, trace, where, budget)


def min_ckpt_layers(trace: Trace, budget: int, factory: Callable[..., Schedule] = zero3) -> int | None:
    """The fewest first layers that recompute in `budget` bytes per rank, None if not even all fit.

    factory: of the schedule, takes `remat`
    """
    return _fewest(lambda n: footprint.memory(factory(remat=remat.first(n))(trace)).peak_bytes, layers(trace), budget)


class _Sweep:
    """One builder on the mesh of `trace`. What it has evaluated it knows."""

    def __init__(self, builder: str, trace: Trace, cluster: Cluster, budget: int) -> None:
        self.builder, self.trace, self.cluster, self.budget = builder, trace, cluster, budget
        self.layers = layers(trace)
        self._choice, self._peak = functools.cache(self._simulated), functools.cache(self._needed)
        least = self._point(kept=self.layers, prefetch=PREFETCHES[-1], defer=trace.microbatches > 1)
        program = self._program(least)
        self.bound = work(program, tasks(program, cluster), cluster).seconds

    def best(self) -> Choice | None:
        """The fastest that fits, None where nothing does."""
        plain = self.builder == "ddp"  # gathers nothing
        found: list[Choice] = []
        for defer in (False, True) if self.trace.microbatches > 1 and not plain else (False,):
            nearby: Choice | None = None
            for prefetch in PREFETCHES[:1] if plain else PREFETCHES:
                nearby = self._over_remat(self._point(prefetch=prefetch, defer=defer), nearby)
                found += [] if nearby is None else [nearby]
        return min(found, key=_seconds, default=None)

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
        found = min((self._filled(point, n) for n in numbers), key=_seconds)
        while step > 1:
            step //= 2
            near = [n for n in (found.point.remat - step, found.point.remat + step) if least <= n <= self.layers]
            found = min((found, *(self._filled(point, n) for n in near)), key=_seconds)
        return found

    def _filled(self, point: Point, recomputed: int) -> Choice:
        """With as many kept layers as fit beside so many recomputed ones, which do fit."""
        point = point._replace(remat=recomputed)
        if self.builder == "ddp":
            return self._choice(point)
        kept = _last(lambda k: self._peak(point._replace(kept=k)), self.layers, self.budget)
        return self._choice(point._replace(kept=kept))

    def _least_remat(self, point: Point) -> int | None:
        return _fewest(lambda n: self._peak(point._replace(remat=n)), self.layers, self.budget)

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


def _fewest(needs: Callable[[int], int], most: int, budget: int) -> int | None:
    """The fewest recomputed layers that fit, None where not even `most` do. needs: bytes with so many."""
    return None if needs(most) > budget else most - _last(lambda kept: needs(most - kept), most, budget)


def _last(value: Callable[[int], int], most: int, limit: int) -> int:
    """The largest n up to `most` with `value(n) <= limit`: it is for 0, and grows with n, about linearly."""
    low, high = 0, most
    below, above = value(low), value(high)
    if above <= limit:
        return high
    while high - low > 1:
        guess = low + (high - low) * (limit - below) // (above - below)
        middle = min(max(guess, low + 1), high - 1)
        if (found := value(middle)) <= limit:
            low, below = middle, found
        else:
            high, above = middle, found
    return low


def _seconds(choice: Choice) -> tuple[float, float, int]:
    """By time; of equals the one that computes less, then the one that takes less memory."""
    return choice.step_s, choice.compute_s, choice.peak_bytes
