"""The space that `search` looks through: builders, the meshes they run on, and their options."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.schedules import Program, Schedule, Trace, ddp, hpz, hsdp, remat, zero3

Mesh = tuple[tuple[str, int], ...]


class Point(NamedTuple):
    """Arguments of a builder and of `ya.mesh`.

    remat: first layers that recompute; kept: layers that are gathered once per step, the last ones in slots of their
    own (`resident`), or for hpz the first ones in secondary shards (`layers`)
    """

    builder: str
    mesh: Mesh
    remat: int = 0
    kept: int = 0
    prefetch: int = 1
    defer: bool = False

    def schedule(self) -> Schedule:
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
        """The program on this point's mesh, whatever that of `trace` is."""
        return self.schedule()(trace.on(self.mesh))

    @property
    def mesh_arguments(self) -> dict[str, int]:
        """What `ya.mesh` takes for it."""
        axes = dict(self.mesh)
        if self.builder == "ddp":
            return {"replicate": axes["replicate"], "shard": 1}
        return {name: axes[name] for name in ("replicate", "local") if name in axes}

    def __str__(self) -> str:
        """As Python: the builder's call, and the mesh where it is not the plain one."""
        options = [
            f"{self.kept}" if self.builder == "hpz" else f"resident={self.kept}" if self.kept else "",
            f"prefetch={self.prefetch}" if self.prefetch != 1 and self.builder != "ddp" else "",
            f"remat=ya.remat.first({self.remat})" if self.remat else "",
            "defer=True" if self.defer else "",
        ]
        mesh = arguments(self.mesh_arguments)
        return f"{self.builder}({', '.join(filter(None, options))})" + (f" on ya.mesh({mesh})" if mesh else "")


def arguments(sizes: Mapping[str, int]) -> str:
    """As arguments in a call: `replicate=2, shard=8`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def arrangements(trace: Trace, cluster: Cluster) -> Iterator[tuple[str, Mesh]]:
    """Builders and the meshes of as many ranks as `trace` has that they can run on.

    Shard groups fill whole nodes, or divide one: rings of ranks from part of each of several nodes share network cards.
    """
    world, node = trace.ranks * trace.replicas, cluster.gpus_per_node
    nodes = world // node
    sums = any(unit.sum_bytes for unit in trace.units)
    # ranks that sum themselves exchange everything: inside the node first
    yield "zero3", (("node", nodes), ("local", node)) if sums and nodes > 1 else (("shard", world),)
    if nodes > 1 and node > 1:
        yield "hpz", (("node", nodes), ("local", node))
    for size in _group_sizes(world, node):
        group = (("node", size // node), ("local", node)) if sums and size > node else (("shard", size),)
        yield "hsdp", (("replicate", world // size), *group)
    if world > 1:
        yield "ddp", (("replicate", world), ("shard", 1))


def _group_sizes(world: int, node: int) -> list[int]:
    """Sizes of shard groups other than 1 and all: divisors of a node, then nodes by doubling."""
    inside = [size for size in range(2, min(node, world - 1) + 1) if node % size == 0 and world % size == 0]
    across = [node * 2**k for k in range(1, world.bit_length())]
    return inside + [size for size in across if size < world and world % size == 0]


def layers(trace: Trace) -> int:
    """Visits to layers of stacks: as many can recompute. No more units than that can be kept."""
    return len(remat.layer_visits(trace))
