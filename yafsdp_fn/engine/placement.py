"""A layout on a mesh, without memory: the units, shapes and dtypes that follow, by rules that all who ask share.

A state's memory is a placement with tensors; traces and predictions need no more than what is here.
"""

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from yafsdp_fn.comm import flat, ordered_sums
from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.params.layout import Entry, FlatLayout, Group, TreeLayout
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.sharded import Origin, placed
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.schedules.split import Assignment
from yafsdp_fn.schedules.trace import UnitSpec, elsewhere

AnyRanks = TypeVar("AnyRanks", bound=Ranks)


class Placement(Generic[AnyRanks]):
    """mesh_axes: `(name, size)` of each mesh axis; comms: how many ranks there are, and which one this is
    assignment: which stage holds which units; None where there are no stages

    units: the records that traces carry, of other stages' units a number and a name; held: ids of those of this stage;
        trained: of the trainable ones among them
    weights_alias, grads_alias: whether slots are the shards themselves, as one rank makes up the shard group; not on a
        deterministic mesh, where one rank adds up as several do, from weights at addresses that are aligned alike
    key: a text, equal for states that can share programs
    wire_dtype, sum_dtype: what gradients are reduced in, and what ranks sum in, if they do it themselves
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
        check_assignment(assignment, sum(len(group.units) for _, group in layout.groups), comms.stages)
        holders = None if assignment is None or comms.stages == 1 else assignment.holders
        self.layout = layout.on(holders, comms.stage)
        self.wire_dtype, self.sum_dtype = precision.reduce_dtype, precision.sum_dtype
        if comms.deterministic:
            self.sum_dtype = ordered_sums.sum_dtype(precision.param, self.wire_dtype, self.sum_dtype)
        self.groups = [group for _, group in self.layout.groups]
        self.of_unit = {unit: group for group in self.groups for unit in group.units}
        self.held = frozenset(unit for group in self.groups for unit in group.held)
        self.units = self._units()
        self.key = repr((self.units, mesh_axes, precision.names, comms.micro_shards, assignment, comms.stage))
        self.trained = tuple(unit.id for unit in self.units if unit.trainable)
        self.weights_alias = comms.ranks == 1 and not comms.deterministic
        self.grads_alias = self.weights_alias and precision.reduce_dtype == precision.param
        self.generation = 0

    def _units(self) -> tuple[UnitSpec, ...]:
        units: list[UnitSpec] = []
        for entry, group in self.layout.groups:
            padded = group.layout.padded_numel(self.comms.ranks)
            gather, reduce = self.gather_dtype(group.units[0]), self.precision.reduce_dtype
            wide = self.sum_dtype
            for layer, unit in enumerate(group.units):
                stacked = entry.stacked(group)  # what is pinned is not: schedules give it a slot of its own
                units.append(
                    UnitSpec(
                        id=unit,
                        name=f"{group.name}[{layer}]" if stacked else group.name or "params",
                        stack=group.name if stacked else None,
                        layer=layer,
                        numel=group.layout.numel,
                        gather_bytes=padded * gather.itemsize,
                        reduce_bytes=padded * reduce.itemsize if group.trainable else 0,
                        trainable=group.trainable,
                        sum_bytes=padded * wide.itemsize if group.trainable and wide is not None else 0,
                    )
                )
        return tuple(unit if unit.id in self.held else elsewhere(unit) for unit in sorted(units))

    def abstract(self) -> "Placement[Ranks]":
        """This placement without its memory and its processes, and as one rank has it that holds the units of all
        stages: steps are traced whole."""
        comms = self.comms
        ranks = Ranks(comms.replicas, comms.nodes, comms.local_ranks, comms.device, comms.rank, comms.replica)
        ranks.deal(comms.micro_shards)
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
        group = self.of_unit[unit]
        return self.precision.gather_dtype if group.trainable else group.dtype or self.precision.gather_dtype

    def shard(self, entry: Entry, group: Group, device: torch.device | str) -> Tensor:
        """Memory for this rank's master shards of a group: [L, n], or [n] where there is one unit, of those held."""
        n = group.layout.shard_numel(self.comms.ranks)
        dtype = self.precision.param if group.trainable else self.gather_dtype(group.units[0])
        shape = (len(group.held), n) if entry.stacked(group) else (n * len(group.held),)
        return torch.empty(shape, dtype=dtype, device=device)

    def shards(self, device: torch.device | str) -> list[Tensor]:
        """`shard` of every group."""
        return [self.shard(entry, group, device) for entry, group in self.layout.groups]

    def handles(self, leaves: Sequence[Any], seed: int = 0, step: int = 0) -> Tree:
        """The user's container with a handle per entry on `leaves`, one per group."""
        return placed(self.layout, leaves, Origin(self, self.generation, seed, step))

    def receive_numel(self) -> int:
        """Elements in the reduce dtype of the buffer that reductions land in."""
        return flat.receive_numel(self.comms, self._largest(), self.sum_dtype)

    def staging_numel(self) -> int:
        """Elements in the reduce dtype of the buffer that gradient shards travel in between replicas."""
        p = self.precision
        return flat.staging_numel(self.comms, self._largest(), p.param, p.reduce_dtype, p.sum_dtype)

    @property
    def largest_leaf(self) -> int:
        """Elements of the largest trained leaf: the scratch memory for gradients has as many."""
        shapes = [shape for group in self._trained_here for shape in group.layout.shapes]
        return max(map(math.prod, shapes), default=0)

    def _largest(self) -> int:
        return max((g.layout.shard_numel(self.comms.ranks) for g in self._trained_here), default=0)

    @property
    def _trained_here(self) -> list[Group]:
        return [group for group in self.groups if group.trainable and group.held]


def check_assignment(assignment: Assignment | None, units: int, stages: int) -> None:
    """Raises unless `assignment` says of each of so many units which of the stages holds it."""
    if assignment is None:
        if stages > 1:
            raise ValueError(
                f"the mesh has {stages} stages: say which of them holds which units, with "
                f"stages=ya.assign(trace, stages={stages}), where `trace` is of the loss on these parameters"
            )
        return
    if not isinstance(assignment, Assignment):
        raise TypeError(f"stages={assignment!r:.80}: expected an Assignment, as ya.assign makes")
    if len(assignment.units) != units:
        raise ValueError(
            f"stages: the assignment is of {len(assignment.units)} units, these parameters have {units}; "
            "assign the units of a trace of these parameters, with the same markers (ya.assign)"
        )
    if stages > 1 and sorted(set(assignment.homes)) != list(range(stages)):
        raise ValueError(
            f"stages: the assignment's segments are at home on stages {sorted(set(assignment.homes))}, the mesh has "
            f"stages 0 to {stages - 1}; give ya.assign(trace, stages={stages})"
        )
    segments = len(assignment.homes)
    for unit, of_unit in enumerate(assignment.units):
        if wrong := [segment for segment in of_unit if segment not in range(segments)]:
            raise ValueError(f"stages: unit {unit} is in segment {wrong[0]}, the assignment has {segments} segments")
