"""The cost of each op of a program on a cluster, run alone: phases on resources.

Forward      flops / rate, matrix products and attention apart; what products and all other kernels move through memory,
             and the start of each kernel, alone or fused (`Trace.kernels`)
Backward     the same for the backward, and for the forward again if the graph was not kept; in halves, the half of
             inputs has as many products as the forward, attention and all else, the half of weights the other products
both         and the collectives of their visit, and of the loss after it, over axes inside blocks: rings, messages
Gather       a ring over the shard group, or over the ranks of a node; out of a format, decoding
Reduce       a ring; with `Precision.accumulate` exchanges, inside nodes first where the mesh has nodes; in a format
             encoding and decoding
AllReduce    two rings over replicas, or over the stages that share a unit
Stash, Norm, Update    bytes through memory; parts of an update on whole leaves: flops, evenly over ranks
Exchange     the bytes of a unit's leaves that their owners lack, evenly over ranks
Send, Receive    the two ends of one message between stages
Offload, Fetch    bytes over the link to the host; a forward that saves a carry for them copies it through memory first
"""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Literal, Protocol

from yafsdp_fn.planner.activations import cast_bytes, state_on_host
from yafsdp_fn.planner.cluster import Cluster, CollectiveRanks, Phase, Phases
from yafsdp_fn.program import ops
from yafsdp_fn.program.measured import Cost, Moved
from yafsdp_fn.program.ops import Op, Uses
from yafsdp_fn.program.program import lent_bytes
from yafsdp_fn.program.trace import Collectives, Trace, UnitSpec
from yafsdp_fn.schedules import remat
from yafsdp_fn.util.mesh_axes import SHARD, ranks_on

UPDATE_BYTES = {"fused": 30, "eager": 90, "pieces": 90}
"""Bytes through memory per element of a shard that AdamW updates, in fp32 with a bf16 working copy. In one kernel:
gradient 4 read; master, two moments 12 read and written; working copy 2 written. Eager, a kernel for each operation on
all leaves (`foreach`): decay 8, first moment 12, second 8 and 16, root 8, correction 8, epsilon 8, step 16; copy 6."""

NO_COSTS = (
    "the trace has no costs: it was learnt from a real step, which measures none. Take it from ya.planner.trace, or "
    "from "
    "step.trace or step.lower before the first step"
)


class Foreign(Protocol):
    """An op that is simulated and never run, and says itself what it costs: a peer's copy, say."""

    @property
    def stream(self) -> str: ...
    def uses(self) -> Uses: ...
    def phases(self, cluster: Cluster) -> Phases: ...


class Costs:
    """The costs of ops of a program of `trace` on `cluster`, on which neighbouring ranks share a node.

    shard, replicate: the shard group, and the ranks that hold the same shard
    along: the ranks of each axis inside blocks, and of the rest of the shard group
    holders: by `UnitSpec.over`, the ranks that hold the same part of such a unit
    Raises ValueError where the mesh cannot be placed.
    """

    def __init__(self, trace: Trace, cluster: Cluster) -> None:
        self.trace = trace
        self.cluster = cluster
        _check_mesh(trace, cluster)
        self.shard = cluster.group(trace.ranks)
        self.replicate = cluster.group(trace.replicas, stride=trace.ranks)
        self.along: dict[str, CollectiveRanks] = {}
        stride = 1
        rest = trace.ranks // ranks_on(trace.inside)
        for name, size in (*reversed(trace.inside), (SHARD, rest)):  # neighbours first
            self.along[name] = cluster.group(size, stride)
            stride *= size
        self.holders = {over: self._holding(over) for over in {unit.over for unit in trace.units}}

    def _holding(self, over: tuple[str, ...]) -> CollectiveRanks:
        """Returns the ranks of a shard group that hold the same part of a unit split over `over`."""
        axes = [group for name, group in self.along.items() if name not in over]
        return CollectiveRanks(*map(math.prod, zip(*axes, strict=True)))

    def seconds(self, op: Op, recompute: bool = False) -> float:
        """Returns the seconds of `op`, alone."""
        return seconds_of(self.phases(op, recompute))

    def phases(self, op: Op | Foreign, recompute: bool = False) -> Phases:
        """Returns the phases of `op`, one after the other. recompute: of a Backward whose graph was not kept."""
        trace = self.trace
        cluster = self.cluster
        units = [trace.units[unit] for unit in getattr(op, "units", ())]
        match op:
            case ops.Forward(visit, carry_slot=slot):
                cost = trace.visits[visit].cost
                computed = phases_of_compute(cluster, cost, trace.kernels, forward=True)
                saved = 0 if slot is None else 2 * cost.carry_slot_bytes
                return computed + self._collectives(op, recompute) + through_memory(cluster, saved)
            case ops.Backward(visit, half=half):
                cost = half_of(trace.visits[visit].cost, half)
                computed = phases_of_compute(cluster, cost, trace.kernels, forward=recompute, backward=True)
                return computed + self._collectives(op, recompute)
            case ops.Offload(visit) | ops.Fetch(visit):
                seconds = trace.visits[visit].cost.carry_slot_bytes / cluster.host_bandwidth
                return (Phase("host", seconds),) if seconds else ()
            case ops.Gather(source="node"):
                return self._rings((u.gather_bytes, cluster.group(trace.local_ranks_of(u))) for u in units)
            case ops.Gather():
                rings = self._rings((u.gather_wire, self.holders[u.over]) for u in units)
                decoded = [u for u in units if u.gathered_as is not None]
                nbytes = sum(u.gather_wire + u.gather_bytes for u in decoded)
                nbytes += sum(cast_bytes(trace, u) for u in units)
                return rings + through_memory(cluster, nbytes, sum(u.numel for u in decoded))
            case ops.Reduce() if any(u.sum_bytes for u in units):
                return tuple(itertools.chain.from_iterable(map(self._exchange, units)))
            case ops.Reduce():
                return self._rings((u.reduce_bytes, self.holders[u.over]) for u in units)
            case ops.AllReduce(over="stages"):
                stages = trace.cut.holders(op.units[0])
                group = cluster.group(len(stages), stride=trace.stage_ranks)
                shards = sum(u.reduce_bytes / trace.ranks_of(u) for u in units)
                return cluster.all_reduce(shards, group)
            case ops.AllReduce():
                return tuple(itertools.chain.from_iterable(map(self._all_reduce, units)))
            case ops.Send(flow) | ops.Receive(flow):
                return cluster.message(trace.cut.bytes_of(op.message), link(trace, cluster, flow))
            case ops.Stash():
                copied = sum(2 * u.gather_bytes // trace.local_ranks_of(u) for u in units)
                return through_memory(cluster, copied)
            case ops.Norm():
                read = sum(4 * u.numel // trace.ranks_of(u) for u in units)
                return through_memory(cluster, read)
            case ops.Update(part=part) if part % 2:
                flops = 0
                for of in trace.lent:
                    if of.unit in op.units:
                        flops += sum(leaf[-1] for leaf in of.leaves)
                return phases_of_compute(cluster, Cost(flops=flops // trace.ranks), trace.kernels, forward=True)
            case ops.Update():
                return self._update(units)
            case ops.Exchange():  # all-to-alls send R - 1 parts
                whole = lent_bytes(trace, op.units) * trace.ranks / max(trace.ranks - 1, 1)
                return cluster.all_to_all(whole, self.shard)
        return op.phases(cluster)

    def _update(self, units: Iterable[UnitSpec]) -> Phases:
        trace = self.trace
        cluster = self.cluster
        # on the CPU it is one kernel, whatever those of blocks are
        width = UPDATE_BYTES["fused" if cluster.host_computes else trace.kernels]
        moved = encoded = copied = 0
        for unit in units:
            times = 1 + trace.parts(unit.id) // 2
            moved += width * unit.numel // trace.ranks_of(unit) // times
            copied += 2 * state_on_host(trace, unit) // times
            if unit.gathered_as is not None:
                encoded += unit.numel // trace.ranks_of(unit)
        updated = through_memory(cluster, moved, encoded)
        # states on the host: fetched beside the update of the unit before, and returned
        waited = copied / cluster.host_bandwidth - seconds_of(updated)
        return (*updated, Phase("host", waited)) if waited > 0 else updated

    def collectives(self, op: ops.Forward | ops.Backward, recompute: bool = False) -> list[tuple[str, Phases]]:
        """Returns the collectives of a compute, of its visit and of the loss after it, in their order: names, and
        phases alone."""
        trace = self.trace
        cluster = self.cluster
        own = trace.visits[op.visit]
        beside = trace.beside(op.visit)
        calls: Collectives = (*own.collectives, *beside.collectives)
        if isinstance(op, ops.Backward):
            if op.half == "weights":
                return []
            again = own.collectives * recompute
            calls = (*beside.adjoints, *again, *own.adjoints)
        found: list[tuple[str, Phases]] = []
        for axis, kind, nbytes in calls:
            group = self.along[axis]
            match kind:
                case "psum" | "pmax":
                    each = cluster.all_reduce(nbytes, group)
                case "all_gather" | "psum_scatter":
                    each = cluster.ring(nbytes, group)
                case "ppermute" if group.ranks <= group.per_node:
                    each = cluster.message(nbytes, "node")
                case "ppermute":  # one of a node's ranks sends to another node
                    each = cluster.message(nbytes / group.per_node, "network")
                case _:
                    each = cluster.all_to_all(nbytes, group)
            found.append((f"{kind} {axis}", each))
        return found

    def _collectives(self, op: ops.Forward | ops.Backward, recompute: bool) -> Phases:
        """Returns the phases of the collectives of a compute. They block its stream one by one: what they take of each
        resource together is all that a simulation needs."""
        found: dict[str, float] = {}
        for _, each in self.collectives(op, recompute):
            for resource, seconds in each:
                found[resource] = found.get(resource, 0.0) + seconds
        return tuple(Phase(*each) for each in found.items())

    def _rings(self, vectors: Iterable[tuple[int, CollectiveRanks]]) -> Phases:
        """Returns the phases of vectors of so many bytes, each over a group: those of one group travel together."""
        nbytes: Counter[CollectiveRanks] = Counter()
        for each, group in vectors:
            nbytes[group] += each
        found: Phases = ()
        for group, whole in nbytes.items():
            found += self.cluster.ring(whole, group)
        return found

    def _exchange(self, unit: UnitSpec) -> Phases:
        """Returns the phases of a unit's reduction with sums in a wider dtype than the wire's."""
        cluster = self.cluster
        local = self.trace.local_ranks_of(unit)
        nodes = self.trace.ranks_of(unit) // local
        through: Phases = ()
        if unit.reduced_as is not None:  # encoded, and decoded
            through = through_memory(cluster, unit.reduce_bytes + 2 * unit.reduce_wire, 2 * unit.numel)
        if nodes == 1 or local == 1:
            return cluster.all_to_all(unit.reduce_wire, self.holders[unit.over]) + through
        inside = cluster.all_to_all(unit.reduce_wire / nodes, cluster.group(local))
        outside = cluster.all_to_all(unit.reduce_wire / local, CollectiveRanks(nodes, 1))
        return inside * nodes + outside + through

    def _all_reduce(self, unit: UnitSpec) -> Phases:
        ranks = self.trace.ranks_of(unit)
        if not unit.sum_bytes:
            return self.cluster.all_reduce(unit.reduce_bytes / ranks, self.replicate)
        gathered = self.cluster.ring(unit.sum_bytes / ranks, self.replicate)
        return self.cluster.all_to_all(unit.reduce_bytes / ranks, self.replicate) + gathered


def _check_mesh(trace: Trace, cluster: Cluster) -> None:
    """Raises ValueError where the mesh of `trace` does not lie evenly on nodes."""
    world = trace.stage_ranks
    per_node = cluster.gpus_per_node
    local = trace.local_ranks
    neighbours = ranks_on(trace.inside)
    if "local" in dict(trace.mesh) and local > per_node and world > per_node:
        raise ValueError(
            f"the mesh has {local} ranks per node, a node of {cluster.name} has {per_node}: build it on "
            f"ya.mesh(local={max(1, per_node // neighbours)})"
        )
    if world > per_node and world % per_node:
        raise ValueError(
            f"{world} ranks do not fill nodes of {per_node} GPUs ({cluster.name}); take {world // per_node * per_node} "
            f"or {-(-world // per_node) * per_node}"
        )
    span = 1
    for name, size in reversed(trace.inside):
        span *= size
        if world > per_node and span % per_node and per_node % span:
            raise ValueError(
                f"{name}={size}: {span} neighbouring ranks do not lie evenly on nodes of {per_node} GPUs "
                f"({cluster.name}); take a number that divides a node, or whole nodes"
            )


def seconds_of(found: Iterable[Phase]) -> float:
    """Returns the seconds of phases, one after the other."""
    return sum(phase.seconds for phase in found)


def link(trace: Trace, cluster: Cluster, flow: int) -> str:
    """ "node" or "network": what a flow's messages go over. Stages follow each other, and neighbours share a node."""
    width = trace.stage_ranks
    nodes: set[int] = set()
    for stage in trace.cut.ends(flow, back=False):
        for rank in (stage * width, (stage + 1) * width - 1):
            nodes.add(rank // cluster.gpus_per_node)
    return "node" if len(nodes) == 1 else "network"


def half_of(cost: Cost, half: str) -> Cost:
    """Returns `cost` with one half of its backward. half: as `Backward.half`; "both" leaves all of it"""
    if half == "both":
        return cost
    inputs = min(cost.flops, cost.bwd_flops)
    part = inputs / cost.bwd_flops if cost.bwd_flops else 1.0
    both = cost.bwd_moved
    own = Moved(int(both.products * part), int(both.product_kernels * part), *both[2:])
    if half == "inputs":
        return cost._replace(bwd_flops=inputs, bwd_moved=own)
    rest = Moved(both.products - own.products, both.product_kernels - own.product_kernels)
    return Cost(bwd_flops=cost.bwd_flops - inputs, bwd_moved=rest)


def by_ops(trace: Trace, policy: Literal["op", "selective", "checkpoint"], every: int = 1) -> Trace:
    """Returns `trace` with every so many-th layer recomputed in its backward by ops, whatever the program is.

    policy: "op", torchtitan's: every second product, and all that is no product or attention; "selective", Megatron's:
        attention alone; "checkpoint", torch's `checkpoint(use_reentrant=False)`: all, as far as something is saved: not
        a layer's last product. What is kept beside carries: for "op" two fifths, as counted for Llama's layers; for
        "selective" all, since attention's kernel keeps no scores; for "checkpoint" nothing
    """
    visits = [*trace.visits]
    for v in remat.layer_visits(trace)[every - 1 :: every]:
        visit = visits[v]
        cost = visit.cost
        products = kept = 0
        moved = cost.bwd_moved
        if policy == "selective":
            kept = cost.inner_bytes
        else:
            products = cost.flops - cost.last_flops
            if policy == "op":
                products = cost.flops // 2
                kept = cost.inner_bytes * 2 // 5
            part = products / max(cost.flops, 1)
            once = cost.moved
            once = once._replace(products=int(once.products * part), product_kernels=round(once.product_kernels * part))
            moved = Moved(*map(operator.add, moved, once))
        cost = cost._replace(
            bwd_flops=cost.bwd_flops + products,
            bwd_attention_flops=cost.bwd_attention_flops + cost.attention_flops * (policy != "op"),
            bwd_moved=moved,
            inner_bytes=kept,
            bwd_peak_bytes=cost.bwd_peak_bytes + cost.inner_bytes - kept,
        )
        again = visit.collectives if policy == "checkpoint" else ()
        visits[v] = visit._replace(cost=cost, adjoints=visit.adjoints + again)
    return trace._replace(visits=tuple(visits))


def through_memory(cluster: Cluster, nbytes: float, encoded: int = 0) -> Phases:
    """So many bytes read or written. encoded: elements among them that are encoded or decoded"""
    seconds = nbytes / cluster.memory_bandwidth + encoded * cluster.format_seconds
    return (Phase("memory", seconds),) if nbytes else ()


def phases_of_compute(
    cluster: Cluster, cost: Cost, kernels: str, *, forward: bool = False, backward: bool = False
) -> Phases:
    """Returns the phases of a visit's forward, of its backward, or of both together. kernels: as `Trace.kernels`"""
    matmul = cost.flops * forward + cost.bwd_flops * backward
    attention = cost.attention_flops * forward + cost.bwd_attention_flops * backward
    seconds = matmul / cluster.matmul_flops + attention / cluster.attention_flops
    for moved, runs in (cost.moved, forward), (cost.bwd_moved, backward):
        others, launched = moved.others(kernels)
        through = (moved.products + others) / cluster.memory_bandwidth
        seconds += runs * (through + (moved.product_kernels + launched) * cluster.kernel_latency)
    return (Phase("compute", seconds),) if seconds else ()
