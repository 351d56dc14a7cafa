"""Cuts sharded trees into units, and flat shards into runs of elements that a kernel treats alike."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.layout import FlatLayout, Group
from yafsdp_fn.params.leaf_mask import by_leaf
from yafsdp_fn.params.sharded import Context, Origin, Sharded, handles_and_leaves, is_sharded
from yafsdp_fn.params.tree import Param, Tree, dotted, shape_of

# ---- Cuts sharded trees into units, for transformations that are not fused:
#
#     {"layers": Sharded [L, n], "head": Sharded [m]}     of units 2 and L (the head):
#     {"layers": (Sharded [n],), "head": (Sharded [m],)}
#
# Every handle becomes the tuple of the handles of its wanted units; the rest of a tree stays as it is. Leaves are
# views, so a row is written in place.

GLOBAL = (
    "an update asked for something over all parameters or ranks (a norm, a sum, whole weights), but units take their "
    "optimizer steps one by one; keep the optimizer outside the program"
)


Host = Mapping[int, Sequence[Tensor]]
"""The rows on the device, by unit, of leaves that are on the host, by the `id` of a leaf (on_host.py)."""


class UnitTree(NamedTuple):
    """A tree cut into units. nodes: values that are no handles, or a handle's units as handles, by unit"""

    spec: optree.PyTreeSpec
    nodes: list[Any]

    def of(self, units: Sequence[int]) -> Tree:
        """Returns the part of the tree that belongs to `units`."""

        def part(node: Any) -> Any:
            return tuple(node[unit] for unit in units if unit in node) if isinstance(node, dict) else node

        return optree.tree_unflatten(self.spec, map(part, self.nodes))


class Cutter:
    """Cuts trees that are sharded like `params`: parameters, gradients, optimizer states. units: all of them"""

    def __init__(self, params: Tree) -> None:
        self.units: list[int] = []
        self._like: dict[int, tuple[FlatLayout, torch.Size]] = {}  # by first unit of a group: layout, shape of a leaf
        for accessor, node in handles_and_leaves(params):
            if not isinstance(node, Sharded):
                raise TypeError(
                    f"optim: {dotted(accessor) or 'the tree'} is {shape_of(node)}, no sharded handle: only the units "
                    "of a sharded tree take their steps one by one"
                )
            for _, group, leaf in node.group_leaves():
                self._like[group.units[0]] = group.layout, leaf.shape
                self.units += group.held

    def cut(self, what: str, tree: Tree, host: Host) -> UnitTree:
        """Cuts `tree`, called `what` in errors, into units. Outside handles it may hold 0-dim tensors and
        constants."""
        accessors, nodes, spec = optree.tree_flatten_with_accessor(tree, is_leaf=is_sharded)
        out: list[Any] = []
        for accessor, node in zip(accessors, nodes, strict=True):
            if isinstance(node, Tensor) and node.ndim:
                raise TypeError(
                    f"optim: {dotted(accessor) or 'the leaf'} of {what} is {shape_of(node)} outside of the sharded "
                    "handles, so that it cannot be cut into units. Make states with tree_map over the parameters, or "
                    "keep the optimizer outside the program"
                )
            out.append(self._handle(what, node, host) if isinstance(node, Sharded) else node)
        return UnitTree(spec, out)

    def _handle(self, what: str, handle: Sharded, host: Host) -> dict[int, Sharded]:
        out: dict[int, Sharded] = {}
        ranks = handle.owner.comms
        leaves = {number: leaf for number, _, leaf in handle.group_leaves()}
        for number, group in enumerate(handle.entry.groups, handle.context.first_group):
            of_group = ranks.without(group.over)
            origin = Origin(SingleUnitOwner(of_group.rank, of_group.ranks), 0)
            context = Context(dataclasses.replace(handle.entry, groups=(_of_row(group),)), number, origin)
            if number not in leaves:  # other units of a part of the tree, such as that of a label
                empty = Sharded((), dataclasses.replace(context, only=frozenset()))
                out.update(dict.fromkeys(group.held if group.units[0] in self._like else (), empty))
                continue
            leaf = leaves[number]
            layout, shape = self._like.get(group.units[0], (group.layout, None))
            # states of another layout have leaves of their own, such as preconditioners
            if shape is None or (leaf.ndim and leaf.shape != shape and group.layout == layout):
                expected = "no such group" if shape is None else f"{tuple(shape)} or a 0-dim tensor"
                raise TypeError(
                    f"optim: {group.name or 'params'} of {what} should be like the parameters, {expected}, "
                    f"got {shape_of(leaf)}"
                )
            of_units = zip(group.held, rows(group, leaf, host), strict=True)
            out |= {unit: Sharded((row,), context) for unit, row in of_units}
        return out


def _of_row(group: Group) -> Group:
    """Returns the group of a unit's row: alone, and in a step on the device."""
    encodes = group.encodes
    if encodes is not None:
        encodes = encodes._replace(group=_of_row(encodes.group))
    return dataclasses.replace(group, stacked=False, on_host=False, encodes=encodes)


def rows(group: Group, leaf: Tensor, host: Host | None = None) -> Sequence[Tensor]:
    """Returns the rows [n] of a group's [L, n] or [n], one per unit held here; a 0-dim leaf belongs to all units."""
    if host and id(leaf) in host:
        return host[id(leaf)]
    return leaf.unbind() if leaf.ndim == 2 else (leaf,) * len(group.held)


@dataclasses.dataclass
class SingleUnitOwner:
    """The owner of a unit's handles, and its ranks: they say where this rank's shards begin. All other uses are
    refused."""

    rank: int
    ranks: int
    generation: int = 0
    stepping: frozenset[int] = frozenset()

    @property
    def comms(self) -> Any:
        return self

    def without(self, axes: object) -> "SingleUnitOwner":
        return self

    def why_not_whole(self) -> str:
        return GLOBAL

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TypeError(f"optim: {GLOBAL}")


# ---- Splits flat shards into runs of elements that are treated alike, so that a kernel needs no mask.
#
# row:   | q_proj ........ | norm |gap| down_proj ... | padding |     mask: all but norms
# runs:  (True, 4096)       (False, 72)  (True, 5000)
#
# Every run is a tensor of its own for the kernel, and rows are never joined, even where neighbours are treated alike:
# the CPU kernels now and then round the elements past the last full vector of a tensor differently, and the bits of a
# step must not depend on how many units take it at once.

Runs = list[tuple[Any, int]]
"""Stretches of a row on which a rule has one value: (value, length in elements)."""


def row_runs(rule: Callable[[str, Param], Any], handle: Sharded, group: Group, n: int) -> Runs:
    """Returns the runs of `rule` over one unit's shard [n] of `group`. Computed on the host, from layouts.

    A gap counts as part of the logical leaf before it: its zeros decay to zeros, and all runs start where a logical
    leaf does, aligned.
    """
    pieces = list(group.pieces(n, handle.owner.comms))
    said = by_leaf(rule, group)
    values = [said[piece.leaf] for piece in pieces] or [False]  # a shard may be nothing but padding
    ends = [piece.start for piece in pieces[1:]] + [n]
    lengths = [b - a for a, b in itertools.pairwise([0, *ends])]
    alike = itertools.groupby(zip(values, lengths, strict=True), key=itemgetter(0))
    return [(value, sum(length for _, length in stretch)) for value, stretch in alike]
