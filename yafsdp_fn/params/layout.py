"""Flat layouts: the leaves of each unit, and their positions in the unit's flat vector. `tree_layout` makes them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.formats import WHOLE, Format, Wire
from yafsdp_fn.communication.ranks import Axis, Ranks
from yafsdp_fn.params.tree import LayerParam, LeafSplit, Param, Tree
from yafsdp_fn.util.mesh_axes import ALIGN, INSIDE, MeshAxes, padded_numel, round_up

# ---- Flat layouts: the position of every leaf of a parameter tree in its unit's flat vector.
#
#     unit:  | q_proj ........ | k_proj .. | norm |gap| down_proj ...... | padding |
#     rank:  |------- rank 0 -------|------- rank 1 -------|------- rank 2 -------|
#
# A unit that is split over axes inside blocks has the flat vector of a part, cut over the ranks that hold this part.
#
# Offsets are aligned to 16 bytes, or to the blocks of wire formats, and do not depend on the number of ranks; padding
# is only at the end, so that every rank owns an equal, aligned slice. Gaps and padding always hold zeros.


def _in_blocks(leaf: Tensor, dim: int, blocks: int) -> Tensor:
    """Splits a dimension, counted from the end, into blocks: [.., blocks * n, ..] -> [.., blocks, n, ..]."""
    return leaf.view(*leaf.shape[:dim], blocks, leaf.shape[dim] // blocks, *leaf.shape[leaf.ndim + dim + 1 :])


def cut_of(split: LeafSplit, name: str) -> tuple[int, int]:
    """Returns the dimension that axis `name` cuts, and the blocks that it has there."""
    found = dict(split)[name]
    return (found, 1) if isinstance(found, int) else found


def check_blocks(path: str, axis: str, run: int, formats: Sequence[Format | None]) -> None:
    """Raises ValueError where a part of a leaf has other blocks than the whole: `run` elements lie side by side."""
    for format in formats:
        if format is not None and format.kept:
            raise ValueError(
                f"{path} is split over {axis}, and {format.name} takes whole rows of what it multiplies: a part of a "
                "row has another largest element; leave this weight out (ya.formats.float8(params, where))"
            )
        if format is not None and run % format.block:
            raise ValueError(
                f"{path} is split over {axis} into runs of {run} elements, and {format.name} encodes blocks of "
                f"{format.block}: they would be others at another number of ranks; take a block that divides {run}"
            )


class LeafPiece(NamedTuple):
    """A part of a leaf in a slice: elements `[start, stop)` of the slice are leaf number `leaf` from its element
    `origin` on."""

    leaf: int
    start: int
    stop: int
    origin: int


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The leaves of one unit in one flat vector of `numel` elements.

    names: dotted paths of the leaves; shapes: of one layer, without the layer axis, but with it in a pinned unit
    align: elements at whose multiples leaves begin, and slices
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    align: int = ALIGN

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(round_up(size, self.align) for size in self.sizes))[: len(self.sizes)]

    @cached_property
    def numel(self) -> int:
        """Elements up to the end of the last leaf: the same for every number of ranks."""
        return self.offsets[-1] + self.sizes[-1] if self.sizes else 0

    def shard_numel(self, ranks: int) -> int:
        """Returns the elements of one rank's slice: equal on all ranks, aligned."""
        return self.padded_numel(ranks) // ranks

    def padded_numel(self, ranks: int) -> int:
        return padded_numel(self.numel, ranks, self.align)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Returns views of the leaves in a flat vector of at least `numel` elements, which may have trailing axes."""
        behind = flat.shape[1:]
        return [
            flat.narrow(0, offset, size).view((*shape, *behind))
            for offset, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=True)
        ]

    def gaps(self, flat: Tensor) -> list[Tensor]:
        """Returns views of the elements of a flat vector that belong to no leaf."""
        starts = (*self.offsets[1:], flat.numel())
        ends = map(sum, zip(self.offsets, self.sizes, strict=True))
        return [flat[end:start] for end, start in zip(ends, starts, strict=True) if end < start]

    def pieces(self, start: int, stop: int) -> Iterator[LeafPiece]:
        """Yields the parts of leaves in the slice `[start, stop)` of the flat vector."""
        for number, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            first = max(offset, start)
            last = min(offset + size, stop)
            if first < last:
                yield LeafPiece(number, first - start, last - start, first - offset)


# ---- The units of one layout, and where they are.


class Encodes(NamedTuple):
    """The content of a group of an optimizer's state that is in a format: the bytes of a group, which is in `dtype`."""

    format: Format
    group: "Group"
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Group:
    """The units of one layout in an entry: one per layer of a stack, or a single one, unstacked or pinned. `Unit`,
    `frozen` and `Pinned` inside a stack make further groups.

    units: ids, by layer, or the only one; leaves: positions among the entry's leaves. A shard of the group is [L, n],
        or [n] for a single unit.
    dtype: in which it is gathered, and stored if it is frozen; None: `Precision.compute`; reduce: of its gradient on
        the wire; None: `Precision.reduce`; wire: the formats that take the place of these dtypes on the wire
    splits: of each leaf, `Param.split`, over the same axes for all; axes: those that it is split over on this mesh,
        with their sizes, outermost first. `layout` is of this rank's part
    length: L of the stack that its leaves are in, None outside of one; stacked: it has a unit per layer, and a shard
        has a row for each
    stages: of a pipeline, those that hold each unit, the first being its home; stage: this one. A shard has rows for
        the units that this stage holds: [L here, n], or [0] if the single unit is elsewhere. Without stages all is
        here.
    encodes, on_host: of a group of an optimizer's state: the format that it is in, if it is in one, and whether its
        leaf is in the host's memory
    """

    # its units, and their leaves
    name: str
    layout: FlatLayout
    units: tuple[int, ...]
    leaves: tuple[int, ...]
    # what its leaves have in common
    trainable: bool
    dtype: torch.dtype | None
    pinned: bool = False
    reduce: torch.dtype | None = None
    # its layers
    length: int | None = None
    stacked: bool = False
    # on this mesh
    stages: tuple[tuple[int, ...], ...] | None = None
    stage: int = 0
    splits: tuple[LeafSplit, ...] = ()
    axes: MeshAxes = ()
    wire: Wire = WHOLE
    # of an optimizer's state
    encodes: Encodes | None = dataclasses.field(default=None, compare=False)
    on_host: bool = dataclasses.field(default=False, compare=False)

    # ---- over axes inside blocks

    @cached_property
    def over(self) -> tuple[str, ...]:
        """The axes that it is split over here: `ranks.without(group.over)` hold the same part."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def whole(self) -> FlatLayout:
        """The layout of whole leaves."""
        if not self.axes:
            return self.layout
        shapes = [list(shape) for shape in self.layout.shapes]
        for shape, split in zip(shapes, self.splits, strict=True):
            for name, size in self.axes:
                shape[cut_of(split, name)[0]] *= size
        return dataclasses.replace(self.layout, shapes=tuple(map(tuple, shapes)))

    def on(self, axes: Mapping[str, Axis]) -> "Group":
        """Returns the same group on a mesh with these axes inside blocks. Raises ValueError if a leaf cannot be split
        over them."""
        # does the mesh have the axes?
        names = list(dict(self.splits[0])) if self.splits else []
        unknown = [name for name in names if name not in (*INSIDE, *axes)]
        if axes and unknown:
            raise ValueError(
                f"{self.layout.names[0]} is split over {unknown[0]!r}, which is no axis of this mesh; it has "
                f"{', '.join(axes)}. Make it, of size 1 if nothing is to be split: ya.mesh({unknown[0]}=1)"
            )
        # this rank's part of each leaf
        here = tuple((name, axis.size) for name, axis in axes.items() if name in names and axis.size > 1)
        shapes = []
        for path, whole, split in zip(self.layout.names, self.whole.shapes, self.splits, strict=True):
            shape = list(whole)
            for name, size in here:
                dim, blocks = cut_of(split, name)
                if shape[dim] // blocks % size:
                    raise ValueError(
                        f"{path}: dimension {dim} is split over {name}, and {shape[dim] // blocks} elements do not "
                        f"divide by its {size} ranks; take a mesh with fewer ranks on {name}, or another split"
                    )
                shape[dim] //= size
            # blocks of wire formats must be those of the whole leaf
            for name, _ in here:
                dim, blocks = cut_of(split, name)
                behind = math.prod(shape[len(shape) + dim + 1 :])
                check_blocks(path, name, shape[dim] // blocks * behind, self.wire)
            shapes.append(tuple(shape))
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, shapes=tuple(shapes)), axes=here)

    def shard_numel(self, ranks: Ranks) -> int:
        """Returns the elements of a unit that each of the `ranks` of a copy has."""
        return self.layout.shard_numel(ranks.without(self.over).ranks)

    def pieces(self, n: int, ranks: Ranks) -> Iterator[LeafPiece]:
        """Yields the parts of leaves in this rank's `n` elements of a unit."""
        start = ranks.without(self.over).rank * n
        return self.layout.pieces(start, start + n)

    def local_slice(self, number: int, leaf: Tensor, ranks: Ranks) -> Tensor:
        """Returns this rank's part of leaf `number`, whole: a view, unless it has blocks."""
        return self._slice(number, leaf, [ranks.axes[name].rank for name in self.over])

    def cut(self, number: int, leaf: Tensor) -> list[Tensor]:
        """Returns the parts of leaf `number`, whole, in the order of `axes`: views, unless it has blocks."""
        every = itertools.product(*map(range, dict(self.axes).values()))
        return [self._slice(number, leaf, coordinates) for coordinates in every]

    def _slice(self, number: int, leaf: Tensor, coordinates: Sequence[int]) -> Tensor:
        for (name, size), coordinate in zip(self.axes, coordinates, strict=True):
            dim, blocks = cut_of(self.splits[number], name)
            length = leaf.shape[dim] // blocks // size
            leaf = _in_blocks(leaf, dim, blocks).narrow(dim, coordinate * length, length).flatten(dim - 1, dim)
        return leaf

    def leaves_of(self, flat: Tensor, ranks: Ranks) -> list[Tensor]:
        """Returns the whole leaves of a unit from the shards of all `ranks` of a copy, [R * n], which may have trailing
        axes. Views, unless it is split."""
        if not self.axes:
            return self.layout.split(flat)
        shards = flat.view(ranks.ranks, -1, *flat.shape[1:])
        subgroups = ranks.subgroups(across=self.over)
        # not shards[members]: an index would be copied to a GPU, which the host would wait for
        parts = [self.layout.split(torch.cat([shards[rank] for rank in members])) for members in subgroups]
        return [self.joined(number, pieces, flat.ndim - 1) for number, pieces in enumerate(zip(*parts, strict=True))]

    def joined(self, number: int, pieces: Sequence[Tensor], behind: int = 0) -> Tensor:
        """Returns leaf `number`, whole, from its parts in the order of `axes`. behind: trailing axes of the parts"""
        for name, size in reversed(self.axes):
            dim, blocks = cut_of(self.splits[number], name)
            dim -= behind
            pieces = [_in_blocks(piece, dim, blocks) for piece in pieces]
            beside = [pieces[k : k + size] for k in range(0, len(pieces), size)]
            pieces = [torch.cat(group, dim).flatten(dim - 1, dim) for group in beside]
        return pieces[0]

    # ---- over stages

    @cached_property
    def here(self) -> tuple[int, ...]:
        """Indices of the units that have a row here; of a stack, its layers."""
        return tuple(index for index in range(len(self.units)) if self.stage in self.holders(index))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The units that have a row here, in the order of rows."""
        return tuple(self.units[index] for index in self.here)

    @cached_property
    def counted(self) -> tuple[int, ...]:
        """Rows of the units whose home is this stage: sums and saves over all stages take these, so each unit once."""
        return tuple(row for row, index in enumerate(self.here) if self.home(index) == self.stage)

    def holders(self, index: int) -> tuple[int, ...]:
        """Returns the stages that hold unit number `index` of `units`."""
        return (self.stage,) if self.stages is None else self.stages[index]

    def home(self, index: int) -> int:
        """Returns the first stage that holds unit number `index`."""
        return self.holders(index)[0]

    # ---- layers

    @property
    def has_layers(self) -> bool:
        """True if its leaves have an axis of layers: those of a pinned unit, but not their bytes in a format."""
        return self.pinned and self.encodes is None

    def unit(self, layer: int) -> int:
        """Returns the unit that holds `layer` (0 if unstacked)."""
        return self.units[0 if self.pinned else layer]

    def of_layer(self, leaves: Sequence[Tensor], layer: int) -> Sequence[Tensor]:
        """Returns the leaves of one layer from those of `unit(layer)`: views, if these hold all layers."""
        return [leaf[layer] for leaf in leaves] if self.has_layers else leaves

    @property
    def layer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the whole leaves of one layer."""
        return tuple(shape[1:] for shape in self.whole.shapes) if self.has_layers else self.whole.shapes

    @property
    def params(self) -> list[Param]:
        """The abstract parameters of one layer."""
        kind = Param if self.length is None else LayerParam
        splits = self.splits or ((),) * len(self.layer_shapes)
        dtype = torch.float32 if self.trainable or self.dtype is None else self.dtype
        return [kind(shape, dtype, split=split) for shape, split in zip(self.layer_shapes, splits, strict=True)]


# ---- The subtrees of a tree.


@dataclasses.dataclass(frozen=True)
class Entry:
    """The subtree of one handle: an unstacked unit or a whole stack. spec: its structure without markers"""

    name: str
    spec: optree.PyTreeSpec
    groups: tuple[Group, ...]

    @cached_property
    def length(self) -> int | None:
        """L, or None if unstacked."""
        return self.groups[0].length

    def unflatten(self, by_group: Mapping[str, Sequence[Any]]) -> Tree:
        """Builds the subtree from the leaves of its groups, by name; leaves of absent groups are None."""
        out: list[Any] = [None] * self.spec.num_leaves
        for group in self.groups:
            if group.name in by_group:
                for position, leaf in zip(group.leaves, by_group[group.name], strict=True):
                    out[position] = leaf
        return optree.tree_unflatten(self.spec, out)


# ---- The whole tree.


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """The layout of a whole tree: its entries, in unit order, and the container that holds them."""

    entries: tuple[Entry, ...]
    container: optree.PyTreeSpec

    def on(self, holders: Sequence[tuple[int, ...]] | None, stage: int, axes: Mapping[str, Axis]) -> "TreeLayout":
        """Returns the same layout for a stage. holders: unit -> stages; None: all is here; axes: inside blocks"""

        def placed(group: Group) -> Group:
            stages = None if holders is None else tuple(holders[unit] for unit in group.units)
            group = group.on(axes) if group.splits else group
            return dataclasses.replace(group, stages=stages, stage=stage)

        return self._of(placed)

    def aligned(self, block: int) -> "TreeLayout":
        """Returns the same layout, with shards of trained groups that are cut at multiples of `block` elements, too."""

        def aligned(group: Group) -> Group:
            align = math.lcm(group.wire.align, block if group.trainable else 1)
            return dataclasses.replace(group, layout=dataclasses.replace(group.layout, align=align))

        return self._of(aligned)

    def _of(self, placed: Callable[[Group], Group]) -> "TreeLayout":
        entries = tuple(dataclasses.replace(entry, groups=tuple(map(placed, entry.groups))) for entry in self.entries)
        return dataclasses.replace(self, entries=entries)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return tuple(group for entry in self.entries for group in entry.groups)
