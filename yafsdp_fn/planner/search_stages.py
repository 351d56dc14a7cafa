"""The part of a search that has pipeline stages.

For every number of stages, order of calls and mesh of a stage, and reductions once per step or per microbatch:

    the fewest recomputed layers of a stage that fit, then more: with each as many kept layers as fit, simulated
    memory is looked at on the first stage and the last, in few microbatches, and at the end on all

What cannot be a hundredth faster than the best, even without waiting but for filling and draining, is not simulated.
"""

import functools
import math
from collections.abc import Iterator, Sequence

from yafsdp_fn.planner import footprint, stages
from yafsdp_fn.planner.analysis import work
from yafsdp_fn.planner.choices import Choice, by_seconds, fewest, last
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.costs import phases_of_compute
from yafsdp_fn.planner.space import Mesh, Point
from yafsdp_fn.planner.stages_space import Order, StagedPoint, arrangements, least_communication, least_seconds, orders
from yafsdp_fn.schedules import remat
from yafsdp_fn.schedules.stages import calls
from yafsdp_fn.schedules.stages.part import part_of
from yafsdp_fn.schedules.trace import Trace

UNDER_WAY = 3
"""Memory is looked at in so many microbatches per stage: but for gpipe, more are never under way at once."""


def staged_sweeps(
    trace: Trace, numbers: Sequence[int], ranks: int, cluster: Cluster, budget: int
) -> Iterator["StagedSweep"]:
    """A sweep for each of `numbers` of stages, order and mesh, on `ranks` ranks in all. Numbers that do not fit the
    ranks, nodes or microbatches are left out."""
    total, node = trace.microbatches * trace.ranks * trace.replicas, cluster.gpus_per_node
    for number in numbers:
        width = ranks // number
        if ranks % number or total % width or (width % node and node % width):
            continue
        for order in orders(trace, number, total // width):
            for builder, mesh in arrangements(width, cluster):
                yield StagedSweep(order, builder, mesh, trace, cluster, budget)


class StagedSweep:
    """One order, with one builder on the mesh of each stage. What it has evaluated it knows."""

    shown = 0.99

    def __init__(self, order: Order, builder: str, mesh: Mesh, trace: Trace, cluster: Cluster, budget: int) -> None:
        self.order, self.trace, self.cluster, self.budget = order, trace, cluster, budget
        self.plain = Point(builder, mesh)
        self.whole = order.whole(trace, mesh)
        most = order.microbatches if order.name == "gpipe" else UNDER_WAY * order.stages
        few = order._replace(microbatches=min(order.microbatches, most))
        whole = few.whole(trace, mesh)
        assert whole.split is not None
        rows = getattr(calls, order.name)(whole.split, few.microbatches)
        self.parts = [part_of(whole, stage, rows[stage]) for stage in (0, order.stages - 1)]
        alone = max(least_communication(part, cluster) for part in self.parts)
        self.bound = max(least_seconds(self.whole, order, cluster), alone)
        self.layers = max(len(remat.layer_visits(part)) for part in self.parts)
        costs = [self.whole.visits[visit].cost for visit in remat.layer_visits(self.whole)]
        again = [phases_of_compute(cluster, cost, forward=True, backward=False) for cost in costs]
        self.again = min((sum(phase.seconds for phase in phases) for phases in again), default=0.0)
        self._peak = functools.cache(self._needed)

    def best(self, fastest: float) -> Choice | None:
        """The fastest that fits, None where nothing does, or is faster than `fastest`."""
        found: list[Choice] = []
        for defer in (True, False) if self.plain.builder != "ddp" and self.order.microbatches > 1 else (False,):
            point = self.plain._replace(defer=defer)
            least = fewest(lambda n, p=point: self._peak(p._replace(remat=n)), self.layers, self.budget)  # type: ignore[misc]
            for number in () if least is None else sorted({least, (least + self.layers) // 2, self.layers}):
                slower = self.bound + self.order.microbatches * number * self.again
                if slower < min([fastest, *(choice.step_s for choice in found)]):
                    found += self._filled(point._replace(remat=number))
        return min(found, key=by_seconds, default=None)

    def least(self) -> footprint.Memory:
        """What it takes when every layer recomputes and none is kept."""
        program = self.plain._replace(remat=self.layers).schedule()(self.parts[0])
        return footprint.memory(program)

    def _filled(self, point: Point) -> list[Choice]:
        """With as many kept layers as fit beside so many recomputed ones; nothing where messages are too much."""
        if point.builder != "ddp":
            kept = last(lambda k: self._peak(point._replace(kept=k)), self.layers, self.budget)
            point = point._replace(kept=kept)
        choice = self._choice(point)
        while choice.peak_bytes > self.budget and point.kept:
            point = point._replace(kept=point.kept - 1)
            choice = self._choice(point)
        return [choice] if choice.peak_bytes <= self.budget else []

    def _needed(self, point: Point) -> int:
        """Bytes of the first stage or the last, without what is under way to other stages."""
        return max(footprint.memory(point.schedule()(part)).peak_bytes for part in self.parts)

    def _choice(self, inside: Point) -> Choice:
        point = StagedPoint(self.order, inside)
        pipeline = point.schedule()(self.whole)
        peak = max(memory.peak_bytes for memory in footprint.memory(pipeline))
        if peak > self.budget:
            return Choice(point, math.inf, math.inf, math.inf, peak)
        todo = stages.tasks_of(pipeline, self.cluster)
        seconds = stages.run(pipeline, todo, self.cluster).seconds
        alone = work(pipeline, todo, self.cluster)
        return Choice(point, seconds, alone.compute_s, alone.comm_s, peak)
