"""What a store is before it has memory: a layout, mesh axes and a precision; the units, shapes and dtypes they imply.

A trace, predicted memory and the store itself read the same rules here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from yafsdp_fn.comm import flat
from yafsdp_fn.comm.places import Places
from yafsdp_fn.layout import Entry, FlatLayout, Group, TreeLayout
from yafsdp_fn.precision import Precision
from yafsdp_fn.schedules.trace import Unit
from yafsdp_fn.sharded import Context, Sharded
from yafsdp_fn.tree import Tree

if TYPE_CHECKING:
    from yafsdp_fn.comm.communicators import Communicators
    from yafsdp_fn.runtime.store import Store


class AbstractStore:
    """A layout on a mesh, without tensors.

    mesh_axes: `(name, size)` of each mesh axis; comms: how many ranks there are, and which one this is
    units: the records that traces carry; trained: ids of the trainable ones
    weights_alias, grads_alias: whether slots are the shards themselves, as one rank makes up the shard group
    """

    def __init__(
        self,
        layout: TreeLayout,
        mesh_axes: tuple[tuple[str, int], ...],
        precision: Precision,
        comms: Communicators | Places,
    ) -> None:
        self.layout, self.mesh_axes, self.precision, self.comms = layout, mesh_axes, precision, comms
        self.groups = [group for _, group in layout.groups]
        self.of_unit = {unit: group for group in self.groups for unit in group.units}
        self.units = self._units()
        self.trained = tuple(unit.id for unit in self.units if unit.trainable)
        self.weights_alias = comms.ranks == 1
        self.grads_alias = comms.ranks == 1 and precision.reduce_dtype == precision.param
        self.generation = 0

    def _units(self) -> tuple[Unit, ...]:
        units: list[Unit] = []
        for entry, group in self.layout.groups:
            padded = group.layout.padded_numel(self.comms.ranks)
            gather, reduce = self.gather_dtype(group.units[0]), self.precision.reduce_dtype
            wide = self.precision.sum_dtype
            for layer, unit in enumerate(group.units):
                stacked = entry.stacked(group)  # what is pinned is not: schedules give it a slot of its own
                units.append(
                    Unit(
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
        return tuple(sorted(units))

    def abstract(self) -> AbstractStore:
        """This store without its memory and its processes."""
        comms = self.comms
        place = Places(comms.replicas, comms.nodes, comms.local_ranks, comms.device, comms.rank, comms.replica)
        return AbstractStore(self.layout, self.mesh_axes, self.precision, place)

    def layout_of(self, unit: int) -> FlatLayout:
        return self.of_unit[unit].layout

    def gather_dtype(self, unit: int) -> torch.dtype:
        group = self.of_unit[unit]
        return self.precision.gather_dtype if group.trainable else group.dtype or self.precision.gather_dtype

    def shard(self, entry: Entry, group: Group, device: torch.device | str) -> Tensor:
        """Memory for this rank's master shards of a group: [L, n], or [n] where there is one unit."""
        n = group.layout.shard_numel(self.comms.ranks)
        dtype = self.precision.param if group.trainable else self.gather_dtype(group.units[0])
        return torch.empty((len(group.units), n) if entry.stacked(group) else (n,), dtype=dtype, device=device)

    def shards(self, device: torch.device | str) -> list[Tensor]:
        """`shard` of every group."""
        return [self.shard(entry, group, device) for entry, group in self.layout.groups]

    def handles(self, leaves: Sequence[Any], seed: int = 0, step: int = 0) -> Tree:
        """The user's container with a handle per entry on `leaves`, one per group."""
        store = cast("Store", self)  # tracing and `tx.init` ask no more of it than what is here
        handles, first = [], 0
        for entry in self.layout.entries:
            count = len(entry.groups)
            context = Context(entry, store, first, seed=seed, step=step)
            handles.append(Sharded(tuple(leaves[first : first + count]), context))
            first += count
        return self.layout.build(handles)

    def receive_numel(self) -> int:
        """Elements in the reduce dtype of the buffer that reductions land in."""
        return flat.receive_numel(self.comms, self._largest(), self.precision.sum_dtype)

    def staging_numel(self) -> int:
        """Elements in the reduce dtype of the buffer that gradient shards travel in between replicas."""
        p = self.precision
        return flat.staging_numel(self.comms, self._largest(), p.param, p.reduce_dtype, p.sum_dtype)

    @property
    def largest_leaf(self) -> int:
        """Elements of the largest leaf of any unit: a store's scratch memory has as many."""
        return max(math.prod(shape) for group in self.groups for shape in group.layout.shapes)

    def _largest(self) -> int:
        return max(g.layout.shard_numel(self.comms.ranks) for g in self.groups if g.trainable)
