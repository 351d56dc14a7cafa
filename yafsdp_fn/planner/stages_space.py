"""What `search` looks through with pipeline stages: orders of calls, segments a stage, and a schedule inside of stages.

    interleaved(zero3(resident=10, defer=True)) on ya.mesh(stage=8, replicate=4), 32 microbatches
    order       inside of each stage                      mesh

A step stays the same step: as many microbatches of the same size, that the ranks of one stage share out.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from yafsdp_fn.planner.cluster import Cluster, Phase
from yafsdp_fn.planner.costs import groups, half_of, phases, phases_of_compute
from yafsdp_fn.planner.events import LINKS
from yafsdp_fn.planner.space import Mesh, Point, arguments
from yafsdp_fn.schedules import remat
from yafsdp_fn.schedules.further_ops import AllReduce
from yafsdp_fn.schedules.ops import Gather, Op, Reduce
from yafsdp_fn.schedules.split import Assignment
from yafsdp_fn.schedules.stages import builders
from yafsdp_fn.schedules.stages.builders import StageSchedule
from yafsdp_fn.schedules.stages.cut import Shape, assign, cut
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.schedules.trace import Trace, chained_order

HALVED = ("zero_bubble", "v_shaped")
"""Orders with backwards in halves."""


class Order(NamedTuple):
    """Calls on stages. name: of a builder of pipelines; microbatches: of each stage"""

    name: str
    stages: int
    per_stage: int
    microbatches: int

    def assignment(self, trace: Trace) -> Assignment:
        """Of the units of `trace` to stages, even by cost."""
        shape: Shape = "v" if self.name == "v_shaped" else "loop"
        return assign(trace, self.stages, per_stage=self.per_stage, shape=shape)

    def whole(self, trace: Trace, inside: Mesh) -> Trace:
        """The step of `trace` in these microbatches, cut, on stages with the mesh `inside`."""
        moved = trace.on((("stage", self.stages), *inside))
        order = chained_order(trace.visits, self.microbatches)
        return cut(moved._replace(microbatches=self.microbatches, order=order), self.assignment(trace))


class StagedPoint(NamedTuple):
    """An order, and what builds the program of each stage; `inside.mesh` is that of one stage."""

    order: Order
    inside: Point

    @property
    def builder(self) -> str:
        return self.order.name

    @property
    def kept(self) -> int:
        return self.inside.kept

    @property
    def remat(self) -> int:
        return self.inside.remat

    @property
    def mesh(self) -> Mesh:
        return (("stage", self.order.stages), *self.inside.mesh)

    def schedule(self) -> StageSchedule:
        return builders.FACTORIES[self.order.name](self.inside.schedule())

    def program(self, trace: Trace) -> Pipeline:
        """The pipeline on this point's mesh, whatever that of `trace` is."""
        return self.schedule()(self.order.whole(trace, self.inside.mesh))

    @property
    def mesh_arguments(self) -> dict[str, int]:
        """What `ya.mesh` takes for it."""
        return {"stage": self.order.stages} | self.inside.mesh_arguments

    def __str__(self) -> str:
        """As Python: the builder's call, and the mesh; beside it the segments and microbatches."""
        inside = str(self.inside).partition(" on ")[0]
        segments = f", {self.order.per_stage} segments a stage" * (self.order.per_stage > 1)
        made = f"{self.order.name}({inside}) on ya.mesh({arguments(self.mesh_arguments)})"
        return f"{made}, {self.order.microbatches} microbatches{segments}"


def orders(trace: Trace, stages: int, microbatches: int) -> Iterator[Order]:
    """Those that `stages` stages can run: 1F1B, halves of backwards; and with 2, 4, 8, ... segments each, or as many as
    make them equal, interleaved, and all microbatches through one segment before the next (gpipe)."""
    visits = len(trace.visits)
    if visits < stages:
        return
    yield Order("one_f_one_b", stages, 1, microbatches)
    yield Order("zero_bubble", stages, 1, microbatches)
    if 2 * stages <= visits:
        yield Order("v_shaped", stages, 2, microbatches)
    layers = len(remat.layer_visits(trace))
    for per_stage in range(2, visits // stages + 1):
        if layers % (stages * per_stage) and per_stage & (per_stage - 1):
            continue
        yield Order("interleaved", stages, per_stage, microbatches)
        if microbatches >= 2 * stages:  # else as interleaved, with more under way
            yield Order("gpipe", stages, per_stage, microbatches)


def arrangements(ranks: int, cluster: Cluster) -> Iterator[tuple[str, Mesh]]:
    """Builders and meshes for the `ranks` ranks of a stage: shard groups of all, of a quarter, of a node, or of one
    rank alone."""
    node = cluster.gpus_per_node
    yield "zero3", (("shard", ranks),)
    for size in sorted({ranks // 4, node}):
        if 1 < size < ranks and ranks % size == 0 and (size % node == 0 or node % size == 0):
            yield "hsdp", (("replicate", ranks // size), ("shard", size))
    if ranks > 1:
        yield "ddp", (("replicate", ranks), ("shard", 1))


def least_seconds(whole: Trace, order: Order, cluster: Cluster) -> float:
    """No program of `order` is faster: what comes before a stage's first call, its calls, what comes after its last."""
    assert whole.split is not None
    halved = order.name in HALVED
    forward, backward, inputs = ([0.0] * len(whole.split.homes) for _ in range(3))
    for visit in whole.visits:
        at = whole.split.segment(visit.id)
        forward[at] += _seconds(phases_of_compute(cluster, visit.cost, forward=True, backward=False))
        backward[at] += _seconds(phases_of_compute(cluster, visit.cost, forward=False, backward=True))
        inputs[at] += _seconds(phases_of_compute(cluster, half_of(visit.cost, "inputs"), forward=False, backward=True))
    most = 0.0
    for stage in range(order.stages):
        own = whole.split.of(stage)
        busy = order.microbatches * sum(forward[s] + backward[s] for s in own)
        fill, drain = sum(forward[: own[0]]), sum((inputs if halved else backward)[: own[0]])
        most = max(most, fill + busy + (0.0 if halved else drain))
    return most


def least_communication(part: Trace, cluster: Cluster) -> float:
    """Seconds of a link or stream, of a program of `part` that gathers each of its units once, and reduces it once."""
    places, held = groups(part, cluster), [unit.id for unit in part.units if unit.numel]
    links: defaultdict[str, float] = defaultdict(float)
    for unit in held:
        ops: list[Op] = [Gather((unit,), (0,))]
        if unit in part.trained:
            ops += [Reduce((unit,), (0,)), *[AllReduce((unit,))] * (part.replicas > 1)]
        for op in ops:
            for resource, seconds in phases(op, part, cluster, places, False):
                links[op.stream] += seconds
                links[resource] += seconds * (resource in LINKS)
    return max(links.values(), default=0.0)


def _seconds(of: Sequence[Phase]) -> float:
    return sum(phase.seconds for phase in of)
