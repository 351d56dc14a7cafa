"""Assigns each leaf to the rank that computes on it as a whole (owner compute), for optimizers of whole matrices.

    shards:    | q_proj ........ | k_proj .. | v_proj ..... | o_proj ........ |
    ranks:     |------- 0 -------|------- 1 -------|------- 2 -------|-- 3 ---|
    owner:       0                 1           2              3

The owner of a leaf is a rank that already holds a part of it, the one with the least work so far. The other parts
travel there, and back. Every leaf is worked on once, whatever the number of ranks, and owners keep nothing: all state
is in flat shards.

Elements that travel, there and back, over all ranks: 2 * sum over leaves of (its elements - those its owner holds).
Leaves inside one rank's shard do not travel.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yafsdp_fn.params.layout import Group


class Leaf(NamedTuple):
    """A leaf of one layer in its unit's flat vector. position: among the leaves of the unit's layout"""

    name: str
    offset: int
    shape: tuple[int, ...]
    position: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def work(self) -> int:
        """The cost of products of a matrix with its transpose, up to a factor."""
        return self.numel * min(self.shape[-2:], default=1) if len(self.shape) > 1 else self.numel

    def part(self, rank: int, n: int) -> range:
        """Returns the elements of the flat vector that are in this leaf and in the shard [n] of `rank`."""
        return range(max(self.offset, rank * n), max(min(self.offset + self.numel, (rank + 1) * n), rank * n))


def leaves_of(group: Group) -> list[Leaf]:
    """Returns the leaves of a unit of `group`, of one layer each: a pinned unit has those of all its layers."""
    found = []
    layout = group.layout
    for position, (name, shape, offset) in enumerate(zip(layout.names, layout.shapes, layout.offsets, strict=True)):
        if not group.pinned:
            found.append(Leaf(name, offset, shape, position))
            continue
        size = math.prod(shape[1:])
        found += [Leaf(f"{name}[{i}]", offset + i * size, shape[1:], position) for i in range(shape[0])]
    return found


def assign(units: Iterable[tuple[int, int, Sequence[Leaf]]], ranks: int) -> dict[int, list[int]]:
    """Returns unit -> owners of its leaves, from `(unit, elements of a shard, leaves)`: the same on every rank."""
    load = [0] * ranks
    out: dict[int, list[int]] = {}
    for unit, n, leaves in units:
        out[unit] = []
        for leaf in leaves:
            first, last = (
                min(at // max(n, 1), ranks - 1) for at in (leaf.offset, leaf.offset + max(leaf.numel, 1) - 1)
            )
            owner = min(range(first, last + 1), key=lambda rank: (load[rank], rank))
            load[owner] += leaf.work
            out[unit].append(owner)
    return out
