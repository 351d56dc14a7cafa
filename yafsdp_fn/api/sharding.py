"""init, shard, unshard: make a sharded state, reshard one, and gather it.

    state = init(params, tx, mesh=mesh)            # from `Param`s, drawn
    state = shard(tensors, tx, mesh=mesh)          # from tensors, or lazy leaves
    other = shard(state, tx, mesh=other_mesh)      # from a state: resharded unit by unit
    tensors = unshard(state)

Nothing larger than one unit, or one leaf of a layer, is whole at a time.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn import optim
from yafsdp_fn.api.mesh import mesh as default_mesh
from yafsdp_fn.communication.communicators import Communicators, communicators
from yafsdp_fn.optim.in_format import block_of, decoded, encoded
from yafsdp_fn.params.layout import Group, TreeLayout
from yafsdp_fn.params.one_state import must_be_one
from yafsdp_fn.params.precision import DEFAULT_PRECISION, Precision, must_be_precision
from yafsdp_fn.params.sharded import (
    Sharded,
    handles,
    handles_and_leaves,
    is_sharded,
    trainable,
)
from yafsdp_fn.params.sources import Lazy, Source, fill_group, source, unit_leaves, whole_tree
from yafsdp_fn.params.tree import Param, Tree, dotted, named_leaves, no_leaf, shape_of
from yafsdp_fn.params.tree_layout import tree_layout
from yafsdp_fn.program.split import Assignment
from yafsdp_fn.runtime.consistency import environment
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.runtime.state import NoOptimizer, ShardedState, memory_of, must_be_laid_out, tensors_of
from yafsdp_fn.runtime.whole_layers import must_be_constants
from yafsdp_fn.util.bits import sum_of_bits
from yafsdp_fn.util.torch_private import memory_key

# ---- The verbs: a state from abstract parameters, from values, and back.


def init(
    params: Tree,
    tx: optim.GradientTransformation | None = None,
    *,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    precision: Precision = DEFAULT_PRECISION,
    stages: Assignment | None = None,
) -> ShardedState:
    """Makes a state from abstract parameters, drawn leaf by leaf: bit-identical at every world size.

    GPUs draw other values than CPUs do, from one seed: one thread of a CPU would take ten seconds for each billion of
    them. `ya.shard(ya.materialize(params, seed=0), tx, like=params)` has a CPU's on a GPU.

    params: a tree of `Param`; mesh: default `ya.mesh()`; tx: None for a state that is only evaluated
    seed: of the drawing, and of random numbers in steps; precision: the dtypes of the state
    stages: the stage of each unit, needed on a mesh with stages: `ya.schedules.assign` makes it from a trace of the
        loss

    >>> state = ya.init(params, ya.optim.adamw(1e-3), mesh=mesh, seed=0)
    >>> ya.unshard(state.params)["layers"]["up"].shape
    torch.Size([4, 32, 8])
    """
    for path, leaf in named_leaves(params):
        if isinstance(leaf, Tensor | Lazy):
            raise TypeError(f"init takes a tree of Param, got a {type(leaf).__name__}: to shard tensors use ya.shard")
        if not isinstance(leaf, Param):
            raise TypeError(no_leaf(path, leaf))
    return _from_leaves(params, tx, mesh, seed, precision, stages)


def shard(
    params: Tree | ShardedState,
    tx: optim.GradientTransformation | None = None,
    *,
    like: Tree | None = None,
    mesh: DeviceMesh | None = None,
    seed: int | None = None,
    precision: Precision | None = None,
    stages: Assignment | None = None,
    from_rank_0: bool = False,
) -> ShardedState:
    """Makes a state from tensors, the same on every rank, from `Lazy` leaves, loaded layer by layer, or from another
    state.

    params: a tree of tensors or `Lazy` leaves; or a state, or all of its params, which are resharded: mesh, seed and
        precision default to the old state's. A state keeps its step, and of its optimizer's state each part that `tx`
        has, too, wherever in its chain: clipping and schedules may come and go. Parts of one kind are told apart by
        their order
    tx: None for a state that is only evaluated, such as a teacher
    like: a marked tree of `Param`s, such as `llama.params(config)`, that says how leaves are grouped and split: for a
        state it regroups them; tensors and `Lazy` leaves need none if they are marked and nothing is split
    stages: as for `init`; defaults to the state's own, with unchanged units
    from_rank_0: rank 0's values are taken, and sent to all: others need no values of their own, only shapes and dtypes

    Raises ValueError, naming the leaf, if `like` has a leaf that the state lacks, or lacks one, or has another shape;
    RanksDisagree, naming leaf and ranks, if values in memory (tensors, the parameters of a module) differ between
    ranks, for which all of them are read once. `Lazy` leaves from elsewhere are not compared. Warns of parts of an
    optimizer that begin anew, since there were more or fewer of their kind, or none of a leaf that was frozen:
    its moments are zeros beside a count of steps that goes on.

    >>> state = ya.shard(plain, tx, like=params, mesh=mesh)
    >>> torch.equal(ya.unshard(state.params)["head"]["out"], plain["head"]["out"])
    True
    """
    if like is not None and handles(like):
        raise TypeError(
            "shard(like=...): its leaves are shards of a state; expected a marked tree of ya.Param, or of whole "
            "tensors: ya.unshard(state.params), say, with ya.frozen around a part"
        )
    state = params if isinstance(params, ShardedState) else None
    tree: Tree = state.check().params if state is not None else params
    found = handles(tree)
    if not found:
        return _from_leaves(tree, tx, mesh, seed or 0, precision or DEFAULT_PRECISION, stages, like, from_rank_0)
    if from_rank_0:
        raise ValueError("shard(from_rank_0=True): of a state every rank has a part of its own")
    old = memory_of(found)
    if len(found) != len(old.layout.entries) or len(found) != len(optree.tree_leaves(tree, is_leaf=is_sharded)):
        raise TypeError(
            f"shard: {found[0].entry.name!r} is of a state, but not all of the tree is, or it is not all of the "
            "state's params; pass the state, all of its params, or whole tensors (ya.unshard)"
        )
    must_be_laid_out(tree, old.layout)
    must_be_one("shard", found)
    layout = old.layout if like is None else tree_layout(like)[0]
    mesh = old.mesh if mesh is None else mesh
    seed = found[0].origin.seed if seed is None else seed
    whole = _Whole(found)
    if left := sorted(whole.names.difference(*(group.layout.names for group in layout.groups))):
        raise ValueError(
            f"shard: the state has {', '.join(left[:4])}{' and others' * (len(left) > 4)}, `like` has not: they would "
            "be lost. Adapters are added to their weights by ya.merge_lora"
        )

    stages = old.assignment if stages is None and like is None else stages
    how = mesh, seed, precision or old.precision, stages
    new = _made(layout, whole.sources, tx, *how, step=0 if state is None else state.step, together=True)
    if state is not None:
        _copy_states(state.opt_state, new.opt_state)
    return new


# ---- A state from sources of its leaves: parameters, and the optimizer before its first step.


def _leaves_of(group: Group) -> list[tuple[str, tuple[int, ...]]]:
    """Returns path and shape of the leaves of one layer."""
    return list(zip(group.layout.names, group.layer_shapes, strict=True))


def _from_leaves(
    params: Tree,
    tx: optim.GradientTransformation | None,
    mesh: DeviceMesh | None,
    seed: int,
    precision: Precision,
    stages: Assignment | None,
    like: Tree | None = None,
    from_rank_0: bool = False,
) -> ShardedState:
    mesh = default_mesh() if mesh is None else mesh
    given = list(named_leaves(trainable(params)))
    trained = {getattr(leaf, "requires_grad", None): path for path, leaf in given}
    if like is None and {True, False} <= trained.keys():
        warnings.warn(
            f"shard: {trained[False]} does not require grad, but is trained as others are, which do; mark what is to "
            "stay as it is, ya.frozen(tree), or call requires_grad_() on all",
            stacklevel=3,
        )
    wide = [path for path, leaf in given if getattr(leaf, "dtype", None) == torch.float64]
    if wide and precision is DEFAULT_PRECISION:
        warnings.warn(
            f"{wide[0]} is float64, and is trained in float32, the default. Give precision=ya.Precision(torch.float64) "
            "to train in float64, or ya.Precision() if float32 is meant",
            stacklevel=3,
        )
    layout, leaves = tree_layout(params if like is None else _in_place_of(like, params))
    comms = communicators(mesh)
    leaf_of: dict[str, Any] = {}
    for entry, own in zip(layout.entries, leaves, strict=True):
        for group in entry.groups:
            for name, position in zip(group.layout.names, group.leaves, strict=True):
                leaf_of[name] = own[position]

    def sources(group: Group) -> list[Source]:
        found = []
        for name in group.layout.names:
            give = source(name, leaf_of[name], seed, comms.device)
            found.append(_of_rank_0(leaf_of[name], give, comms) if from_rank_0 else give)
        return found

    def compare() -> None:
        values = {}
        for group in layout.groups:
            for name in group.layout.names:
                bits = "" if from_rank_0 else _bits(leaf_of[name], group.length)
                values[name] = f"{leaf_of[name].dtype}{bits}"
        # no rank sends its buffers to the others, with from_rank_0 neither
        beside = {name: one for leaf in leaf_of.values() if isinstance(leaf, Lazy) for name, one in leaf.beside.items()}
        for name, buffer in beside.items():
            values[f"{name} (no parameter: each rank computes with its own)"] = f"{buffer.dtype}{_bits(buffer, None)}"
        comms.must_agree(SAME_VALUES, values)

    state = _made(layout, sources, tx, mesh, seed, precision, stages, together=from_rank_0, compare=compare)
    # all leaves are dense by now, and have memory
    places: dict[Any, str] = {}
    for path, leaf in given:
        first = places.setdefault(leaf.data_ptr() or path, path) if isinstance(leaf, Tensor) else path
        if first != path:
            warnings.warn(
                f"shard: {first} and {path} are one tensor, and are trained as two, each by its own gradient. If they "
                "are tied, give one leaf, which the loss uses twice; if two are meant, a copy (x.clone())",
                stacklevel=3,
            )
    return state


SAME_VALUES = (
    "the values to shard, of which each rank keeps a part (make them under one seed on all ranks, or read one file; "
    "ya.shard(..., from_rank_0=True) takes those of rank 0)"
)


# ---- Values of rank 0, which others must not differ from.


def _bits(leaf: Any, length: int | None) -> str:
    """Describes all values of a leaf that is in memory."""
    values: list[Tensor] = []
    if isinstance(leaf, Tensor):
        values = [leaf.detach()]
    elif isinstance(leaf, Lazy) and leaf.in_memory:
        values = [leaf.load(layer) for layer in ([None] if length is None else range(length))]
    # others are refused when they are read
    sums = [int(sum_of_bits(value)) for value in values if not value.is_meta and value.layout == torch.strided]
    return f", sum of bits {sum(sums)}" if sums else ""


def _of_rank_0(leaf: Any, give: Source, comms: Communicators) -> Source:
    """Returns a source that all ranks call, in one order."""

    def sent(layer: int | None) -> Tensor:
        shape = leaf.shape if layer is None else leaf.shape[1:]
        if comms.world_rank == 0:
            value = give(layer).to(comms.device, leaf.dtype).contiguous()
        else:
            value = torch.empty(shape, dtype=leaf.dtype, device=comms.device)
        return comms.of_rank_0(value)

    return sent


def _in_place_of(like: Tree, params: Tree) -> Tree:
    """Returns `like` with the leaves of `params`, as `Lazy` ones that are split as those of `like` are."""
    given = dict(named_leaves(params))

    def lazy(accessor: optree.PyTreeAccessor, leaf: Any) -> Lazy:
        path = dotted(accessor)
        own = given.pop(path, None)
        shape = tuple(leaf.shape)
        if own is None or tuple(own.shape) != shape:
            raise ValueError(f"shard(like=...): {path} should be of shape {shape}, got {shape_of(own)}")
        give = source(path, own, 0, torch.device("cpu"))
        in_memory = isinstance(own, Tensor) or (isinstance(own, Lazy) and own.in_memory)
        return Lazy.in_place_of(leaf, own.dtype, give, in_memory=in_memory)

    out = optree.tree_map_with_accessor(lazy, like)
    if given:
        raise ValueError(f"shard(like=...): `like` has no {', '.join(sorted(given)[:4])}: they would be lost")
    return out


Sources = Callable[[Group], list[Source]]
"""Returns the sources of a group's leaves."""


@torch.inference_mode(False)  # memory that is made under it could never be trained
def _made(
    layout: TreeLayout,
    sources: Sources,
    tx: optim.GradientTransformation | None,
    mesh: DeviceMesh,
    seed: int,
    precision: Precision,
    stages: Assignment | None,
    *,
    step: int = 0,
    together: bool,
    compare: Callable[[], None] | None = None,
) -> ShardedState:
    """Allocates memory for `layout` on `mesh` and fills it from `sources`; returns a state over it, with its optimizer
    before the first step. together: as for `fill_group`; compare: is called once shapes are known to agree"""
    must_be_precision(precision)
    if not hasattr(seed, "__index__") or int(seed).bit_length() > 63:
        raise TypeError(f"seed={seed!r}: expected an integer, the same on every rank, of at most 64 bits")
    seed = int(seed)  # checkpoints cannot hold NumPy's
    layout = layout.aligned(block_of(tx))
    comms = communicators(mesh)
    described = {**environment(), "seed": str(seed), "precision": str(precision), "stages": str(stages)}
    for group in layout.groups:
        dtypes = f"gathered in {group.dtype}, reduced in {group.reduce} (None: as Precision says)"
        how = f"split {group.splits}, {dtypes}, on the wire {group.wire}, cut at multiples of {group.layout.align}"
        described |= {name: f"{len(group.units)} x {shape}, {how}" for name, shape in _leaves_of(group)}
    comms.must_agree("the parameters", described)
    if compare is not None and not comms.alone:
        compare()

    def masters(placement: Placement[Communicators]) -> list[Tensor]:
        made = placement.shards(comms.device)
        for master, group in zip(made, placement.layout.groups, strict=True):
            fill_group(master, group, comms, sources(group), together)
        return made

    memory = StateMemory(layout, masters, mesh, precision, stages)
    params = memory.params(seed, step)
    opt_state: Tree = NoOptimizer() if tx is None else optim.as_transformation(tx).init(trainable(params))
    # all is written in place: what begins as the parameters, as another moment, or as a number from outside is a copy
    held = set(map(memory_key, memory.masters()))

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shared = memory_key(leaf) in held or not leaf.ndim
        held.add(memory_key(leaf))
        return leaf.clone() if shared else leaf

    opt_state = optree.tree_map(own, opt_state)
    if tx is not None and memory.trained and precision.lost is not None:
        warnings.warn(precision.lost, stacklevel=5)
    memory.moments = tensors_of(opt_state)
    return ShardedState(params, opt_state, step, seed, memory)


# ---- A state from another one: on another mesh, layout or optimizer. Leaves are gathered one unit at a time.


class _Whole:
    """The leaves of a sharded tree, whole. Units are gathered on demand, by all ranks in one order."""

    def __init__(self, found: Sequence[Sharded]) -> None:
        self._at = {
            name: (handle, group, leaf, position)
            for handle in found
            for _, group, leaf in handle.group_leaves()
            for position, name in enumerate(group.layout.names)
        }
        self.names = set(self._at)
        self._last: tuple[Any, list[Tensor]] = (None, [])

    def sources(self, group: Group) -> list[Source]:
        """Returns the sources of the leaves that `group` has, elsewhere."""
        return [self._source(name, shape) for name, shape in _leaves_of(group)]

    def _source(self, name: str, shape: tuple[int, ...]) -> Source:
        if name not in self._at:
            raise ValueError(f"{name}: the state has no such leaf; it has {', '.join(sorted(self._at)[:6])} and so on")
        handle, group, shards, position = self._at[name]
        own = group.layer_shapes[position]
        if own != shape:
            raise ValueError(f"{name}: the state has shape {own} (of a layer, if stacked), the tree {shape}")

        def give(layer: int | None) -> Tensor:
            at = layer or 0
            key = id(shards), group.unit(at)
            if self._last[0] != key:
                self._last = key, unit_leaves(handle, group, shards, 0 if group.pinned else at)
            return group.of_layer(self._last[1], at)[position]

        return give


# ---- The optimizer state that goes along.


def _copy_states(old: Tree, new: Tree) -> None:
    """Copies to the optimizer state `new` everything that `old` has in the same part."""
    there = _by_part(old)
    unclear = set[str]()
    for part, nodes in _by_part(new).items():
        kept = there.get(part, [])
        if len(kept) == len(nodes):
            for before, node in zip(kept, nodes, strict=True):
                _copy(before, node)
                late = _leaves(node) - _leaves(before)
                unclear |= {f"{part[0][0].__name__} of {leaf}" for leaf in late}
        elif kept:
            unclear.add(part[0][0].__name__)
    if unclear:
        warnings.warn(
            f"shard: the optimizer has more or fewer parts of a kind than the state's, so that they begin anew: "
            f"{', '.join(sorted(unclear))}",
            stacklevel=3,
        )


def _by_part(opt_state: Tree) -> dict[tuple[Any, ...], list[Any]]:
    """Returns handles and tensors by their part: their path without places in chains, and transformations around."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for accessor, node in handles_and_leaves(opt_state):
        path = [(entry.type, entry.entry) for entry in accessor if not _is_around(entry)]
        found.setdefault(tuple(path), []).append(node)
    return found


def _is_around(entry: optree.PyTreeEntry) -> bool:
    """Returns whether a step of a path is a place in a chain, or the state inside one that is around it."""
    return entry.type is tuple or getattr(entry, "field", "") == "inner_state"


def _copy(before: Any, node: Any) -> None:
    """Copies one node of an optimizer's state into the new state's node, if the two hold the same. Between formats, or
    blocks of other leaves, it is decoded and encoded again."""
    if isinstance(before, Sharded) and isinstance(node, Sharded):
        forms = _forms(node)
        if _forms(before) != forms:
            wide = decoded(None, node)
            _copy(decoded(None, before), wide)
            if forms:
                for leaf, new in zip(node.leaves, encoded(forms[0][0], wide).leaves, strict=True):
                    leaf.copy_(new)
            return
        whole = _Whole([before])
        for _, group, leaf in node.group_leaves():
            if whole.names.issuperset(group.layout.names):
                fill_group(leaf, group, node.owner.comms, whole.sources(group), together=True)
    elif isinstance(node, Tensor) and isinstance(before, Tensor) and node.shape == before.shape:
        node.copy_(before)


def _leaves(node: Any) -> set[str]:
    """Returns the leaves of which a node of an optimizer's state has something."""
    groups = [group for _, group, _ in node.group_leaves()] if isinstance(node, Sharded) else []
    return {leaf for group in groups for leaf in group.layout.names}


def _forms(handle: Sharded) -> list[Any]:
    """Returns what the bytes of a handle depend on: formats and leaves of the groups that are in formats."""
    return [(of.encodes.format, of.layout.names, of.layer_shapes) for of in handle.groups if of.encodes is not None]


# ---- Back to whole tensors.


def unshard(tree: Any) -> Tree:
    """Returns whole tensors of a state's params, or any sharded tree, on every rank: [L, ...] for a stack. All must
    call it. They are constants: in a loss, call it under torch.no_grad().

    Leaves may have more leading axes, as per-example gradients have.

    >>> whole = ya.unshard(state.params)
    >>> {name: tuple(leaf.shape) for name, leaf in whole["layers"].items()}
    {'up': (4, 32, 8), 'down': (4, 8, 32)}
    """
    tree = tree.params if isinstance(tree, ShardedState) else tree
    found = handles(tree)
    must_be_constants("unshard", found)
    must_be_one("unshard", found)
    with torch.no_grad():
        return whole_tree(tree)
