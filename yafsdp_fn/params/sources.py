"""Sources of values, one layer of a leaf at a time: initializers, whole trees, and sharded ones."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.formats import WHOLE, Wire
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.params.layout import Entry, FlatLayout, Group
from yafsdp_fn.params.markers import Frozen, without_markers
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Param, Tree, dotted, in_stack, no_leaf, settle, shape_of
from yafsdp_fn.util.randomness import seeded

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
        values of all ranks

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
        if isinstance(leaf, Tensor):
            give = source(path, leaf, 0, leaf.device)
            leaf = Lazy.in_place_of(leaf, leaf.dtype, give, in_memory=True)
        return dataclasses.replace(leaf, wire=wire)

    found = optree.tree_map_with_accessor(of, tree)
    if not chosen:
        raise ValueError("with_wire: no leaf was chosen; without `where` it takes the matrices of a ya.Stacked")
    return found


INITIALIZER = (
    "the initializer of {} is called with (generator, shape, dtype), and returns a tensor. Those of torch.nn.init "
    "write to one: lambda g, shape, dtype: torch.nn.init.xavier_uniform_(torch.empty(shape, dtype=dtype), generator=g)"
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
            generator = leaf_generator(seed, path, layer, device)
            try:
                with seeded(generator.initial_seed(), device):  # for one that draws from torch's own generators
                    value: Tensor = leaf.init(generator, shape, leaf.dtype)
            except Exception as error:
                error.add_note(INITIALIZER.format(path))
                raise
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


def leaf_generator(seed: int, path: str, layer: int | None, device: torch.device) -> torch.Generator:
    """Returns a generator for one layer of one leaf; a hash, so that neighbours are unrelated."""
    key = f"{seed}/{path}/{0 if layer is None else layer}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


# ---- Writes a rank's shards, layer by layer.


@torch.no_grad()
def fill(
    row: Tensor, layout: FlatLayout, rank: int, sources: Sequence[Source], layer: int | None, together: bool = False
) -> None:
    """Writes this rank's slice `row` [n] of one unit; gaps and padding become zero.

    together: ranks must call all sources, in one order, since they gather
    """
    row.zero_()
    start = rank * row.numel()
    wholes = [give(layer) for give in sources] if together else None
    for piece in layout.pieces(start, start + row.numel()):
        whole = (sources[piece.leaf](layer) if wholes is None else wholes[piece.leaf]).reshape(-1)
        row[piece.start : piece.stop].copy_(whole.narrow(0, piece.origin, piece.stop - piece.start))


def fill_group(
    shards: Tensor, entry: Entry, group: Group, ranks: Ranks, sources: Sequence[Source], together: bool = False
) -> None:
    """Writes this rank's shards, [L, n] or [n], of the units of `group` that this stage holds, from whole leaves; a
    pinned one holds all layers. together: as for `fill`, units of other stages too"""
    stacked = entry.stacked(group)
    rank = ranks.without(group.over).rank
    rows = dict(zip(group.here, shards.unbind() if stacked else (shards,), strict=False))

    # of a leaf that is split over axes, this rank's part
    def local(number: int, give: Source, layer: int | None) -> Tensor:
        if stacked:
            whole = give(layer)
        else:
            whole = whole_leaf(give, entry.length if group.has_layers else None)
        return group.local_slice(number, whole, ranks)

    local_sources = [partial(local, number, give) for number, give in enumerate(sources)]
    for index in range(len(group.units)) if together else group.here:
        layer = index if stacked else None
        if index in rows:
            fill(rows[index], group.layout, rank, local_sources, layer, together)
        else:
            for give in local_sources:
                give(layer)


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
    columns: list[Any] = [None] * node.entry.spec.num_leaves
    comms = node.owner.comms
    for _, group, leaf in node.check().group_leaves():
        # a leaf of another size would be gathered, but mix units up
        stacked = node.entry.stacked(group)
        n = group.shard_numel(comms)
        if leaf.ndim < 1 + stacked or leaf.shape[-1] != (n if stacked or group.held else 0):
            shape = f"[..., {len(group.held)}, {n}]" if stacked else f"[..., {n}]"
            raise ValueError(f"unshard: {group.name} has a leaf {shape_of(leaf)}, expected a local shard {shape}")
        # flat elements first: that is the axis that is gathered, and cut into leaves; then whatever is in front
        rows = [unit_shard(node, group, leaf, index) for index in range(len(group.units))]
        wholes = [whole_leaves(comms, group, row.movedim(-1, 0)) for row in rows]
        for position, parts in zip(group.leaves, zip(*wholes, strict=True), strict=True):
            columns[position] = _in_front(parts, leaf.ndim - (2 if stacked else 1), stacked)
    return optree.tree_unflatten(node.entry.spec, columns)


def whole_leaves(comms: Ranks, group: Group, row: Tensor) -> list[Tensor]:
    """Gathers the whole leaves of a unit from each rank's part [n], which may have trailing axes. With one rank they
    may be views of it. Collective."""
    row = row.contiguous()
    return group.leaves_of(row if comms.ranks == 1 else comms.all_gather(row), comms)


def unit_shard(handle: Sharded, group: Group, leaf: Tensor, index: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns this rank's part [..., n] of unit number `index` of a group, whichever stage holds it. All ranks must
    call it.

    dtype: the part is converted to it before it travels
    """
    comms = handle.owner.comms
    row = shard_at_home(handle, group, leaf, index).to(dtype=dtype)
    return row if group.stages is None else comms.from_stage(row, group.home(index))


def shard_at_home(handle: Sharded, group: Group, leaf: Tensor, index: int) -> Tensor:
    """Returns this rank's part [..., n] of unit number `index` of a group, or uninitialised memory of its size where
    another stage is the unit's home."""
    stacked = handle.entry.stacked(group)
    if group.home(index) != group.stage:
        row = leaf.new_empty(*leaf.shape[: -2 if stacked else -1], group.shard_numel(handle.owner.comms))
    else:
        row = leaf.select(-2, group.here.index(index)) if stacked else leaf
    return row.to(handle.owner.comms.device) if group.on_host else row


def _in_front(leaves: Sequence[Tensor], batch: int, stacked: bool) -> Tensor:
    """Combines the layers of a leaf, each [..., *batch], into one tensor [*batch, (L,) ...] of its own memory."""
    leaves = [leaf.movedim(tuple(range(leaf.ndim - batch, leaf.ndim)), tuple(range(batch))) for leaf in leaves]
    return torch.stack(leaves, batch) if stacked else leaves[0].clone(memory_format=torch.contiguous_format)


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
        fill_group(out[-1], node.entry, group, node.owner.comms, sources)
    return Sharded(tuple(out), node.context)
