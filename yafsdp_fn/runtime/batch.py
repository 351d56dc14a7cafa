"""Cuts batches along their first axis, into the parts of ranks and into microbatches; and looks at what losses get."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.communication.groups import MeshRanks, device_of
from yafsdp_fn.communication.micro_shards import micro_shards_of
from yafsdp_fn.communication.ranks import Axis
from yafsdp_fn.params.sharded import handles_and_leaves, is_sharded
from yafsdp_fn.params.tree import Tree, dotted, named_leaves, tensors_in
from yafsdp_fn.runtime.consistency import OF_A_RANK, digest
from yafsdp_fn.runtime.graph_walks import sample
from yafsdp_fn.util.mesh_axes import check_inside

# ---- This rank's part of a global batch.


def shard_batch(batch: Tree, mesh: DeviceMesh, *, split: Mapping[str, int] | None = None, zigzag: bool = False) -> Tree:
    """Returns this rank's part of a global batch, on the mesh's device. Every tensor leaf [B, ...] is cut along its
    first axis into equal parts, one per rank of the mesh, replicas included; with stages, one per rank of a stage, the
    same in all stages. NumPy's arrays become tensors. Raises ValueError, naming the leaf, if B is not a multiple of
    their number. Python's numbers and strings, and tuples of them, stay whole; a list of them is refused.

    Only this rank's rows are copied, and nothing that is on the device already (meta tensors stay as they are). The
    host does not wait for the copy of pinned memory: leave it unchanged until the step that reads the batch has ended.

    A deterministic mesh of R ranks cuts into its micro-shards; this rank gets every R-th.

    Of axes inside blocks, rows are split over `expert` alone: ranks that differ on others get the same rows.
    split: axes that cut a further dimension of every leaf that has it: `{"context": 1}` gives each rank of `context`
        its part of the sequences [B, S]. zigzag: rank k of K gets parts k and 2 K - 1 - k of 2 K, so that causal
        attention is as much work on each

    >>> {name: tuple(rows.shape) for name, rows in ya.shard_batch(batch, mesh).items()}
    {'tokens': (4, 8), 'targets': (4, 8)}
    """
    check_inside(dict.fromkeys(split or {}, 1))  # a misspelt axis would be taken for one that this mesh does not have
    mesh_ranks, micro_shards, device = MeshRanks(mesh), micro_shards_of(mesh), device_of(mesh)
    for path, leaf in named_leaves(batch):
        _refuse_without_rows(leaf, f"shard_batch: {path or 'the batch'}")
    batch = optree.tree_map(_whole_rows, batch, is_leaf=is_sharded)
    _must_have_the_same_rows(batch)
    # not of a GPU's memory, for which the host would wait
    whole = digest(sample([leaf for leaf in tensors_in(batch) if leaf.device.type == "cpu"]))
    # rows
    rank = mesh_ranks.batch_rank
    ranks = mesh_ranks.batch_ranks
    parts, unit = (ranks, "ranks") if micro_shards is None else (micro_shards, "micro-shards")
    part = split_batch(batch, parts, "shard_batch", unit)
    mine, *more = [part(number) for number in range(rank, parts, ranks)]
    if more:
        joined = lambda *pieces: torch.cat(pieces) if is_cut(pieces[0]) else pieces[0]  # noqa: E731
        mine = optree.tree_map(joined, mine, *more, is_leaf=is_sharded)
    # further dimensions
    for name, dim in (split or {}).items():
        if dim < 1:
            raise ValueError(f"shard_batch(split={split}): rows, dimension 0, are split already; expected 1 or more")
        if (axis := mesh_ranks.axes.get(name)) is not None and axis.size > 1:
            mine = _split_along(mine, name, dim, axis, zigzag)
            setattr(mesh, BATCH_AXES, batch_axes(mesh) | {name})
    return optree.tree_map(lambda leaf: _moved(leaf, device, whole), mine, is_leaf=is_sharded)


BATCH_AXES = "_yafsdp_batch_axes"  # attribute of a mesh


def batch_axes(mesh: DeviceMesh) -> frozenset[str]:
    """Returns the axes inside blocks that batches have been cut along, beside their rows."""
    found: frozenset[str] = getattr(mesh, BATCH_AXES, frozenset())
    return found


def _split_along(batch: Tree, name: str, dim: int, axis: Axis, zigzag: bool) -> Tree:
    """Returns this rank's part of every tensor leaf of `batch` that has dimension `dim`."""
    # zigzag: an early part and a late one, of which causal attention makes as much work on each rank
    own = (axis.rank, 2 * axis.size - 1 - axis.rank) if zigzag else (axis.rank,)
    parts = axis.size * len(own)

    def cut(accessor: optree.PyTreeAccessor, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim <= dim:
            return leaf
        if leaf.shape[dim] % parts:
            raise ValueError(
                f"shard_batch: {dotted(accessor) or 'the batch'} is {leaf.shape[dim]} long in dimension {dim}, not a "
                f"multiple of {parts}, for {axis.size} ranks of {name}"
            )
        pieces = leaf.tensor_split(parts, dim)
        return torch.cat([pieces[k] for k in own], dim) if zigzag else pieces[own[0]]

    return optree.tree_map_with_accessor(cut, batch, is_leaf=is_sharded)


def _whole_rows(leaf: Any) -> Any:
    """Returns a leaf of a global batch as a tensor of its own."""
    if isinstance(leaf, np.ndarray):
        return torch.as_tensor(leaf, device="cpu")
    if not is_cut(leaf):
        return leaf
    if hasattr(leaf, OF_A_RANK):
        raise ValueError("shard_batch: these are a rank's own rows already, as shard_batch returned them")
    return leaf.view_as(leaf)


def _must_have_the_same_rows(batch: Tree) -> None:
    rows = {leaf.shape[0]: path for path, leaf in named_leaves(batch) if is_cut(leaf)}
    if len(rows) > 1:
        found = ", ".join(f"{path} has {count}" for count, path in rows.items())
        raise ValueError(
            f"shard_batch: rows differ: {found}. Shard batches of different sizes one by one; what every rank needs "
            "whole, such as weights of classes, goes into the loss by its closure"
        )


def _moved(leaf: Any, device: torch.device, whole: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.device != device and not leaf.is_meta:
        leaf = leaf.to(device, non_blocking=leaf.is_pinned())
    if is_cut(leaf):
        setattr(leaf, OF_A_RANK, whole)
    return leaf


# ---- Pieces of a batch.


def split_batch(
    batch: Tree, count: int, what: str, unit: str, name: Callable[[optree.PyTreeAccessor], str] = dotted
) -> Callable[[int], Tree]:
    """Returns a function from a part's number to that part of `batch`.

    Leaves that are not tensors, or 0-dim, and sharded parameters stay whole; other containers of rows (`_has_rows`) are
    refused. `name`: names a leaf in errors
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(batch, is_leaf=lambda n: is_sharded(n) or _is_list(n))
    for accessor, leaf in zip(accessors, leaves, strict=True):
        shown = name(accessor) or "the batch"
        _refuse_without_rows(leaf, f"{what}: {shown}")
        if _has_rows(leaf):
            is_what = f"list of {len(leaf)}" if _is_list(leaf) else type(leaf).__name__
            if isinstance(leaf, np.ndarray):
                is_what = f"NumPy array of shape {leaf.shape}"
            raise TypeError(
                f"{what}: {shown} is a {is_what}, of which every one would get all rows; give a tensor, whose rows are "
                "split, or a dict of them (dict(batch)), or a tuple, which stays whole"
            )
        if is_cut(leaf) and leaf.shape[0] % count:
            raise ValueError(
                f"{what}: {shown} has {leaf.shape[0]} rows, not a multiple of {count} {unit}; leave such a batch out "
                "(drop_last=True), or fill it up with rows that do not count"
            )

    def cut(leaf: Any, index: int) -> Any:
        if count == 1 or not is_cut(leaf):
            return leaf
        rows = leaf.shape[0] // count
        return leaf.narrow(0, index * rows, rows)

    return lambda index: optree.tree_map(lambda leaf: cut(leaf, index), batch, is_leaf=is_sharded)


def _has_rows(leaf: Any) -> bool:
    """Returns whether `leaf` is a container of rows, presumably, that is not cut: a list of values, an array, a mapping
    such as transformers' BatchEncoding, a generator, or an object with tensors."""
    if dataclasses.is_dataclass(leaf):
        inside: Any = vars(leaf)
        return any(is_cut(value) or _has_rows(value) for value in optree.tree_leaves(inside))
    known = is_sharded(leaf) or callable(leaf) or isinstance(leaf, Tensor | Iterable)
    if hasattr(leaf, "__dict__") and not known:
        attributes: Any = vars(leaf)  # not those of its attributes: objects may hold each other
        return any(is_cut(value) for value in optree.tree_leaves(attributes))
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    one = isinstance(leaf, str | bytes | tuple | list | set | frozenset | Tensor)
    return _is_list(leaf) or (isinstance(leaf, Iterable) and not one)


def _is_list(node: Any) -> bool:
    """Returns whether `node` is a list of Python's values, or of dicts: one for each row, presumably."""
    if type(node) is not list or not node:
        return False
    return isinstance(node[0], int | float | complex | str | bytes | dict) or _is_list(node[0])


def is_cut(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _refuse_without_rows(leaf: Any, name: str) -> None:
    """Raises TypeError for a tensor of which no rows can be cut."""
    if isinstance(leaf, Tensor):
        _refuse_nested(leaf, name)
        if leaf.layout != torch.strided:
            raise TypeError(f"{name} is a sparse tensor: give it dense (x.to_dense())")


def _refuse_nested(leaf: Tensor, name: str) -> None:
    """Raises TypeError for a nested tensor."""
    if leaf.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, whose rows neither ranks nor microbatches can share, nor copies keep: give "
            "rows of one length with a mask (x.to_padded_tensor(0.0)), or their values and offsets (x.values(), "
            "x.offsets())"
        )


# ---- The arguments of a loss that are not differentiated, batches above all: their names, and what is wrong with them.


def argument_name(accessor: optree.PyTreeAccessor) -> str:
    """Returns the name that errors use for a leaf of `(positional, keyword)` arguments."""
    path = dotted(accessor[2:])
    return f"{path + ' of ' if path else ''}argument {accessor[1].entry}"


def check_arguments(rest: Any) -> None:
    """Raises TypeError for a tensor that nothing can be learnt from, and for what a call uses up: asked before the
    first one, and where a step looks."""
    for accessor, leaf in handles_and_leaves(rest):
        if isinstance(leaf, Iterator):
            raise TypeError(
                f"{argument_name(accessor)} is a {type(leaf).__name__}, of which each call of the loss takes more, "
                "and there are more calls than steps: give what it yields, step(state, next(batches))"
            )
        if not isinstance(leaf, Tensor):
            continue
        name = argument_name(accessor)
        if leaf.is_meta or leaf.is_inference():
            raise TypeError(
                f"{name} was made on the meta device, where it has no values, or under "
                "torch.inference_mode, where no gradient passes it"
            )
        _refuse_nested(leaf, name)
        if leaf.requires_grad:
            raise TypeError(
                f"{name} requires a gradient, and a step has gradients of the state's params alone: {name} would "
                "get none. Detach it (x.detach()); what is to be trained goes into the state, and ya.grad with "
                "argnums= differentiates by other arguments, too"
            )


def note_missing_rows(error: Exception, rest: Any) -> None:
    """Adds to an error which arguments have no rows: most modules cannot do without, and torch names no argument."""
    found = handles_and_leaves(rest)
    if empty := [argument_name(accessor) for accessor, leaf in found if is_cut(leaf) and not len(leaf)]:
        error.add_note(
            f"{' and '.join(empty)}: no rows on this rank, in this microbatch. Does the loss take that? If not, give "
            "each rank and microbatch some, with targets or weights that do not count"
        )
