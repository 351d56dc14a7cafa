"""Optimizer states in formats: moments of 8 bits, by blocks.

    moments -> decode -> update -> encode -> moments

On a plain tree each leaf is encoded as one flat vector, in a stack each layer of it; shards are cut between blocks, so
that a state has the same bytes on any number of ranks.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication import formats
from yafsdp_fn.communication.formats import Format, checked_format
from yafsdp_fn.optim.base import (
    Around,
    Chain,
    GradientTransformation,
    State,
    as_transformation,
    chain,
    checked_update,
    name,
)
from yafsdp_fn.optim.partition import Decay, Masked, Partition
from yafsdp_fn.optim.scaling import ClipByGlobalNorm, Scale
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Pinned, Tree, in_stack

# ---- The transformation.


class InFormatState(NamedTuple):
    """The state of `in_format`. inner_state: of the transformation inside; trees like the parameters are bytes"""

    inner_state: State


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFormat(Around):
    """Rule: `inner`, whose state is kept in a format."""

    format: Format


def in_format(tx: Any, format: Format) -> GradientTransformation:
    """Keeps what `tx` remembers of each parameter in a format, such as Adam's moments in 8 bits: in each update it is
    decoded, and what comes out is encoded.

    tx: an elementwise optimizer, or a chain of such: clipping and rates stay as they are. Transformations around
        others, and partitions, take it inside: `partition({"8 bit": in_format(adamw(1e-3), format), ...}, labels)`
    format: such as `ya.formats.Scaled(torch.int8, block=256, root=4)`. Without a root it would round small second
        moments to zero, by whose roots first moments are divided

    It takes the memory of one unit's state beside it, since units are updated one after the other. `ya.init` and
    `ya.shard` cut shards between blocks, so the optimizer must be given to them. Raises TypeError for a `tx` that needs
    whole leaves, and ValueError for a format that makes something of nothing.

    >>> light = ya.optim.in_format(ya.optim.adamw(1e-3), ya.formats.Scaled(torch.int8, block=64, root=4))
    >>> state = ya.init(params, light, mesh=mesh)
    >>> state.opt_state[0].inner_state.mu["layers"].leaves[0].dtype
    torch.uint8
    >>> state, metrics = ya.train_step(loss_fn, light)(state, batch)
    >>> state.step
    1
    """
    checked_format("in_format", format)
    if format.decode(torch.zeros(1, format.block_bytes, dtype=torch.uint8), torch.float32).any():
        raise ValueError(
            f"in_format: {format.name} decodes bytes that are zero to other numbers: what is empty is such"
        )
    tx = as_transformation(tx)
    if isinstance(tx.rule, Chain):
        return chain(*(in_format(part, format) for part in tx.rule.parts))
    if isinstance(tx.rule, Decay | Scale | ClipByGlobalNorm):  # they remember nothing of a parameter
        return tx
    if not tx.elementwise or isinstance(tx.rule, Around | Masked | Partition):
        raise TypeError(
            f"in_format: {name(tx)} is around others, or works on whole leaves; it takes elementwise optimizers and "
            "chains of them: put it inside, around the parts whose moments it is for"
        )

    def init(params: Tree) -> State:
        return InFormatState(_of_leaves(_encoded, format, tx.init(params), params))

    def update(updates: Tree, state: InFormatState, params: Tree | None = None) -> tuple[Tree, State]:
        wide = _of_leaves(_decoded, format, state.inner_state, updates)
        new, after = checked_update(tx, updates, wide, params)
        return new, InFormatState(_of_leaves(_encoded, format, after, updates))

    return GradientTransformation(init, update, elementwise=True, rule=InFormat(tx, format=format))


def block_of(tx: Any) -> int:
    """Returns the number of elements at whose multiples an optimizer wants shards to be cut."""
    rule = None if tx is None else as_transformation(tx).rule
    parts: list[Any] = []
    if isinstance(rule, InFormat):
        return rule.format.block
    if isinstance(rule, Chain):
        parts = list(rule.parts)
    elif isinstance(rule, Partition):
        parts = [part for part, _ in rule.parts.values()]
    elif isinstance(rule, Around | Masked):
        parts = [rule.inner]
    return math.lcm(*map(block_of, parts))


# ---- The trees of a state that are like the parameters.

Work = Callable[[Format, Any, Any, bool], Any]
"""`(format, leaf or handle of a state, that of the parameters, whether each layer is encoded by itself)` -> its new
value."""


def _of_leaves(work: Work, format: Format, state: State, like: Tree) -> State:
    """Returns `state` with `work` of each leaf and handle of the trees in it that are like `like`."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(like, is_leaf=is_sharded)
    by_layer = [in_stack(at) and not any(issubclass(entry.type, Pinned) for entry in at) for at in accessors]

    def is_like(node: Any) -> bool:
        return optree.tree_structure(node, is_leaf=is_sharded) == spec

    def of_tree(node: Any) -> Any:
        if not is_like(node):
            return node
        kept = optree.tree_leaves(node, is_leaf=is_sharded)
        new = [work(format, *of_leaf) for of_leaf in zip(kept, leaves, by_layer, strict=True)]
        return optree.tree_unflatten(spec, new)

    return optree.tree_map(of_tree, state, is_leaf=is_like)


def _encoded(format: Format, kept: Any, like: Any, by_layer: bool) -> Any:
    pairs = list(zip(kept.leaves, like.leaves, strict=True)) if isinstance(like, Sharded) else [(kept, like)]
    if not all(own.is_floating_point() and own.shape == leaf.shape for own, leaf in pairs):
        return kept  # a count, say
    for own, leaf in pairs:
        if own.dtype != leaf.dtype:
            raise TypeError(
                f"in_format: the state has moments in {own.dtype}, parameters are {leaf.dtype}; leave out what makes "
                "them so (mu_dtype, accumulator_dtype): they are encoded from the parameters' dtype"
            )
    if isinstance(like, Sharded):
        return encoded(kept, format)
    rows = kept.reshape(len(kept) if by_layer else 1, -1)
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % format.block)).view(-1, format.block)
    found = format.encode(blocks).view(len(rows), -1)
    return found if by_layer else found[0]


def _decoded(format: Format, kept: Any, like: Any, by_layer: bool) -> Any:
    if isinstance(like, Sharded):
        found = formats_of(kept)
        if not found:
            return kept
        _must_be(format, found == {format})
        return decoded(kept, like.leaves[0].dtype)
    if kept.dtype != torch.uint8:
        return kept
    layers = len(like) if by_layer else 1
    blocks = -(-like.numel() // layers // format.block)
    _must_be(format, kept.numel() == layers * blocks * format.block_bytes)
    wide = format.decode(kept.reshape(-1, format.block_bytes), like.dtype).view(layers, -1)
    return wide[:, : like.numel() // layers].reshape(like.shape)


def _must_be(format: Format, is_so: bool) -> None:
    if not is_so:
        raise TypeError(
            f"in_format: the state is in another format than this optimizer's, {format.name}: give the step the "
            "optimizer that ya.init was given, or take ya.shard(state, tx), a state for this one"
        )


# ---- Handles.


def formats_of(handle: Sharded) -> set[Format]:
    """Returns the formats of a handle's groups."""
    return {group.encodes.format for _, group, _ in handle.group_leaves() if group.encodes is not None}


def encoded(handle: Sharded, format: Format) -> Sharded:
    """Returns a handle on the bytes of the leaves of `handle`."""
    groups = list(handle.entry.groups)
    leaves = []
    for number, group, leaf in handle.group_leaves():
        groups[number - handle.context.first_group] = group.encoded(format)
        out = leaf.new_empty(*leaf.shape[:-1], format.nbytes(leaf.shape[-1]), dtype=torch.uint8)
        if leaf.device.type != "meta":
            formats.encode(format, leaf.contiguous(), out)
        leaves.append(out)
    return _on(handle, groups, leaves)


def decoded(handle: Sharded, dtype: torch.dtype) -> Sharded:
    """Returns a handle on the leaves that those of `handle` are the bytes of; on its own ones, where they are none."""
    groups = list(handle.entry.groups)
    leaves = []
    for number, group, leaf in handle.group_leaves():
        if group.encodes is None:
            leaves.append(leaf)
            continue
        format, groups[number - handle.context.first_group] = group.encodes
        numel = leaf.shape[-1] // format.block_bytes * format.block
        leaves.append(leaf.new_empty(*leaf.shape[:-1], numel, dtype=dtype))
        formats.decode(format, leaf, leaves[-1])
    return _on(handle, groups, leaves)


def _on(handle: Sharded, groups: list[Any], leaves: list[Tensor]) -> Sharded:
    entry = dataclasses.replace(handle.entry, groups=tuple(groups))
    return Sharded(tuple(leaves), dataclasses.replace(handle.context, entry=entry, runner=None))
