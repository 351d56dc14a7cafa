"""A rank's coordinates on a mesh as numbers. Needs no torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from yafsdp_fn.util.mesh_axes import (
    AXES,
    CONTEXT,
    EXPERT,
    LOCAL,
    MOST_RANKS,
    NODE,
    OUTSIDE,
    REPLICATE,
    SHARD,
    AxisCollective,
    MeshAxes,
    inside_of,
    round_up,
    subgroups,
)

if TYPE_CHECKING:  # programs are proved and simulated where there is no torch
    import torch
    from torch import Tensor


class Axis(NamedTuple):
    """An axis inside blocks: the number of its ranks, and this one's number on it."""

    size: int
    rank: int


Rows = tuple[tuple[int, ...], ...]
"""The rows that go to each rank of an axis, and those that come from each; nothing where all are alike."""


class Ranks:
    """The ranks of a mesh as numbers, and the collectives that whole trees need.

    This class does not communicate: its collectives return shapes, for fake tensors, so that steps can be traced on a
    mesh that need not exist. `Communicators` overrides them.

    device: of their tensors, None where there are numbers alone
    stages, stage: of the pipeline, each with units of its own; this rank's stage
    replicas, replica: copies of the state; this rank's copy. nodes, local_ranks: of one copy
    ranks, rank: size of the shard group, over which a copy is cut; this rank's index in it
    axes: inside blocks, by name, outermost first: a part of the shard group, its innermost; named: those that blocks
        and losses have named so far
    batch_ranks, batch_rank: parts that the rows of a batch go to, in one stage; the one of this rank
    seed_rank: equal for ranks that draw the same random numbers: those that differ on `expert`, `context` and outer
        axes compute other tokens, those that differ on `tensor` or an axis of the user's have the same
    sequence_parts: ranks of `context`, neighbours as `seed_rank` counts
    world: all ranks of the mesh; alone: world == 1
    deterministic: bits must not depend on the number of ranks; micro_shards: of every global batch then
    called: is told of each collective over an axis inside blocks, what it is given, and the rows of it that go to each
        rank and come from it, if parts may be uneven, before it runs; it may raise, and returns what is to be called
        afterwards, if anything
    """

    called: Callable[[AxisCollective, Tensor, Rows], Callable[[], None] | None] | None = None
    micro_shards: int | None = None
    deterministic = False

    def __init__(
        self,
        replicas: int,
        nodes: int,
        local_ranks: int,
        device: torch.device | None,
        rank: int = 0,
        replica: int = 0,
        stages: int = 1,
        stage: int = 0,
        axes: Mapping[str, Axis] | None = None,
    ) -> None:
        self.axes = dict(axes or {})
        self.named = set[str]()
        self._narrow: dict[tuple[str, ...], Self] = {}
        self.replicas = replicas
        self.nodes = nodes
        self.local_ranks = local_ranks
        self.device: Any = device
        self.ranks = nodes * local_ranks
        self.rank = rank
        self.replica = replica
        self.stages = stages
        self.stage = stage
        parts, part = self._over((EXPERT,))
        self.batch_ranks = replicas * parts
        self.batch_rank = replica * parts + part
        parts, part = self._over((EXPERT, CONTEXT))
        self.seed_rank = replica * parts + part
        self.sequence_parts = self.axes[CONTEXT].size if CONTEXT in self.axes else 1
        self.world = stages * replicas * self.ranks
        self.alone = self.world == 1

    def set_micro_shards(self, micro_shards: int | None) -> None:
        """Sets how global batches are cut (micro_shards.py). None: as the caller likes; bits depend on it."""
        self.micro_shards = micro_shards
        self.deterministic = micro_shards is not None

    # ---- axes inside blocks

    def without(self, axes: Collection[str]) -> Self:
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
        count = self.ranks // inside
        index = self.rank // inside
        for name, axis in self.axes.items():
            if name in names:
                count = count * axis.size
                index = index * axis.size + axis.rank
        return count, index

    def stride(self, name: str) -> int:
        """Returns how far apart neighbours on an axis inside blocks are."""
        names = list(self.axes)
        return math.prod(self.axes[inner].size for inner in names[names.index(name) + 1 :])

    def subgroups(self, *, along: Collection[str] = (), across: Collection[str] = ()) -> list[list[int]]:
        """Returns the shard group, [0, ..., R - 1], in groups whose ranks differ only on the axes `along`, or on all
        but `across`."""
        sizes = {name: axis.size for name, axis in self.axes.items()}
        return subgroups(self.ranks, sizes, along=along, across=across)

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
        return values.clone().contiguous() if self.replicas > 1 else values

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all ranks of the mesh in place; the same bits on every rank."""
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Takes the maximum of `values` over all ranks of the mesh in place."""
        return values


def absent_ranks(axes: MeshAxes, device: torch.device | None = None) -> Ranks:
    """Returns the ranks of a mesh of `(name, size)` axes, outermost first, as one stage that holds all units: steps are
    traced whole. Raises ValueError for axes that no mesh here has."""
    sizes = dict(axes)
    names = tuple(name for name, _ in axes)
    inside = inside_of(names)
    outer = names[: len(names) - len(inside)]
    known = outer in AXES and OUTSIDE.isdisjoint(inside)
    if not known or len(sizes) < len(axes) or any(not isinstance(n, int) or n < 1 for n in sizes.values()):
        raise ValueError(
            f"mesh: expected positive sizes of axes {', '.join(map(str, AXES))}, outermost first, and of axes inside "
            f"blocks behind shard; got {axes}"
        )
    if math.prod(sizes.values()) > MOST_RANKS:
        raise ValueError(f"mesh: {math.prod(sizes.values()):,} ranks, expected at most {MOST_RANKS:,}: {axes}")
    local = sizes.get(LOCAL, sizes.get(SHARD, 1)) * math.prod(sizes[name] for name in inside)
    of = {name: Axis(sizes[name], 0) for name in inside}
    return Ranks(sizes.get(REPLICATE, 1), sizes.get(NODE, 1), local, device, axes=of)


# ---- The buffers that reductions go through (flat.py, sums.py), in elements of the wire's dtype.

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements that a rank sums at a time, by the type of its device: few enough for a core's cache; on a GPU, enough to
fill it."""


class DtypeLike(Protocol):
    """A dtype, torch's or another's."""

    @property
    def itemsize(self) -> int: ...


def receive_numel(comms: Ranks, n: int, accumulate: DtypeLike | None) -> int:
    """Returns the elements of the buffer that `flat.reduce_into` needs for shards of `n`. Without `accumulate` only
    adding or converting uses it."""
    if comms.ranks == 1:
        return 0
    if comms.deterministic:
        return comms.ranks * n
    if accumulate is None:
        return n
    return (comms.local_ranks + 2 * comms.nodes) * n if hierarchical(comms) else comms.ranks * n


def staging_numel(comms: Ranks, n: int, dtype: DtypeLike, wire: DtypeLike, accumulate: DtypeLike | None) -> int:
    """Returns the elements of the buffer that `sums.all_reduce_replicas` needs for shards of `n` in `dtype`."""
    if comms.replicas == 1:
        return 0
    if accumulate is not None:
        return comms.replicas * replica_part(comms, n) * (2 + accumulate.itemsize // wire.itemsize)
    return 0 if dtype == wire else n


def hierarchical(comms: Ranks) -> bool:
    """Tells whether ranks that sum themselves do so inside nodes first."""
    return comms.nodes > 1 and comms.local_ranks > 1


def replica_part(comms: Ranks, n: int) -> int:
    """Returns the elements of a shard of `n` that each replica sums: equal on all, and aligned for any dtype."""
    return round_up(-(-n // comms.replicas))
