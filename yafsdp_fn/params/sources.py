"""Where initial values come from: each leaf of a tree is a source that gives one layer at a time.

    Param    drawn from a generator seeded by (seed, path, layer): the same bits at every world size
    Tensor   a row of it
    Lazy     loaded when asked for, such as from a file

A rank keeps its slice of each leaf and drops the rest: nothing larger than one leaf of one layer is held.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.layout import Entry, FlatLayout, Group
from yafsdp_fn.params.markers import Frozen, Stacked, strip
from yafsdp_fn.params.tree import Param, Tree, dotted, shape_of

Source = Callable[[int | None], Tensor]
"""`source(layer)` gives one layer of a leaf, `source(None)` an unstacked leaf."""


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A leaf that is loaded when it is needed.

    shape: with the layer axis first in a `Stacked`; load: `load(layer)` one layer of it, `load(None)` all of it
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Source

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


def source(path: str, leaf: Any, seed: int, device: torch.device) -> Source:
    """The source of a leaf. `path` seeds the generator of a Param; its values do not depend on other leaves."""

    def draw(layer: int | None) -> Tensor:
        shape = leaf.shape if layer is None else leaf.shape[1:]
        made: Tensor = leaf.init(leaf_generator(seed, path, layer, device), shape, leaf.dtype)
        if tuple(made.shape) != shape:
            raise ValueError(f"{path}: its initializer made shape {tuple(made.shape)}, expected {shape}")
        return made

    def load(layer: int | None) -> Tensor:
        where, shape = ("", leaf.shape) if layer is None else (f" of layer {layer}", leaf.shape[1:])
        loaded: Tensor = leaf.load(layer)
        if tuple(loaded.shape) != shape:
            raise ValueError(f"{path}{where}: loaded {shape_of(loaded)}, expected shape {shape}")
        return loaded

    if isinstance(leaf, Param):
        return draw
    if isinstance(leaf, Lazy):
        return load
    if isinstance(leaf, Tensor):
        return lambda layer: leaf.detach() if layer is None else leaf.detach()[layer]
    raise TypeError(f"{path}: expected a Param, a tensor or a Lazy leaf, got {type(leaf).__name__}")


def leaf_generator(seed: int, path: str, layer: int | None, device: torch.device) -> torch.Generator:
    """A generator for one layer of one leaf; a hash, so that neighbours are unrelated."""
    key = f"{seed}/{path}/{0 if layer is None else layer}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def fill(
    row: Tensor, layout: FlatLayout, rank: int, sources: Sequence[Source], layer: int | None, together: bool = False
) -> None:
    """Writes this rank's slice `row` [n] of one unit; gaps and padding become zero.

    together: whether ranks must ask all sources, in one order, since they gather
    """
    row.zero_()
    start = rank * row.numel()
    wholes = [give(layer) for give in sources] if together else None
    for piece in layout.pieces(start, start + row.numel()):
        whole = (sources[piece.leaf](layer) if wholes is None else wholes[piece.leaf]).reshape(-1)
        row[piece.start : piece.stop].copy_(whole.narrow(0, piece.origin, piece.stop - piece.start))


def fill_group(
    shards: Tensor, entry: Entry, group: Group, rank: int, sources: Sequence[Source], together: bool = False
) -> None:
    """Writes this rank's shards, [L, n] or [n], of the units of `group` that this stage holds; a pinned one holds all
    layers. together: as for `fill`, units of other stages too"""
    stacked = entry.stacked(group)
    given = sources if stacked else [partial(whole_leaf, give, entry.length) for give in sources]
    rows = dict(zip(group.here, shards.unbind() if stacked else (shards,), strict=False))
    for place in range(len(group.units)) if together else group.here:
        layer = place if stacked else None
        if place in rows:
            fill(rows[place], group.layout, rank, given, layer, together)
        else:
            for give in given:
                give(layer)


def whole_leaf(give: Source, length: int | None, _: int | None = None) -> Tensor:
    """A whole leaf from its source: [L, ...] where it has a layer axis."""
    return give(None) if length is None else torch.stack([give(layer) for layer in range(length)])


def materialize(tree: Tree, *, seed: int = 0, device: torch.device | str = "cpu") -> Tree:
    """A plain tree of tensors, without markers: the counterpart of `init`, to the same bits on one kind of device."""
    return strip(with_values(tree, seed, device))


def with_values(tree: Tree, seed: int, device: torch.device | str) -> Tree:
    """`materialize` with the markers left where they are."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(tree)
    out = []
    for accessor, leaf in zip(accessors, leaves, strict=True):
        give = source(dotted(accessor), leaf, seed, torch.device(device))
        stacked = any(issubclass(entry.type, Stacked) for entry in accessor)
        out.append(whole_leaf(give, leaf.shape[0] if stacked else None).to(device))
    return optree.tree_map(_stored, optree.tree_unflatten(spec, out), is_leaf=lambda node: isinstance(node, Frozen))


def _stored(node: Any) -> Any:
    """What is frozen in a dtype of its own is stored in it."""
    if not isinstance(node, Frozen) or node.dtype is None:
        return node
    return Frozen(optree.tree_map(lambda leaf: leaf.to(node.dtype), node.tree), node.dtype)
