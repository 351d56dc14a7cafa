"""A layout on a mesh, without memory: units, shapes and dtypes, derived in one place for all who need them.

A state's memory is a placement with tensors; traces and predictions need a placement only.
"""

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from yafsdp_fn.communication.formats import Format
from yafsdp_fn.communication.ranks import Ranks, receive_numel, staging_numel
from yafsdp_fn.communication.sums import sum_dtype
from yafsdp_fn.params.layout import FlatLayout, Group, TreeLayout
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.sharded import Origin, placed
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.split import Assignment
from yafsdp_fn.program.trace import Encoding, UnitSpec, elsewhere

AnyRanks = TypeVar("AnyRanks", bound=Ranks)


class Placement(Generic[AnyRanks]):
    """A layout on a mesh.

    mesh_axes: `(name, size)` of each mesh axis; comms: the ranks, and which one this is
    assignment: which stage holds which units; None without stages; holders: unit -> its stages, () without

    ranks_of: unit -> the ranks over which it is cut: those of `comms`, or, if it is split over axes, some of them

    units: the records in traces; those of other stages have only a number and a name; held: ids of this stage's units;
    trained: the trainable ones among them
    weights_alias, grads_alias: units whose slots are the shards themselves, since one rank has all of their vector; not
        on a deterministic mesh, where one rank adds up as several do, from weights aligned alike, nor where it would
        not pass through a wire format
    gathered_in, reduced_in: unit -> the wire format in which it travels; sums: unit -> `sum_dtype`
    key: a text, equal for states that can share programs
    """

    def __init__(
        self,
        layout: TreeLayout,
        mesh_axes: tuple[tuple[str, int], ...],
        precision: Precision,
        comms: AnyRanks,
        assignment: Assignment | None = None,
    ) -> None:
        self.mesh_axes, self.precision, self.comms, self.assignment = mesh_axes, precision, comms, assignment
        check_assignment(assignment, sum(len(group.units) for group in layout.groups), comms.stages)
        self.holders = () if assignment is None or comms.stages == 1 else assignment.holders
        self.layout = layout.on(self.holders or None, comms.stage, comms.axes)
        # what is held, and by whom
        self.groups = self.layout.groups
        self.of_unit = {unit: group for group in self.groups for unit in group.units}
        self.ranks_of = {unit: comms.without(group.over) for unit, group in self.of_unit.items()}
        self.held = frozenset([unit for group in self.groups for unit in group.held])
        # what travels, and how it is summed
        self.gathered_in = {unit: of.wire.gather for unit, of in self.of_unit.items() if of.wire.gather is not None}
        self.reduced_in = {unit: of.wire.reduce for unit, of in self.of_unit.items() if of.wire.reduce is not None}
        self.sums = {unit: self.sum_dtype(unit) for unit in self.of_unit}
        # what traces and programs see of it
        self.units = self._units()
        self.key = repr((self.units, mesh_axes, precision.names, comms.micro_shards, assignment, comms.stage))
        self.trained = tuple(unit.id for unit in self.units if unit.trainable)
        # slots that are shards
        weights_alias: set[int] = set()
        grads_alias: set[int] = set()
        for unit, ranks in self.ranks_of.items():
            # else each gather casts the shard
            as_kept = precision.copy or not self.of_unit[unit].trainable or self.gather_dtype(unit) == precision.param
            if ranks.ranks == 1 and not comms.deterministic and as_kept and unit not in self.gathered_in:
                weights_alias.add(unit)
                if self.wire_dtype(unit) == precision.param and unit not in self.reduced_in:
                    grads_alias.add(unit)
        self.weights_alias = frozenset(weights_alias)
        self.grads_alias = frozenset(grads_alias)
        self.generation = 0
        self.stepping = frozenset[int]()

    def _units(self) -> tuple[UnitSpec, ...]:
        units: list[UnitSpec] = []
        for group in self.layout.groups:
            first = group.units[0]
            padded = group.layout.padded_numel(self.ranks_of[first].ranks)
            slot = self.slot_dtype(first)
            reduce = self.wire_dtype(first)
            wide = self.sums[first]
            # slots have room for whole vectors
            must_be_smaller(group.wire.gather, slot, group.layout.names[0])
            must_be_smaller(group.wire.reduce, reduce, group.layout.names[0])
            for layer, unit in enumerate(group.units):
                # what is pinned is not stacked: schedules give it a slot of its own
                units.append(
                    UnitSpec(
                        id=unit,
                        name=f"{group.name}[{layer}]" if group.stacked else group.name or "params",
                        stack=group.name if group.stacked else None,
                        layer=layer,
                        numel=group.layout.numel,
                        gather_bytes=padded * slot.itemsize,
                        reduce_bytes=padded * reduce.itemsize if group.trainable else 0,
                        trainable=group.trainable,
                        sum_bytes=padded * wide.itemsize if group.trainable and wide is not None else 0,
                        over=group.over,
                        gathered_as=encoding(group.wire.gather, padded),
                        reduced_as=encoding(group.wire.reduce, padded),
                        state_block=1 if group.layout.align == group.wire.align else group.layout.align,
                    )
                )
        return tuple(unit if unit.id in self.held else elsewhere(unit) for unit in sorted(units))

    # ---- an owner of layouts (params/sharded.py), without memory

    def abstract(self) -> "Placement[Ranks]":
        """Returns this placement without memory and processes, for a rank that holds the units of all stages: steps are
        traced whole.
        """
        comms = self.comms
        numbers = comms.replicas, comms.nodes, comms.local_ranks, comms.device, comms.rank, comms.replica
        ranks = Ranks(*numbers, axes=comms.axes)
        ranks.set_micro_shards(comms.micro_shards)
        return Placement(self.layout, self.mesh_axes, self.precision, ranks, self.assignment)

    def owns(self, number: int, leaf: object) -> bool:
        return False

    def why_gone(self) -> str:
        return "is gone"

    def why_not_whole(self) -> str:
        return "it has no memory"

    def layout_of(self, unit: int) -> FlatLayout:
        return self.of_unit[unit].layout

    def gather_dtype(self, unit: int) -> torch.dtype:
        return self.of_unit[unit].dtype or self.precision.gather_dtype

    def slot_dtype(self, unit: int) -> torch.dtype:
        """Returns the dtype in which slots hold its weights."""
        return torch.uint8 if self.keeps(unit) else self.gather_dtype(unit)

    def keeps(self, unit: int) -> bool:
        """Returns whether slots hold the bytes of its weights as they have come, which blocks read."""
        format = self.gathered_in.get(unit)
        return format is not None and format.kept

    def wire_dtype(self, unit: int) -> torch.dtype:
        """Returns the dtype in which its gradient travels."""
        return self.of_unit[unit].reduce or self.precision.reduce_dtype

    def sum_dtype(self, unit: int) -> torch.dtype | None:
        """Returns the dtype in which ranks sum its gradient themselves; None if the backend does."""
        if self.of_unit[unit].wire.reduce is not None:
            return self.precision.decoded_dtype
        wire = self.wire_dtype(unit)
        wide = self.precision.sum_dtype_of(wire)
        return sum_dtype(self.precision.param, wire, wide) if self.comms.deterministic else wide

    # ---- shards, and handles on them

    def shards(self, device: torch.device | str) -> list[Tensor]:
        """Allocates this rank's master shards of the held units of every group: [L, n], or [n] for a single unit."""
        made: list[Tensor] = []
        for group in self.layout.groups:
            held = len(group.held)
            n = group.shard_numel(self.comms)
            shape = (held, n) if group.stacked else (n * held,)
            dtype = self.precision.param if group.trainable else self.gather_dtype(group.units[0])
            made.append(torch.empty(shape, dtype=dtype, device=device))
        return made

    def handles(self, leaves: Sequence[Any], seed: int = 0, step: int = 0) -> Tree:
        """Returns the user's container with a handle per entry on `leaves`, one per group."""
        return placed(self.layout, leaves, Origin(self, self.generation, seed, step))

    def meta_params(self) -> Tree:
        """Returns `handles` on shards that have no values."""
        return self.handles(self.shards("meta"))

    # ---- sizes of the buffers that a state needs besides

    def buffer_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the buffers that receive reductions, and in which gradient shards travel between
        replicas."""
        receive = staging = 0
        for group in self._trained_here:
            first = group.units[0]
            n = group.shard_numel(self.comms)
            wire = self.wire_dtype(first)
            wide = self.sums[first]
            # two vectors that are received one after the other share the larger buffer
            sent = n * wire.itemsize if group.wire.reduce is None else group.wire.reduce.nbytes(n)
            receive = max(receive, receive_numel(self.ranks_of[first], sent, wide))
            staged = staging_numel(self.comms, n, self.precision.param, wire, wide)
            staging = max(staging, staged * wire.itemsize)
        return receive, staging

    def largest_leaf(self, dtype: torch.dtype) -> int:
        """Returns the elements of the largest trained leaf that is gathered in `dtype`, or of all if none is: those of
        the scratch memory for gradients in it."""
        trained = self._trained_here
        alike = [group for group in trained if self.gather_dtype(group.units[0]) == dtype]
        sizes = [0]
        for group in alike or trained:
            sizes += map(math.prod, group.layout.shapes)
        return max(sizes)

    @property
    def _trained_here(self) -> list[Group]:
        return [group for group in self.groups if group.trainable and group.held]


def must_be_smaller(format: Format | None, dtype: torch.dtype, leaf: str) -> None:
    """Raises ValueError where a block is larger than in `dtype`: slots have room for that."""
    if format is not None and format.block_bytes > format.block * dtype.itemsize:
        raise ValueError(
            f"{leaf}: {format.name} makes {format.block_bytes} bytes of {format.block} elements, which are "
            f"{format.block * dtype.itemsize} bytes in {dtype}; give a larger block, or no format"
        )


def encoding(format: Format | None, numel: int) -> Encoding | None:
    """Returns a format as data, for a flat vector of `numel` elements."""
    if format is None:
        return None
    return Encoding(format.name, format.block, format.block_bytes, format.nbytes(numel))


# ---- Units on stages.


def check_assignment(assignment: Assignment | None, units: int, stages: int) -> None:
    """Raises unless `assignment` gives each of the units existing stages."""
    if assignment is None:
        if stages > 1:
            raise ValueError(
                f"the mesh has {stages} stages: say which of them holds which units, with "
                f"stages=ya.schedules.assign(trace, stages={stages}), where `trace` is of the loss on these parameters"
            )
        return
    if not isinstance(assignment, Assignment):
        raise TypeError(f"stages={assignment!r:.80}: expected an Assignment, as ya.schedules.assign makes")
    if len(assignment.units) != units:
        raise ValueError(
            f"stages: the assignment is of {len(assignment.units)} units, these parameters have {units}; "
            "assign the units of a trace of these parameters, with the same markers (ya.schedules.assign)"
        )
    if stages > 1 and sorted(set(assignment.homes)) != list(range(stages)):
        raise ValueError(
            f"stages: the assignment's segments are at home on stages {sorted(set(assignment.homes))}, the mesh has "
            f"stages 0 to {stages - 1}; give ya.schedules.assign(trace, stages={stages})"
        )
    segments = len(assignment.homes)
    for unit, of_unit in enumerate(assignment.units):
        if wrong := [segment for segment in of_unit if segment not in range(segments)]:
            raise ValueError(f"stages: unit {unit} is in segment {wrong[0]}, the assignment has {segments} segments")
