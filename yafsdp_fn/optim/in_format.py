"""Optimizer states in formats: moments in 8 bits, by blocks.

    moments -> decode -> update -> encode -> moments

Shards hold the bytes of blocks, which begin with a leaf, in a stack with each layer of it, and are cut between them: a
state is the same on any number of ranks. On a plain tree, the definition, moments have passed through the format.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication import formats
from yafsdp_fn.communication.formats import WHOLE, Format, check_format, passed
from yafsdp_fn.optim.base import (
    Around,
    Chain,
    GradientTransformation,
    State,
    as_transformation,
    chain,
    checked_update,
    name,
    new_count,
)
from yafsdp_fn.optim.partition import Decay, Partition
from yafsdp_fn.optim.scaling import ClipByGlobalNorm, Scale
from yafsdp_fn.params.layout import Encodes, FlatLayout, Group, check_blocks, cut_of
from yafsdp_fn.params.markers import Pinned
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Tree, in_stack
from yafsdp_fn.util.mesh_axes import round_up

# ---- The transformation.


class InFormatState(NamedTuple):
    """The state of `in_format`. inner_state: of the transformation inside; what it keeps of parameters is encoded

    updates: int32 [], how many there were, if the format rounds stochastically; else None
    """

    inner_state: State
    updates: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFormat(Around):
    """Rule: `inner`, whose state is in a format."""

    format: Format


def in_format(tx: Any, format: Format) -> GradientTransformation:
    """Keeps what `tx` remembers of parameters in a format, such as Adam's moments in 8 bits: in each update it is
    decoded, and what comes out is encoded. It takes the memory of one unit's moments beside it: units are updated one
    after the other.

    tx: an elementwise optimizer, or a chain of such, whose clipping, decay and rate stay as they are
    format: `ya.formats.Roots()`, say. In `Scaled`, second moments that are small in their block become zero, and first
        moments are divided by them

    The optimizer must be given to `ya.init` or `ya.shard`, which cut shards between blocks. Raises TypeError for a `tx`
    that needs whole leaves, or is around others, as `partition` is: these take it inside.

    >>> light = ya.optim.in_format(ya.optim.adamw(1e-3), ya.formats.Roots())
    >>> lighter = ya.init(params, light, mesh=mesh)
    >>> lighter.opt_state[0].inner_state.mu["layers"].leaves[0].dtype
    torch.uint8
    """
    check_format("in_format", format)
    inner = as_transformation(tx)
    if isinstance(inner.rule, Chain):
        return chain(*(in_format(part, format) for part in inner.rule.parts))
    if isinstance(inner.rule, Decay | Scale | ClipByGlobalNorm):  # they remember nothing of a parameter
        return inner
    if not inner.elementwise or isinstance(inner.rule, Around | Partition):
        raise TypeError(
            f"in_format: {name(inner)} is around others, or works on whole leaves; it takes elementwise optimizers and "
            "chains of them: put it inside, around the parts whose moments it is for"
        )

    def init(params: Tree) -> State:
        updates = new_count(params) if format.stochastic else None
        return InFormatState(_encoded(format, inner.init(params)), updates)

    def update(updates: Tree, state: InFormatState, params: Tree | None = None) -> tuple[Tree, State]:
        wide = optree.tree_map(partial(decoded, format), state.inner_state, is_leaf=is_sharded)
        new, after = checked_update(inner, updates, wide, params)
        if state.updates is None:
            return new, InFormatState(_encoded(format, after))
        return new, InFormatState(_encoded(format.at(state.updates), after), state.updates + 1)

    return GradientTransformation(init, update, elementwise=True, rule=InFormat(inner, format=format))


def inside(rule: object) -> list[GradientTransformation]:
    """Returns the transformations that one with this rule is around."""
    if isinstance(rule, Partition):
        return [part for part, _ in rule.parts.values()]
    return [rule.inner] if isinstance(rule, Around) else []


def block_of(tx: Any) -> int:
    """Returns the elements at whose multiples `tx`, if it is any, needs shards to be cut."""
    rule = getattr(tx, "rule", None)
    if isinstance(rule, InFormat):
        return rule.format.block
    return math.lcm(*map(block_of, rule.parts if isinstance(rule, Chain) else inside(rule)))


# ---- What is kept of parameters: handles, or floating-point leaves of a plain tree.


def group_of_bytes(group: Group, format: Format, dtype: torch.dtype) -> Group:
    """Returns the group of the bytes of `group`, in `dtype`, in a format: a leaf's last axis is of bytes, or its only
    one, where rows are no whole blocks. Raises ValueError where blocks would be cut."""
    if group.layout.align % format.block:
        raise ValueError(
            f"{group.name or 'params'}: shards are cut at multiples of {group.layout.align} elements, which are no "
            f"blocks of {format.name}; give the optimizer to ya.init or ya.shard, which cut them between blocks"
        )
    shapes = []
    for number, (path, shape) in enumerate(zip(group.layout.names, group.layout.shapes, strict=True)):
        for axis in group.over:
            dim, parts = cut_of(group.splits[number], axis)
            run = shape[-1] // parts if dim == -1 else shape[-1]
            check_blocks(path, axis, run, (format,))
        whole_rows = shape and shape[-1] % format.block == 0
        *rows, last = shape if whole_rows else (math.prod(shape),)
        shapes.append((*rows, format.nbytes(round_up(last, format.block))))
    layout = FlatLayout(group.layout.names, tuple(shapes), format.nbytes(group.layout.align))
    splits = group.splits if group.axes else ()
    encodes = Encodes(format, group, dtype)
    return dataclasses.replace(group, layout=layout, splits=splits, wire=WHOLE, encodes=encodes)


def encoded(format: Format, handle: Sharded) -> Sharded:
    """Returns a handle on the bytes of the leaves of `handle`."""

    def of_group(group: Group, leaf: Tensor) -> tuple[Group, Tensor]:
        of_bytes = group_of_bytes(group, format, leaf.dtype)
        out = leaf.new_empty(*leaf.shape[:-1], format.nbytes(leaf.shape[-1]), dtype=torch.uint8)
        formats.encode(format, leaf.contiguous(), out)
        return of_bytes, out

    return handle.map_groups(of_group)


def decoded(format: Format | None, node: Any) -> Any:
    """Returns a handle on the leaves whose bytes `node` has, and what is no handle as it is. Raises TypeError if they
    are not in `format`, where one is given."""

    def of_group(group: Group, leaf: Tensor) -> tuple[Group, Tensor]:
        if group.encodes is None:
            return group, leaf
        own, whole, dtype = group.encodes
        if format is not None and own.name != format.name:
            raise TypeError(
                f"in_format: the state is in {own.name}, not in this optimizer's {format.name}: give the step the "
                "optimizer that ya.init was given, or take ya.shard(state, tx), a state for this one"
            )
        out = leaf.new_empty(*leaf.shape[:-1], own.numel(leaf.shape[-1]), dtype=dtype)
        formats.decode(own, leaf, out)
        return whole, out

    return node.map_groups(of_group) if isinstance(node, Sharded) else node


def _encoded(format: Format, state: State) -> State:
    def of(at: optree.PyTreeAccessor, node: Any) -> Any:
        if isinstance(node, Sharded):
            return encoded(format, node)
        if not node.is_floating_point() or not node.ndim:
            return node
        by_layer = in_stack(at) and not any(issubclass(entry.type, Pinned) for entry in at)
        return torch.stack([passed(format, row) for row in node]) if by_layer else passed(format, node)

    return optree.tree_map_with_accessor(of, state, is_leaf=is_sharded)
