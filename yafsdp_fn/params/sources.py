"""Sources of values, one layer of a leaf at a time: initializers, whole trees, and sharded ones."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.formats import WHOLE, Wire
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.markers import Frozen, without_markers
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Param, Tree, dotted, in_stack, no_leaf, settle, shape_of, stacked
from yafsdp_fn.util.bits import sum_of_bits
from yafsdp_fn.util.randomness import seeded
from yafsdp_fn.util.words import Made

# ---- Sources of initial values: each leaf of a tree gives one layer at a time.
#
#     Param    drawn from a generator seeded by (seed, path, layer): the same bits at every world size
#     Tensor   a row of it
#     Lazy     loaded on demand, such as from a file
#
# A rank keeps its slice of each leaf and drops the rest: nothing larger than one leaf of one layer is held.

Source = Callable[[int | None], Tensor]
"""Returns one layer of a leaf, `source(layer)`, or an unstacked leaf, `source(None)`."""


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A leaf that is loaded on demand.

    shape: with the layer axis first in a `Stacked`; load: `load(layer)` one layer of it, `load(None)` all of it
    split, compute, reduce, wire: as of a `Param`; in_memory: loading costs nothing, so that `ya.shard` compares the
        values of all ranks; beside: tensors that must be the same on all ranks, too, by name: buffers of a module

    >>> leaf = ya.Lazy((2, 3), torch.float32, lambda layer: torch.full((3,), float(layer)))    # reads one layer
    >>> ya.unshard(ya.shard({"layers": ya.Stacked({"gain": leaf})}, mesh=mesh).params)["layers"]["gain"]
    tensor([[0., 0., 0.],
            [1., 1., 1.]])
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Source = dataclasses.field(repr=False)
    split: Any = ()
    in_memory: bool = False
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    wire: Wire = WHOLE
    beside: Mapping[str, Tensor] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        settle(self)

    @classmethod
    def in_place_of(cls, leaf: Any, dtype: torch.dtype, load: Source, *, in_memory: bool = False) -> "Lazy":
        """Returns a leaf of the shape of `leaf`, with the split, own dtypes and formats of a `Param` or a `Lazy`."""
        if isinstance(leaf, Tensor):
            return cls(tuple(leaf.shape), dtype, load, in_memory=in_memory)
        return cls(leaf.shape, dtype, load, leaf.split, in_memory, leaf.compute, leaf.reduce, leaf.wire)


def with_wire(tree: Tree, wire: Wire, where: Callable[[str, Any], bool] | None = None) -> Tree:
    """Returns `tree` with leaves that travel in wire formats: the matrices of stacks, or those that `where` chooses by
    their dotted path and the leaf. All others stay as they are: norms, embeddings and heads, but not a router, which is
    a matrix of a stack.

    tree: as `ya.init` and `ya.shard` take it. Raises ValueError if nothing is chosen

    >>> light = ya.params.with_wire(params, ya.Wire(gather=ya.formats.Scaled()), lambda path, _: path.endswith("up"))
    >>> light["layers"].tree["up"].wire.gather.name, light["layers"].tree["down"].wire.gather
    ('int8/64', None)
    """
    chosen: list[str] = []

    def of(accessor: optree.PyTreeAccessor, leaf: Any) -> Any:
        path = dotted(accessor)
        if not (where(path, leaf) if where is not None else in_stack(accessor) and len(leaf.shape) > 2):
            return leaf
        chosen.append(path)
        return dataclasses.replace(as_described(path, leaf), wire=wire)

    found = optree.tree_map_with_accessor(of, tree)
    if not chosen:
        raise ValueError("with_wire: no leaf was chosen; without `where` it takes the matrices of a ya.Stacked")
    return found


def as_described(path: str, leaf: Any) -> Any:
    """Returns `leaf` with fields for a split, dtypes and formats of its own: a `Lazy` in place of a tensor."""
    if not isinstance(leaf, Tensor):
        return leaf
    return Lazy.in_place_of(leaf, leaf.dtype, source(path, leaf, 0, leaf.device), in_memory=True)


INITIALIZER = (
    "the initializer of {} is called with (generator, shape, dtype), and returns a tensor. Those of torch.nn.init "
    "write to one: lambda g, shape, dtype: torch.nn.init.xavier_uniform_(torch.empty(shape, dtype=dtype), generator=g)"
)


OTHER_VALUES = (
    "the initializer of {} has made other values when it was called again. Each rank calls it for its own part, so it "
    "may draw from its generator alone, or from torch's own ones, which are seeded: not from NumPy's or Python's"
)


def source(path: str, leaf: Any, seed: int, device: torch.device) -> Source:
    """Returns the source of a leaf. `path` seeds the generator of a Param; its values do not depend on other leaves."""

    def give(layer: int | None) -> Tensor:
        if isinstance(leaf, Tensor):
            if leaf.is_meta or leaf.layout != torch.strided:
                raise TypeError(
                    f"{path} is on the meta device and has no values, or is sparse; give whole tensors, those that are "
                    "sparse as x.to_dense(), or ya.Lazy leaves that load them"
                )
            return leaf.detach() if layer is None else leaf.detach()[layer]
        shape = leaf.shape if layer is None else leaf.shape[1:]
        if isinstance(leaf, Param):
            value = _drawn(path, leaf, layer, seed, device)
            if not layer and not isinstance(leaf.init, Made):
                bits = sum_of_bits(value)
                del value  # one at a time
                value = _drawn(path, leaf, layer, seed, device)
                if not torch.equal(sum_of_bits(value), bits):
                    raise ValueError(OTHER_VALUES.format(path))
            fault = f"{path}: its initializer made shape {tuple(value.shape)}, expected {shape}"
        else:
            value = leaf.load(layer)
            where = path if layer is None else f"{path} of layer {layer}"
            fault = f"{where}: loaded {shape_of(value)}, expected shape {shape}"
        if tuple(value.shape) != shape:
            raise ValueError(fault)
        return value

    if isinstance(leaf, Param | Lazy | Tensor):
        return give
    raise TypeError(no_leaf(path, leaf))


def _drawn(path: str, leaf: Param, layer: int | None, seed: int, device: torch.device) -> Tensor:
    generator = leaf_generator(seed, path, layer, device)
    try:
        with seeded(generator.initial_seed(), device):  # for one that draws from torch's own generators
            value = leaf.init(generator, leaf.shape if layer is None else leaf.shape[1:], leaf.dtype)
        if not isinstance(value, Tensor):
            raise TypeError(f"{path}: its initializer returned {shape_of(value)}")
    except Exception as error:
        error.add_note(INITIALIZER.format(path))
        raise
    return value


def leaf_generator(seed: int, path: str, layer: int | None, device: torch.device) -> torch.Generator:
    """Returns a generator for one layer of one leaf; a hash, so that neighbours are unrelated."""
    key = f"{seed}/{path}/{0 if layer is None else layer}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


# ---- Writes a rank's shards, layer by layer.


@torch.no_grad()
def fill_row(row: Tensor, group: Group, ranks: Ranks, whole: Callable[[int], Tensor]) -> None:
    """Writes this rank's slice `row` [n] of one unit; gaps and padding become zero. whole: gives each leaf by number"""
    row.zero_()
    for piece in group.pieces(row.numel(), ranks):
        part = group.local_slice(piece.leaf, whole(piece.leaf), ranks).reshape(-1)
        row[piece.start : piece.stop].copy_(part.narrow(0, piece.origin, piece.stop - piece.start))


def fill_group(shards: Tensor, group: Group, ranks: Ranks, sources: Sequence[Source], together: bool = False) -> None:
    """Writes this rank's shards, [L, n] or [n], of the units of `group` that this stage holds, from whole leaves; a
    pinned one holds all layers.

    together: ranks must call all sources, in one order, since they gather: those of units of other stages, too
    """
    rows = dict(zip(group.here, shards.unbind() if group.stacked else (shards,), strict=False))

    def leaf(index: int, number: int) -> Tensor:
        if group.stacked:
            return sources[number](index)
        return whole_leaf(sources[number], group.length if group.has_layers else None)

    for index in range(len(group.units)) if together else group.here:
        whole: Callable[[int], Tensor] = partial(leaf, index)
        if together:
            whole = [whole(number) for number in range(len(sources))].__getitem__
        if index in rows:
            fill_row(rows[index], group, ranks, whole)


def whole_leaf(give: Source, length: int | None) -> Tensor:
    """Returns a whole leaf from its source: [L, ...] if it has a layer axis."""
    return give(None) if length is None else torch.stack([give(layer) for layer in range(length)])


# ---- Plain trees.


def materialize(tree: Tree, *, seed: int = 0, device: torch.device | str = "cpu") -> Tree:
    """A plain tree of tensors, without markers: the counterpart of `init`, to the same bits on one kind of device. On
    "meta" it has shapes and dtypes alone. As in a state, a leaf's own `compute` does not change what is trained.

    >>> ya.materialize({"w": ya.Param((2, 2), init=ya.params.initializers.constant(0.5))})
    {'w': tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])}
    """
    return without_markers(with_values(tree, seed, device))


def with_values(tree: Tree, seed: int, device: torch.device | str) -> Tree:
    """Returns the tree of `materialize`, with its markers."""
    device = torch.device(device)

    def value(accessor: optree.PyTreeAccessor, leaf: Any) -> Tensor:
        give = source(dotted(accessor), leaf, seed, device)
        if device.type == "meta":  # it has no generators
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        return whole_leaf(give, leaf.shape[0] if in_stack(accessor) else None).to(device)

    values = optree.tree_map_with_accessor(value, tree)
    return optree.tree_map(_stored, tree, values, is_leaf=lambda node: isinstance(node, Frozen))


def _stored(node: Any, values: Any) -> Any:
    """Converts the values of a frozen subtree to the dtypes in which they are stored."""
    if not isinstance(node, Frozen):
        return values

    def stored(leaf: Any, value: Tensor) -> Tensor:
        return value.to(getattr(leaf, "compute", None) or node.dtype or value.dtype)

    return Frozen(optree.tree_map(stored, node.tree, values.tree), node.dtype)


# ---- Gathers sharded trees into whole ones, and cuts whole ones into shards.


def whole_tree(tree: Tree) -> Tree:
    """Returns `tree` with whole tensors in place of handles: [L, ...] for a stack. Leaves may have more leading axes.
    Collective."""
    return optree.tree_map(_whole, tree, is_leaf=is_sharded)


def _whole(node: Any) -> Any:
    if not isinstance(node, Sharded):
        return node
    batch = 0
    for _, group, leaf in node.check().group_leaves():
        # a leaf of another size would be gathered, but mix units up
        n = group.shard_numel(node.owner.comms)
        ndim = 1 + group.stacked
        if leaf.ndim < ndim or leaf.shape[-1] != (n if group.stacked or group.held else 0):
            shape = f"[..., {len(group.held)}, {n}]" if group.stacked else f"[..., {n}]"
            raise ValueError(f"unshard: {group.name} has a leaf {shape_of(leaf)}, expected a local shard {shape}")
        batch = leaf.ndim - ndim
    whole_unit = whole_units(node)
    if node.entry.length is None:
        whole = optree.tree_map(torch.clone, whole_unit(0))  # each in memory of its own
    else:
        whole = stacked([whole_unit(layer) for layer in range(node.entry.length)])
    if not batch:
        return whole
    behind, front = tuple(range(-batch, 0)), tuple(range(batch))
    return optree.tree_map(lambda leaf: leaf.movedim(behind, front).contiguous(), whole)


def whole_units(handle: Sharded, dtype: torch.dtype | None = None) -> Callable[[int], Tree]:
    """Returns a function that gathers the whole weights of a layer of a stack, or of a single unit (0), in memory of
    their own. Each call of it is collective.

    dtype: leaves are converted to it before they travel; None: they stay as they are
    """
    pinned: dict[int, list[Tensor]] = {}  # by group, what is gathered for all layers at once

    def whole_unit(layer: int) -> Tree:
        views = {}
        for number, group, leaf in handle.check().group_leaves():
            wholes = pinned.get(number)
            if wholes is None:
                index = layer if group.stacked else 0
                wholes = unit_leaves(handle, group, leaf, index, dtype if leaf.is_floating_point() else None)
                if handle.owner.comms.ranks == 1:
                    wholes = [whole.clone() for whole in wholes]
            if group.pinned:
                pinned[number] = wholes
            views[group.name] = group.of_layer(wholes, layer)
        return handle.entry.unflatten(views)

    return whole_unit


def unit_leaves(
    handle: Sharded, group: Group, leaf: Tensor, index: int, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Gathers the whole leaves of unit number `index` of a group from each rank's part [..., n], whichever stage is its
    home. Axes in front of the parts are behind in the leaves, which may be views of a part if one rank has all of it.
    Collective.

    dtype: parts are converted to it before they travel
    """
    comms = handle.owner.comms
    if group.home(index) != group.stage:
        row = leaf.new_empty(*leaf.shape[: -2 if group.stacked else -1], group.shard_numel(comms))
    else:
        row = leaf.select(-2, group.here.index(index)) if group.stacked else leaf
    row = row.to(comms.device if group.on_host else row.device, dtype)
    if comms.stages > 1:  # at one rank, too, the owner of a unit alone refuses to be asked
        row = comms.from_stage(row, group.home(index))
    row = row.movedim(-1, 0).contiguous()  # flat elements first: that axis is gathered, and cut into leaves
    return group.leaves_of(row if comms.ranks == 1 else comms.all_gather(row), comms)


def shards_of(tree: Tree, like: Tree) -> Tree:
    """Returns this rank's shards of whole tensors, in the handles of `like`, without communication."""
    return optree.tree_map(_cut, like, tree, is_leaf=is_sharded)


def _cut(node: Any, whole: Any) -> Any:
    if not isinstance(node, Sharded):
        return whole
    leaves = node.entry.spec.flatten_up_to(whole)
    out = []
    for _, group, shard in node.group_leaves():
        named = zip(group.layout.names, group.leaves, strict=True)
        sources = [source(name, leaves[k], 0, shard.device) for name, k in named]
        out.append(torch.empty_like(shard))
        fill_group(out[-1], group, node.owner.comms, sources)
    return Sharded(tuple(out), node.context)
