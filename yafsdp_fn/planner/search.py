"""Searches the fastest schedule in simulation that fits into memory, with pipeline stages and without."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from yafsdp_fn.pipelines.orders import V_SHAPED
from yafsdp_fn.planner import footprint
from yafsdp_fn.planner.bound import Bound, bound
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.compare import Comparison, compare
from yafsdp_fn.planner.costs import phases_of_compute, seconds_of
from yafsdp_fn.planner.orders import CallGraph, evaluate
from yafsdp_fn.planner.plan import DoesNotFit
from yafsdp_fn.planner.simulate import run, tasks, work
from yafsdp_fn.planner.space import (
    Choice,
    Order,
    Point,
    arrangements,
    by_seconds,
    fewest,
    last,
    layers,
)
from yafsdp_fn.planner.synthesize import Report, Synthesis, Synthesized
from yafsdp_fn.program.program import stage_trace
from yafsdp_fn.program.split import Assignment
from yafsdp_fn.program.trace import Trace, arguments
from yafsdp_fn.schedules import Program, Schedule, chained_order, remat, zero3
from yafsdp_fn.timeline.text import shown
from yafsdp_fn.util.mesh_axes import EXPERT, MeshAxes, ranks_on

# For every builder on every mesh it can run on, and every prefetch:
#
#     few recomputed layers leave little memory for weights that stay; many cost compute
#     so for each number of recomputed layers: as many kept layers as fit, and that simulated
#     a coarse sweep over the first number, then finer ones around the best
#
# On pipeline stages, for every number of them, order of calls and mesh of a stage: the fewest recomputed layers that
# fit, then more. Memory is looked at on the first stage and the last, in few microbatches, and at the end on all.
#
# What cannot beat the best even if nothing ever waited, but for filling and draining, is not simulated.

PREFETCHES = (1, 2, 3)
SHOWN = 1.5
STAGES_SHOWN = 0.99
"""Builders and meshes that cannot come within this factor of the best are not looked at; on stages and over axes inside
blocks, a hundredth below it."""
SWEEP = 6
"""Numbers of recomputed layers in the coarse sweep."""

AMPLE = 1 << 60
"""Bytes in which everything fits."""
INSIDES = 2
"""Synthesis begins with every order of calls, with so many of the best configurations inside stages."""
UNDER_WAY = 3
"""Memory is looked at in so many microbatches per stage: but for gpipe, more are never under way at once."""


@dataclasses.dataclass(frozen=True, repr=False)
class Found:
    """The schedule that `search` found. Pass it to `ya.train_step(schedule=...)`, on a state over `mesh`.

    mesh: arguments of `ya.mesh`; stages: of `ya.init`, where the best has pipeline stages
    runners_up: the best of the other builders and meshes, fastest first
    default: `zero3` with as few recomputed layers as fit, None where none do
    synthesized: what was made from the best, if that was asked for: it is then the schedule

    >>> found = ya.planner.search(trace, "a100-80g")
    >>> found.best.point.builder, found.mesh, len(found.runners_up)
    ('zero3', {}, 1)
    """

    best: Choice
    runners_up: tuple[Choice, ...]
    default: Choice | None
    trace: Trace
    cluster: Cluster
    budget: int
    synthesized: Synthesized | None = None

    def __call__(self, trace: Trace) -> Program:
        if trace.mesh != self.point.mesh:
            raise ValueError(
                f"this schedule was found for the mesh ({arguments(dict(self.point.mesh))}), the state is on "
                f"({arguments(dict(trace.mesh))}): build the state on ya.mesh({arguments(self.mesh)})"
            )
        schedule = self.synthesized or self.best.point.schedule()
        return schedule(trace)

    @property
    def point(self) -> Point:
        """The mesh and the stages of what is run: a synthesized program may have others than the best builder."""
        return self.best.point if self.synthesized is None else self.synthesized.design.point

    @property
    def mesh(self) -> dict[str, int]:
        return self.point.mesh_arguments

    @property
    def stages(self) -> Assignment | None:
        return self.point.assignment(self.trace)

    @property
    def program(self) -> Program:
        """The program for the trace that was searched for, on the mesh that was found."""
        return self.best.point.program(self.trace) if self.synthesized is None else self.synthesized.program

    @property
    def least(self) -> Bound:
        """The bound that no program falls below on the mesh and the stages that were found."""
        return bound(self.best.point.whole(self.trace), self.cluster, self.budget)

    def compared(self, tokens: int = 0) -> Comparison:
        """Returns the best builder's step and what was written from it, in one table and one picture.

        tokens: of a step, over all ranks. Raises ValueError where nothing was written.

        >>> both = ya.planner.search(trace, "a100-80g", synthesize=60, moves=4).compared()
        >>> both.timelines.keys()                                # both.save("written.png")
        dict_keys(['best builder', 'written'])
        """
        if self.synthesized is None:
            raise ValueError("compared(): nothing was written: search(..., synthesize=seconds)")
        both = {"best builder": self.best.point.program(self.trace), "written": self.synthesized.program}
        found = compare(both, self.cluster, tokens=tokens, memory=self.budget)
        return found._replace(words=tuple(str(self.synthesized).splitlines()))

    def __repr__(self) -> str:
        return f"Found({str(self).partition(chr(10))[0]})"

    def __str__(self) -> str:
        best = self.best
        is_default = self.default is not None and self.default.point == best.point
        head = f"{best.point}: {shown(best.step_s, 4)} a step, {footprint.gib(best.peak_bytes)} GiB"
        if is_default:
            head += "; nothing else is faster than this default"
        if self.synthesized is not None and self.synthesized.step_s >= best.step_s:
            head += "; nothing that was written is faster"
        lines = [head, f"  {self.least.against(best.step_s)}"]
        if self.default is not None and not is_default:
            gain = 100 * (1 - best.step_s / self.default.step_s)
            lines.append(f"  {gain:.1f}% shorter than {self.default.point}: {shown(self.default.step_s, 4)}")
        for choice in self.runners_up:
            lines.append(f"  {choice.point}: {shown(choice.step_s, 4)}, {choice.against(best)}")
        if self.synthesized is not None:
            lines.append(str(self.synthesized))
        return "\n".join(lines)


def search(
    trace: Trace | Sequence[Trace],
    cluster: str | Cluster,
    *,
    memory: int | None = None,
    runners_up: int = 5,
    stages: Sequence[int] = (1,),
    ranks: int | None = None,
    synthesize: float = 0.0,
    moves: int = 2000,
    seed: int = 0,
    report: Report | None = None,
) -> Found:
    """Returns the best schedule for `trace`, on any mesh of as many ranks, under `memory` bytes per rank.

    trace: or several, of the step over other axes inside blocks each: with as many ranks, and microbatches of the same
        rows, of which a rank of `context` has a part. The ranks that read batches share the microbatches out
    memory: by default that of the cluster; runners_up: how many to keep
    stages: numbers of pipeline stages to look at, 1 for none: the same microbatches, which the ranks of a stage share
    ranks: other than those that the trace is of; the step stays that of all batches together
    synthesize: seconds for writing a program that no builder has, from the best builder's and the runners-up's
        (`Found.synthesized`): `moves` changes are tried, fewer where the seconds are over; the same `seed` and moves
        write the same, and `Synthesized.more` goes on from there. report: is given a line whenever there is a better
        one

    Raises DoesNotFit where nothing fits, ValueError where the microbatches cannot be shared out.

    >>> found = ya.planner.search(trace, "a100-80g", runners_up=1)
    >>> found.best.step_s <= found.runners_up[0].step_s
    True
    """
    if isinstance(stages, int) or min(stages, default=0) < 1:
        raise ValueError(f"search(stages={stages}): expected numbers of pipeline stages, such as (1, 2), 1 for none")
    where = named(cluster)
    budget = where.budget(memory)
    traces = [trace] if isinstance(trace, Trace) else [*trace]
    total = traces[0].microbatches * traces[0].batch_ranks
    world = traces[0].stage_ranks if ranks is None else ranks
    if type(world) is not int or world < 1:
        raise ValueError(f"search(ranks={ranks!r}): expected a number of ranks, 1 or more")
    if len({(each.stage_ranks, len(each.visits)) for each in traces}) > 1:
        raise ValueError("search: expected traces of one step, over other axes inside blocks each, on as many ranks")
    sweeps = [
        Sweep(point, of, where, budget)
        for each in traces
        for point, of in points(each, sorted({*stages}), world, where, total)
    ]
    if not sweeps:
        raise ValueError(
            f"search(stages={tuple(stages)}): {total} microbatches cannot be shared out to {world} ranks; "
            "take more stages, more microbatches, or fewer ranks. Ranks divide into stages, and microbatches among the "
            "ranks of a stage"
        )
    found: dict[Choice, Trace] = {}
    fastest = math.inf
    for sweep in sorted(sweeps, key=lambda sweep: sweep.bound):
        if sweep.bound >= fastest * sweep.shown:
            continue
        choice = sweep.best(fastest)
        if choice is not None:
            found[choice] = sweep.trace
            fastest = min(fastest, choice.step_s)
    if not found:
        least = min((sweep.least() for sweep in sweeps), key=lambda memory: memory.peak_bytes)
        raise DoesNotFit(least.why_not(budget))
    best, *others = sorted(found, key=by_seconds)
    others = [c for c in others if c.point.builder != "hpz" or c.point.kept][:runners_up]  # else zero3, renamed
    default = sweeps[0].fewest_recomputed() if sweeps[0].plain.order is None else None
    result = Found(best, tuple(others), default, found[best], where, budget)
    if not synthesize:
        return result
    of_step = [choice.point for choice in (best, *others) if found[choice] is result.trace]
    alike = [point for point in of_step if (point.order is None) == (best.point.order is None)]
    for point in alike[:INSIDES]:
        if point.order is not None:
            every = orders(result.trace, point.order.stages, point.order.microbatches)
            alike += [point._replace(order=order) for order in every]
    writing = Synthesis(result.trace, alike, where, budget, seed)
    return dataclasses.replace(result, synthesized=writing.run(moves, seconds=synthesize, report=report))


def min_ckpt_layers(trace: Trace, budget: int, factory: Callable[..., Schedule] = zero3) -> int | None:
    """Returns the fewest first layers that recompute in `budget` bytes per rank, None if not even all fit.

    factory: of the schedule, takes `remat`

    >>> ya.planner.min_ckpt_layers(trace, budget=2**30)        # nothing need recompute
    0
    """
    return fewest(
        lambda n: footprint.predict_memory(factory(remat=remat.first(n))(trace)).peak_bytes, layers(trace), budget
    )


class Sweep:
    """One builder on one mesh, alone or on the stages of an order. What it has evaluated it knows."""

    def __init__(self, plain: Point, trace: Trace, cluster: Cluster, budget: int) -> None:
        self.plain = plain
        self.trace = trace
        self.cluster = cluster
        self.budget = budget
        self._choice = functools.cache(self._simulated)
        self._peak = functools.cache(self._needed)
        order = plain.order
        self.whole = plain.whole(trace)
        self.traces = [self.whole] if order is None else _ends(order, trace, plain.mesh)  # whose memory is looked at
        self.layers = max(map(layers, self.traces))
        self.shown = SHOWN if order is None and ranks_on(trace.inside) == 1 else STAGES_SHOWN
        self.defers = self.whole.microbatches > 1 and plain.builder != "ddp"
        self.bound = max(bound(part, cluster, AMPLE).seconds for part in self.traces)
        if order is not None:
            calls = CallGraph.of_step(self.whole, cluster)._replace(message=0.0)
            self.bound = max(self.bound, evaluate(calls, order.rows(self.whole)).seconds)
            costs = [self.whole.visits[visit].cost for visit in remat.layer_visits(self.whole)]
            forwards = [phases_of_compute(cluster, cost, "fused", forward=True) for cost in costs]
            self.again = order.microbatches * min(map(seconds_of, forwards), default=0.0)  # of a layer, recomputed

    def best(self, fastest: float = math.inf) -> Choice | None:
        """Returns the fastest that fits, None where nothing does; on stages, or none is faster than `fastest`."""
        alone = self.plain.order is None
        prefetches = PREFETCHES if alone and self.plain.builder != "ddp" else PREFETCHES[:1]  # it gathers nothing
        found: list[Choice] = []
        for defer, prefetch in itertools.product((True, False) if self.defers else (False,), prefetches):
            point = self.plain._replace(prefetch=prefetch, defer=defer)
            least = self._least_remat(point)
            if least is None:
                continue
            if alone:
                found.append(self._over_remat(point, least))
                continue
            for recomputed in sorted({least, (least + self.layers) // 2, self.layers}):
                if self.bound + self.again * recomputed < fastest:
                    choice = self._filled(point, recomputed)
                    if choice.peak_bytes <= self.budget:
                        found.append(choice)
                        fastest = min(fastest, choice.step_s)
        return min(found, key=by_seconds, default=None)

    def least(self) -> footprint.Memory:
        """Returns the memory it takes when every layer recomputes and none is kept."""
        return footprint.predict_memory(self.plain._replace(remat=self.layers).sharding()(self.traces[0]))

    def fewest_recomputed(self) -> Choice | None:
        """Returns the choice without kept layers: as few recomputed ones as fit."""
        least = self._least_remat(self.plain)
        return None if least is None else self._choice(self.plain._replace(remat=least))

    def _over_remat(self, point: Point, least: int) -> Choice:
        """Returns the best number of recomputed layers: a coarse sweep, then ever finer steps around the best."""
        step = max(1, math.ceil((self.layers - least) / SWEEP))
        numbers = {*range(least, self.layers, step), self.layers}
        found = min((self._filled(point, n) for n in numbers), key=by_seconds)
        while step > 1:
            step //= 2
            best = found.point.remat
            for n in (best - step, best + step):
                if least <= n <= self.layers:
                    found = min(found, self._filled(point, n), key=by_seconds)
        return found

    def _filled(self, point: Point, recomputed: int) -> Choice:
        """Returns the choice with as many kept layers as fit beside so many recomputed ones; on stages messages may be
        too much even for none."""
        point = point._replace(remat=recomputed)
        if self.plain.builder != "ddp":
            fits = last(lambda kept: self._peak(point._replace(kept=kept)), self.layers, self.budget)
            point = point._replace(kept=fits)
        choice = self._choice(point)
        while choice.peak_bytes > self.budget and point.kept:
            point = point._replace(kept=point.kept - 1)
            choice = self._choice(point)
        return choice

    def _least_remat(self, point: Point) -> int | None:
        return fewest(lambda n: self._peak(point._replace(remat=n)), self.layers, self.budget)

    def _needed(self, point: Point) -> int:
        """Bytes, on stages of the first or the last, without what is under way to other stages."""
        return max(footprint.predict_memory(point.sharding()(part)).peak_bytes for part in self.traces)

    def _simulated(self, point: Point) -> Choice:
        program = point.schedule()(self.whole)
        peak = self._peak(point) if point.order is None else footprint.predict_memory(program).peak_bytes
        if peak > self.budget:
            return Choice(point, math.inf, math.inf, math.inf, peak)
        todo = tasks(program, self.cluster)
        alone = work(program, todo, self.cluster)
        seconds = run(program, todo, self.cluster).seconds
        return Choice(point, seconds, alone.compute_s, alone.comm_s, peak)


def _ends(order: Order, trace: Trace, mesh: MeshAxes) -> list[Trace]:
    """Returns the parts of the first stage and the last in a step of few microbatches."""
    if order.name != "gpipe":
        order = order._replace(microbatches=min(order.microbatches, UNDER_WAY * order.stages))
    whole = order.whole(trace, mesh)
    rows = order.rows(whole)
    return [stage_trace(whole, stage, rows[stage]) for stage in (0, order.stages - 1)]


def points(
    trace: Trace, numbers: Sequence[int], ranks: int, cluster: Cluster, total: int
) -> Iterator[tuple[Point, Trace]]:
    """Yields a point for each of `numbers` of stages, order and mesh, on `ranks` ranks in all, for `total` microbatches
    that the ranks of a stage share, and the step that it is of; without stages, one for each builder and mesh, zero3
    first. Numbers that do not fit the ranks, nodes or microbatches are left out."""
    node = cluster.gpus_per_node
    alike = ranks_on(trace.inside)  # a copy of the state has at least these
    shares = total * alike // dict(trace.inside).get(EXPERT, 1)  # ranks that differ on other axes share rows
    for number in numbers:
        width = ranks // number
        if ranks % number or width % alike or shares % width:
            continue
        microbatches = shares // width
        of_stage = trace.on((("shard", width // alike), *trace.inside))
        if number == 1:
            alone = of_stage._replace(microbatches=microbatches, order=chained_order(trace.visits, microbatches))
            if (ranks, microbatches) == (trace.stage_ranks, trace.microbatches):
                alone = trace
            for builder, mesh in arrangements(alone, cluster):
                yield Point(builder, mesh), alone
        elif width % node == 0 or node % width == 0:
            inside = [*arrangements(of_stage, cluster, few=True)]
            for order in orders(trace, number, microbatches):
                for builder, mesh in inside:
                    yield Point(builder, (("stage", number), *mesh), order=order), trace


def orders(trace: Trace, stages: int, microbatches: int) -> Iterator[Order]:
    """Yields the orders that `stages` stages can run: 1F1B, halves of backwards, V-shaped that of the most memory
    first; and with 2, 4, 8, ... segments each, or as many as make them equal, interleaved, and all microbatches through
    one before the next (gpipe)."""
    visits = len(trace.visits)
    if visits < stages:
        return
    yield Order("one_f_one_b", stages, 1, microbatches)
    yield Order("zero_bubble", stages, 1, microbatches)
    if 2 * stages <= visits:
        yield from (Order(name, stages, 2, microbatches) for name in V_SHAPED)
    layers = len(remat.layer_visits(trace))
    for per_stage in range(2, visits // stages + 1):
        if layers % (stages * per_stage) and per_stage & (per_stage - 1):
            continue
        yield Order("interleaved", stages, per_stage, microbatches)
        if microbatches >= 2 * stages:  # else as interleaved, with more under way
            yield Order("gpipe", stages, per_stage, microbatches)
