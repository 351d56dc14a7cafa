"""The space that `search` looks through: builders, the meshes they run on, their options, and choices among them."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from yafsdp_fn.pipelines import orders
from yafsdp_fn.pipelines.assign import Shape
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.program.split import CallRows
from yafsdp_fn.program.trace import arguments
from yafsdp_fn.schedules import (
    Assignment,
    Program,
    Schedule,
    Trace,
    assign,
    chained_order,
    cut,
    ddp,
    hpz,
    hsdp,
    remat,
    zero3,
)
from yafsdp_fn.timeline.text import shown
from yafsdp_fn.util.mesh_axes import MeshAxes, inside_of, ranks_on
from yafsdp_fn.util.words import counted

# ---- The space that `search` looks through: builders, the meshes they run on, and their options.
#
# zero3(resident=10, defer=True) on ya.mesh(replicate=4)
#
# interleaved(zero3(resident=10, defer=True)) on ya.mesh(stage=8, replicate=4), 32 microbatches
# order       inside of each stage                      mesh


class Order(NamedTuple):
    """Calls on stages. name: of a builder of pipelines; microbatches: of each stage"""

    name: str
    stages: int
    per_stage: int
    microbatches: int

    def assignment(self, trace: Trace) -> Assignment:
        """Assigns the units of `trace` to stages, even by cost."""
        shape: Shape = "v" if self.name in orders.V_SHAPED else "loop"
        return assign(trace, self.stages, per_stage=self.per_stage, shape=shape)

    def whole(self, trace: Trace, mesh: MeshAxes) -> Trace:
        """Returns the step of `trace` in these microbatches, cut, on `mesh`, whose axis `stage` is the outermost."""
        moved = trace.on(mesh)
        order = chained_order(trace.visits, self.microbatches)
        return cut(moved._replace(microbatches=self.microbatches, order=order), self.assignment(trace))

    def rows(self, whole: Trace) -> CallRows:
        """Returns the calls of each stage in `whole`, a step that is cut so."""
        return orders.ORDERS[self.name](orders.split_of(whole), whole.microbatches)


class Point(NamedTuple):
    """Arguments of a builder and of `ya.mesh`.

    remat: first layers that recompute; kept: layers that are gathered once per step, the last ones in slots of their
    own (`resident`), or for hpz the first ones in secondary shards (`layers`)
    order: of calls, across stages; the other fields then describe each stage
    """

    builder: str
    mesh: MeshAxes
    remat: int = 0
    kept: int = 0
    prefetch: int = 1
    defer: bool = False
    order: Order | None = None

    def schedule(self) -> Schedule:
        inside = self.sharding()
        return inside if self.order is None else orders.FACTORIES[self.order.name](inside)

    def sharding(self) -> Schedule:
        """Returns the schedule of one stage's part of a step, or of a step without stages."""
        again = remat.first(self.remat)
        match self.builder:
            case "ddp":
                return ddp(remat=again)
            case "hpz":
                return hpz(self.kept, prefetch=self.prefetch, remat=again, defer=self.defer)
            case name:
                made = hsdp if name == "hsdp" else zero3
                return made(resident=self.kept, prefetch=self.prefetch, remat=again, defer=self.defer)

    def program(self, trace: Trace) -> Program:
        """Returns the program on this point's mesh, for a trace of any mesh."""
        return self.schedule()(self.whole(trace))

    def whole(self, trace: Trace) -> Trace:
        """Returns the step of `trace` on this point's mesh, cut where it has stages."""
        return trace.on(self.mesh) if self.order is None else self.order.whole(trace, self.mesh)

    def assignment(self, trace: Trace) -> Assignment | None:
        """Returns the stages of the units of `trace`, None without stages."""
        return None if self.order is None else self.order.assignment(trace)

    @property
    def mesh_arguments(self) -> dict[str, int]:
        """The arguments of `ya.mesh` for it."""
        axes = dict(self.mesh)
        names = ("stage", "replicate", "local", *inside_of([*axes]))
        sizes = {name: axes[name] for name in names if name in axes}
        return sizes | ({"shard": 1} if self.builder == "ddp" else {})

    def __str__(self) -> str:
        """Writes the point as Python: the builder's call, and the mesh where it is not the plain one; beside it the
        microbatches of an order, and its segments."""
        options = [
            f"{self.kept}" if self.builder == "hpz" else f"resident={self.kept}" if self.kept else "",
            f"prefetch={self.prefetch}" if self.prefetch != 1 and self.builder != "ddp" else "",
            f"remat=ya.schedules.remat.first({self.remat})" if self.remat else "",
            "defer=True" if self.defer else "",
        ]
        mesh = arguments(self.mesh_arguments)
        call = f"{self.builder}({', '.join(filter(None, options))})"
        on = f" on ya.mesh({mesh})" if mesh else ""
        if self.order is None:
            return call + on
        segments = f", {self.order.per_stage} segments a stage" * (self.order.per_stage > 1)
        return f"{self.order.name}({call}){on}, {counted(self.order.microbatches, 'microbatch')}{segments}"


def arrangements(trace: Trace, cluster: Cluster, *, few: bool = False) -> Iterator[tuple[str, MeshAxes]]:
    """Builders and the meshes of as many ranks as `trace` has that they can run on.

    Shard groups fill whole nodes, or divide one: rings of ranks from part of each of several nodes share network cards.
    Axes inside blocks stay as they are, innermost. few: those for a stage: shard groups of all, of a quarter, of a node
    """
    world = trace.stage_ranks
    node = cluster.gpus_per_node
    nodes = world // node
    alike = ranks_on(trace.inside)  # a copy of the state has at least these
    nested = nodes > 1 and node % alike == 0
    # ranks that sum themselves exchange everything: inside the node first
    by_node = nested and any(unit.sum_bytes for unit in trace.units)

    def cut(size: int, by_node: bool) -> MeshAxes:
        if by_node:
            return (("node", size // node), ("local", node // alike), *trace.inside)
        return (("shard", size // alike), *trace.inside)

    yield "zero3", cut(world, by_node)
    if nested and node > 1 and not few:
        yield "hpz", cut(world, True)
    for size in _group_sizes(world, node):
        if size % alike == 0 and (not few or size in (world // 4, node, alike)):
            yield "hsdp", (("replicate", world // size), *cut(size, by_node and size > node))
    if world > 1 and alike == 1:
        yield "ddp", (("replicate", world), ("shard", 1))


def _group_sizes(world: int, node: int) -> list[int]:
    """Sizes of shard groups other than 1 and all: divisors of a node, then nodes by doubling."""
    sizes = []
    for size in range(2, world):
        nodes, rest = divmod(size, node)
        doubled = rest == 0 and nodes.bit_count() == 1
        if world % size == 0 and (node % size == 0 or doubled):
            sizes.append(size)
    return sizes


def layers(trace: Trace) -> int:
    """Visits to layers of stacks: as many can recompute. No more units than that can be kept."""
    return len(remat.layer_visits(trace))


# ---- What a search chooses from, and how far a number can go within a limit.


ALIKE = 0.07
"""Two choices that differ by less cannot be told apart: of the ratios of published steps that differ in their schedule
alone, four fifths are predicted within this, half within 4% (48 pairs of Zero Bubble's runs, docs/accuracy.md)."""


class Choice(NamedTuple):
    """A point of the space with its predicted time and memory: seconds as in `Work` and `Timeline`, bytes per rank."""

    point: Point
    step_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int

    def against(self, best: "Choice") -> str:
        """Says why it is slower than `best`."""
        reasons: list[str] = []
        more = {"compute": self.compute_s - best.compute_s, "communication": self.comm_s - best.comm_s}
        for what, seconds in more.items():
            if seconds > 1e-3 * best.step_s:
                reasons.append(f"{what} +{shown(seconds)}")
        slower = self.step_s / best.step_s - 1
        doubt = ", too close to tell apart" if slower < ALIKE else ""
        return f"+{slower:.1%}{doubt}: {' and '.join(reasons) or 'the same work, with more waiting'}"


def fewest(needs: Callable[[int], int], most: int, budget: int) -> int | None:
    """Returns the fewest recomputed layers that fit, None where not even `most` do. needs: bytes with so many."""
    if needs(most) > budget:
        return None
    return most - last(lambda kept: needs(most - kept), most, budget)


def last(value: Callable[[int], int], most: int, limit: int) -> int:
    """Returns the largest n up to `most` with `value(n) <= limit`: it is for 0, and grows with n."""
    if value(most) <= limit:
        return most
    return bisect_right(range(1, most), limit, key=value)


def by_seconds(choice: Choice) -> tuple[float, float, int]:
    """Returns the sort key: time, then time of computes, then memory."""
    return choice.step_s, choice.compute_s, choice.peak_bytes
