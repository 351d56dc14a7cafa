"""A rank's coordinates on the mesh, and the cut of flat vectors over ranks."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# ---- The coordinates of a rank in a mesh, and how a flat vector is cut over ranks.
#
# stages x replicas x nodes x local ranks = all ranks of a mesh. A copy of a stage's part of the state is cut over
# nodes x local ranks. Axes inside blocks, such as `tensor`, are a part of the local ranks, and so inside of a node:
# local ranks = shard (or local) x expert x context x tensor.

STAGE, REPLICATE, SHARD, NODE, LOCAL = "stage", "replicate", "shard", "node", "local"
_WITHIN = ((SHARD,), (REPLICATE, SHARD), (NODE, LOCAL), (REPLICATE, NODE, LOCAL))
AXES = (*_WITHIN, *((STAGE, *axes) for axes in _WITHIN))
"""The axes that a mesh can have, outermost first, without those inside blocks."""

OUTSIDE = frozenset((STAGE, REPLICATE, SHARD, NODE, LOCAL))

EXPERT, CONTEXT, TENSOR = "expert", "context", "tensor"
INSIDE = (EXPERT, CONTEXT, TENSOR)
"""The usual axes inside blocks, outermost first. Other names may come before them."""

ALIGN = 8
"""Elements. 16 bytes in bf16, the narrowest dtype gathered: every view is aligned for vector loads."""


def round_up(n: int, multiple: int = ALIGN) -> int:
    return -(-n // multiple) * multiple


def padded_numel(numel: int, ranks: int) -> int:
    """Returns the elements of a flat vector of `numel`, padded so that slices are aligned and equal on all ranks."""
    return round_up(-(-numel // ranks)) * ranks


class Axis(NamedTuple):
    """An axis inside blocks: the number of its ranks, and this one's place among them."""

    size: int
    place: int


class AxisCollective(NamedTuple):
    """A collective over an axis inside blocks.

    kind: its function (axes.py), or "uneven all_to_all"; nbytes: of the whole tensor, which an all_gather gives and the
        others take. Parts of an uneven one, and what follows from their sizes, may be others on each rank
    """

    axis: str
    kind: str
    nbytes: int


class Ranks:
    """The ranks of a mesh as numbers, and the collectives that whole trees need.

    This class does not communicate: its collectives return shapes, for fake tensors, so that steps can be traced on a
    mesh that need not exist. `Communicators` overrides them.

    stages, stage: of the pipeline, each with units of its own; this rank's stage
    replicas, replica: copies of the state; this rank's copy. nodes, local_ranks: of one copy
    ranks, rank: size of the shard group, over which a copy is cut; this rank's index in it
    axes: inside blocks, by name, outermost first: a part of the shard group, its innermost; named: those that blocks
        and losses have named so far
    batch_ranks, batch_rank: parts that the rows of a batch are dealt to, in one stage; the one of this rank
    seed_rank: equal for ranks that draw the same random numbers: those that differ on `expert`, `context` and outer
        axes compute other tokens, those that differ on `tensor` or an axis of the user's have the same
    sequence_parts: ranks of `context`, neighbours as `seed_rank` counts
    world: all ranks of the mesh; alone: world == 1
    deterministic: bits must not depend on the number of ranks; micro_shards: of every global batch then
    called: is told of each collective over an axis inside blocks, and what it is given, before it runs; it may raise,
        and returns what is to be called afterwards, if anything
    """

    called: Callable[[AxisCollective, Tensor], Callable[[], None] | None] | None = None
    micro_shards: int | None = None
    deterministic = False

    def __init__(
        self,
        replicas: int,
        nodes: int,
        local_ranks: int,
        device: torch.device,
        rank: int = 0,
        replica: int = 0,
        stages: int = 1,
        stage: int = 0,
        axes: Mapping[str, Axis] | None = None,
    ) -> None:
        self.axes = dict(axes or {})
        self.named = set[str]()
        self._narrow: dict[tuple[str, ...], Self] = {}
        self.replicas, self.nodes, self.local_ranks, self.device = replicas, nodes, local_ranks, device
        self.ranks, self.rank, self.replica = nodes * local_ranks, rank, replica
        self.stages, self.stage = stages, stage
        parts, part = self._over((EXPERT,))
        self.batch_ranks, self.batch_rank = replicas * parts, replica * parts + part
        parts, part = self._over((EXPERT, CONTEXT))
        self.seed_rank = replica * parts + part
        self.sequence_parts = self.axes[CONTEXT].size if CONTEXT in self.axes else 1
        self.world = stages * replicas * self.ranks
        self.alone = self.world == 1

    def deal(self, micro_shards: int | None) -> None:
        """Sets how global batches are cut (micro_shards.py). None: as the caller likes; bits depend on it."""
        self.micro_shards, self.deterministic = micro_shards, micro_shards is not None

    # ---- axes inside blocks

    def within(self, axes: Collection[str]) -> Self:
        """Returns the ranks that a unit has which is split over `axes`: those of its shard group hold the same part.
        These themselves where none of the axes is there; else the same streams, with other groups."""
        names = tuple(name for name, axis in self.axes.items() if name in axes and axis.size > 1)
        if not names:
            return self
        if names not in self._narrow:
            self._narrow[names] = self._narrowed(names)
        return self._narrow[names]

    def _narrowed(self, names: tuple[str, ...]) -> Self:
        found = copy.copy(self)
        found._narrow = {}
        found.axes = {name: axis for name, axis in self.axes.items() if name not in names}
        found.ranks, found.rank = self._over(found.axes)
        found.local_ranks = found.ranks // found.nodes
        return found

    def _over(self, names: Collection[str]) -> tuple[int, int]:
        """Returns the number of ranks of a copy that differ on outer axes or on `names`, and this one's index."""
        inside = math.prod(axis.size for axis in self.axes.values())
        count, index = self.ranks // inside, self.rank // inside
        for name, axis in self.axes.items():
            if name in names:
                count, index = count * axis.size, index * axis.size + axis.place
        return count, index

    def stride(self, name: str) -> int:
        """Returns how far apart neighbours on an axis inside blocks are."""
        names = list(self.axes)
        return math.prod(self.axes[inner].size for inner in names[names.index(name) + 1 :])

    def lines(self, *, along: Collection[str] = (), across: Collection[str] = ()) -> list[list[int]]:
        """Returns the shard group, [0, ..., R - 1], in groups whose ranks differ only on the axes `along`, or on all
        but `across`."""
        names = (SHARD, *self.axes)
        every = torch.arange(self.ranks).view(-1, *(axis.size for axis in self.axes.values()))
        vary = [at for at, name in enumerate(names) if (name not in across if across else name in along)]
        lines = every.movedim(vary, list(range(-len(vary), 0)))
        return lines.reshape(-1, math.prod(every.shape[at] for at in vary)).tolist()

    def all_gather(self, shard: Tensor) -> Tensor:
        """Gathers [n, ...] -> [R * n, ...] over the shard group."""
        return shard.new_empty(shard.shape[0] * self.ranks, *shard.shape[1:])

    def reduce_scatter(
        self,
        full: Tensor,
        dtype: torch.dtype | None = None,
        accumulate: torch.dtype | None = None,
        *,
        replicas: bool = True,
    ) -> Tensor:
        """Reduces [R * n, ...] -> [n, ...] in `dtype`: the sum over all ranks of this stage, sent in the dtype of
        `full`.

        accumulate: as in `flat.reduce_into`; replicas: False sums over the shard group alone
        """
        return full.new_empty(full.shape[0] // self.ranks, *full.shape[1:], dtype=dtype or full.dtype)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Exchanges within the shard group: `received[r]` becomes rank r's `sent` for this rank."""

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sums each rank's value for its own shard in place, over the shards of one copy in all stages; the same bits
        on every rank."""
        return values

    def from_stage(self, shard: Tensor, stage: int) -> Tensor:
        """Returns `shard` of the rank with this rank's coordinates in `stage`, as a new tensor if there are stages. All
        ranks of the mesh call it, with tensors of one shape; the others' values are ignored."""
        return shard

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Returns `values` summed over the replicas of this rank's shard: a new tensor if there are replicas."""
        return values.clone(memory_format=torch.contiguous_format) if self.replicas > 1 else values

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all ranks of the mesh in place; the same bits on every rank."""
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Takes the maximum of `values` over all ranks of the mesh in place."""
        return values


def absent_ranks(axes: tuple[tuple[str, int], ...], device: torch.device) -> Ranks:
    """Returns the ranks of a mesh of `(name, size)` axes, outermost first, as one stage that holds all units: steps are
    traced whole. Raises ValueError for axes that no mesh here has."""
    sizes, names = dict(axes), tuple(name for name, _ in axes)
    inside = inside_of(names)
    outer = names[: len(names) - len(inside)]
    if outer not in AXES or len(sizes) < len(axes) or any(not isinstance(n, int) or n < 1 for n in sizes.values()):
        known = ", ".join(map(str, AXES))
        raise ValueError(
            f"mesh: expected positive sizes of axes {known}, outermost first, and of axes inside blocks behind shard; "
            f"got {axes}"
        )
    local = sizes.get(LOCAL, sizes.get(SHARD, 1)) * math.prod(sizes[name] for name in inside)
    of = {name: Axis(sizes[name], 0) for name in inside}
    return Ranks(sizes.get(REPLICATE, 1), sizes.get(NODE, 1), local, device, axes=of)


# ---- A device mesh as numbers: its ranks as [stages, replicas, nodes, ranks of a node], and this rank's coordinates.
#
#     ("shard",)                          one copy of the state, cut over all ranks
#     ("replicate", "shard")              a copy per replica, cut over the ranks of that replica
#     ("node", "local")                   one copy; the shard axis split into nodes and the ranks of a node
#     ("replicate", "node", "local")      both
#     ("stage", ...)                      each of these, for each stage of a pipeline
#     (..., "expert", "tensor")           axes inside blocks, under any names that are not taken: behind shard or local
#
# The outermost axis comes first: neighbouring ranks share a node, then a replica, then a stage. Shards are cut over
# the shard group, all ranks of a replica of a stage: shard index = node * local ranks + local index.


class Grid(NamedTuple):
    """The ranks of a mesh and this rank's coordinates.

    ranks: global ranks [stages, replicas, nodes, ranks of a node]; an axis that the mesh lacks has size 1
    axes: inside blocks, a part of the last one
    """

    ranks: torch.Tensor
    stage: int
    replica: int
    node: int
    local: int
    axes: dict[str, Axis]

    @property
    def shard_groups(self) -> list[list[int]]:
        """The ranks that hold one copy of a stage, a group per copy. All five lists are the same on every rank."""
        return rearrange(self.ranks, "stage copy node local -> (stage copy) (node local)").tolist()

    @property
    def replicate_groups(self) -> list[list[int]]:
        """The ranks with the same shard."""
        return rearrange(self.ranks, "stage copy node local -> (stage node local) copy").tolist()

    @property
    def stage_groups(self) -> list[list[int]]:
        """The ranks with the same coordinates in each stage, by stage."""
        return rearrange(self.ranks, "stage copy node local -> (copy node local) stage").tolist()

    @property
    def local_groups(self) -> list[list[int]]:
        """The ranks of one copy on one node."""
        return rearrange(self.ranks, "stage copy node local -> (stage copy node) local").tolist()

    @property
    def node_groups(self) -> list[list[int]]:
        """The ranks of one copy with the same local index."""
        return rearrange(self.ranks, "stage copy node local -> (stage copy local) node").tolist()

    @property
    def shard_rank(self) -> int:
        """The index of this rank's shard."""
        return self.node * self.ranks.shape[3] + self.local

    @property
    def batch_ranks(self) -> int:
        """The number of parts that batches are dealt to, in one stage, since all stages see the same batches."""
        return self.numbers(torch.device("cpu")).batch_ranks

    @property
    def batch_rank(self) -> int:
        """The part of this rank among `batch_ranks`."""
        return self.numbers(torch.device("cpu")).batch_rank

    @property
    def world_rank(self) -> int:
        return (self.stage * self.ranks.shape[1] + self.replica) * self.ranks[0, 0].numel() + self.shard_rank

    def numbers(self, device: torch.device) -> Ranks:
        """Returns the numbers of this grid, without collectives."""
        stages, replicas, nodes, local = self.ranks.shape
        here = self.shard_rank, self.replica, stages, self.stage, self.axes
        return Ranks(replicas, nodes, local, device, *here)


def grid(mesh: DeviceMesh) -> Grid:
    """Returns `mesh` as a `Grid`. Raises TypeError for axes other than those above, naming them."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, as ya.mesh() makes, got {type(mesh).__name__}")
    names, sizes = mesh.mesh_dim_names or (), tuple(mesh.shape)
    if names == (STAGE,):
        raise TypeError(
            "mesh: a 1-D mesh is one copy of the state, cut over its ranks, and its axis is called 'stage'; for stages "
            "alone give axes ('stage', 'shard') with shard of size 1, as ya.mesh(stage=..., shard=1) does"
        )
    if names == (REPLICATE,):
        raise TypeError(
            "mesh: a 1-D mesh is one copy of the state, cut over its ranks, and its axis is called 'replicate'; for "
            "copies alone give axes ('replicate', 'shard') with shard of size 1, as ya.mesh(replicate=-1, shard=1) does"
        )
    inside = inside_of(names)
    inside = inside if OUTSIDE.isdisjoint(inside) else ()
    if mesh.ndim > 1 and names[: len(names) - len(inside)] not in AXES:
        known = " or ".join(map(str, AXES[1:]))
        raise TypeError(
            f"mesh: expected a 1-D DeviceMesh, or axes {known}, got axes {names or 'without names'} of sizes {sizes}; "
            "take the dimensions to shard over, such as device_mesh['replicate', 'shard']"
        )
    if inside:
        check_inside(inside)
    place, ranks = mesh.get_coordinate(), mesh.mesh.detach().cpu()
    if place is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not among its ranks {ranks.flatten().tolist()}")
    if bool((ranks.flatten().diff() <= 0).any()):
        # process groups number their members in ascending order, whatever a mesh says
        raise ValueError(f"mesh: ranks must ascend along its axes, got {ranks.tolist()}")
    outer = names[: -1 - len(inside)]  # of a 1-D mesh the name does not matter
    size, at = dict(zip(outer, sizes, strict=False)), dict(zip(outer, place, strict=False))
    ranks = ranks.reshape(size.get(STAGE, 1), size.get(REPLICATE, 1), size.get(NODE, 1), -1)
    local = place[len(outer)]
    axes = {name: Axis(*of) for name, *of in zip(names, sizes, place, strict=True) if name in inside}
    for axis in axes.values():
        local = local * axis.size + axis.place
    return Grid(ranks, at.get(STAGE, 0), at.get(REPLICATE, 0), at.get(NODE, 0), local, axes)


def inside_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes inside blocks among the axes of a mesh: those behind `shard` or `local`."""
    last = next((names.index(name) for name in (SHARD, LOCAL) if name in names), len(names))
    return tuple(names[last + 1 :])


def check_inside(names: Sequence[str]) -> None:
    """Raises for names of axes inside blocks that cannot be."""
    if taken := OUTSIDE.intersection(names):
        raise TypeError(f"mesh: {min(taken)!r} is the name of an axis outside of blocks; give yours another")


def mesh_axes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    """`(name, size)` of each mesh axis."""
    return tuple(zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
