"""Flat layouts: where every leaf of a parameter tree lies in its unit's flat vector.

    unit:  | q_proj ........ | k_proj .. | norm |gap| down_proj ...... | padding |
    rank:  |------- rank 0 -------|------- rank 1 -------|------- rank 2 -------|

Offsets are aligned to 16 bytes and do not depend on the number of ranks; padding is only at the tail, so that every
rank owns an equal, aligned slice. Gaps and padding hold zeros everywhere, always.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm.ranks import padded_numel, round_up
from yafsdp_fn.params.tree import LayerParam, Param, Tree


class Piece(NamedTuple):
    """Elements `[start, stop)` of a slice hold leaf number `leaf` from its element `origin` on."""

    leaf: int
    start: int
    stop: int
    origin: int


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The leaves of one unit in one flat vector of `numel` elements.

    names: dotted paths of the leaves; shapes: of one layer, without the layer axis, but with it in a pinned unit
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(map(round_up, self.sizes)))[: len(self.sizes)]

    @cached_property
    def numel(self) -> int:
        """Elements up to the end of the last leaf: the same for every number of ranks."""
        return self.offsets[-1] + self.sizes[-1] if self.sizes else 0

    def shard_numel(self, ranks: int) -> int:
        """Elements of one rank's slice: equal on all ranks, aligned."""
        return self.padded_numel(ranks) // ranks

    def padded_numel(self, ranks: int) -> int:
        return padded_numel(self.numel, ranks)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of the leaves in a flat vector of at least `numel` elements, which may have further axes behind."""
        behind = flat.shape[1:]
        return [
            flat.narrow(0, offset, size).view((*shape, *behind))
            for offset, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=True)
        ]

    def gaps(self, flat: Tensor) -> list[Tensor]:
        """Views of the elements of a flat vector that belong to no leaf."""
        starts = (*self.offsets[1:], flat.numel())
        ends = [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]
        return [flat[end:start] for end, start in zip(ends, starts, strict=True) if end < start]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parts of leaves that lie in the slice `[start, stop)` of the flat vector."""
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            a, b = max(offset, start), min(offset + size, stop)
            if a < b:
                yield Piece(index, a - start, b - start, a - offset)


@dataclasses.dataclass(frozen=True)
class Group:
    """The units of one layout in an entry: one per layer of a stack, or a single one: unstacked, or pinned, of all
    layers. `Unit`, `frozen` and `Pinned` inside a stack make further groups.

    units: ids, by layer, or the only one; leaves: positions among the entry's leaves; dtype: storage dtype of frozen
    leaves. A shard of the group is [L, n], or [n] where there is a single unit.
    stages: of a pipeline, those that hold each unit, the first of them its home; stage: this one. A shard has rows for
    what this stage holds: [L here, n], or [0] where the single unit is elsewhere. Without stages all is here.
    """

    name: str
    layout: FlatLayout
    units: tuple[int, ...]
    leaves: tuple[int, ...]
    trainable: bool
    dtype: torch.dtype | None
    pinned: bool = False
    stages: tuple[tuple[int, ...], ...] | None = None
    stage: int = 0

    @cached_property
    def here(self) -> tuple[int, ...]:
        """Which of `units` have a row here, by their places in it: layers, where stacked."""
        return tuple(place for place in range(len(self.units)) if self.stage in self.holders(place))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The units that have a row here, by row."""
        return tuple(self.units[place] for place in self.here)

    @cached_property
    def counted(self) -> tuple[int, ...]:
        """Rows of the units that are at home here: what is summed or saved over all stages is so once."""
        return tuple(row for row, place in enumerate(self.here) if self.home(place) == self.stage)

    def holders(self, place: int) -> tuple[int, ...]:
        """The stages that hold unit number `place` of `units`."""
        return (self.stage,) if self.stages is None else self.stages[place]

    def home(self, place: int) -> int:
        """The first of them."""
        return self.holders(place)[0]

    def unit(self, layer: int) -> int:
        """The unit that holds `layer` (0 where unstacked)."""
        return self.units[0 if self.pinned else layer]

    def of_layer(self, leaves: Sequence[Tensor], layer: int) -> Sequence[Tensor]:
        """What a block sees of the leaves of `unit(layer)`: views of one layer, where they hold all."""
        return [leaf[layer] for leaf in leaves] if self.pinned else leaves

    @property
    def layer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the leaves of one layer."""
        return tuple(shape[1:] for shape in self.layout.shapes) if self.pinned else self.layout.shapes


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one handle stands for: an unstacked unit or a whole stack. spec: its structure without markers; length: L,
    or None if unstacked."""

    name: str
    spec: optree.PyTreeSpec
    groups: tuple[Group, ...]
    length: int | None

    @cached_property
    def leaf_count(self) -> int:
        return self.spec.num_leaves

    def unflatten(self, by_group: Mapping[str, Sequence[Any]]) -> Tree:
        """The subtree from the leaves of its groups, by their names; leaves of a group that is absent are None."""
        if len(self.groups) == 1 and by_group:
            return optree.tree_unflatten(self.spec, by_group[self.groups[0].name])
        out: list[Any] = [None] * self.leaf_count
        for group in self.groups:
            if group.name in by_group:
                for position, leaf in zip(group.leaves, by_group[group.name], strict=True):
                    out[position] = leaf
        return optree.tree_unflatten(self.spec, out)

    def params(self, group: Group) -> list[Param]:
        """The abstract per-layer parameters of `group`."""
        kind = Param if self.length is None else LayerParam
        return [kind(shape, group.dtype or torch.float32) for shape in group.layer_shapes]

    def stacked(self, group: Group) -> bool:
        """Whether `group` has a unit per layer: shards [L, n]."""
        return self.length is not None and not group.pinned


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """The layout of a whole tree: its entries, in unit order, and the container that holds them."""

    entries: tuple[Entry, ...]
    container: optree.PyTreeSpec

    def on(self, holders: Sequence[tuple[int, ...]] | None, stage: int) -> "TreeLayout":
        """The same layout as a stage has it. holders: unit -> stages; None: all is here"""

        def placed(group: Group) -> Group:
            stages = None if holders is None else tuple(holders[unit] for unit in group.units)
            return dataclasses.replace(group, stages=stages, stage=stage)

        entries = [dataclasses.replace(entry, groups=tuple(map(placed, entry.groups))) for entry in self.entries]
        return TreeLayout(tuple(entries), self.container)

    @cached_property
    def groups(self) -> tuple[tuple[Entry, Group], ...]:
        return tuple((entry, group) for entry in self.entries for group in entry.groups)
