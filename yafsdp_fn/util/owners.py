"""Assigns each leaf to the rank that computes on it as a whole (owner compute), for optimizers of whole matrices.

    shards:    | q_proj ........ | k_proj .. | v_proj ..... | o_proj ........ |
    ranks:     |------- 0 -------|------- 1 -------|------- 2 -------|-- 3 ---|
    owner:       0                 1           2              3

The owner of a leaf is a rank that already holds a part of it, the one with the least work so far. The other parts
travel there, and back: of a leaf that is split over axes inside blocks, those of all its ranks. Every leaf is worked on
once, whatever the number of ranks, and owners keep nothing: all state is in flat shards.

Elements that travel, there and back, over all ranks: 2 * sum over leaves of (its elements - those its owner holds).
Leaves inside one rank's shard do not travel.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Leaf(NamedTuple):
    """A leaf of one layer in its unit's flat vector.

    shape: of the whole leaf, as it is worked on; position: among the leaves of the unit's layout; parts: into which
        axes inside blocks split it, each in a vector of its own
    blocks: `(dim, count)`: it is worked on in blocks along a dimension, [count, ...]
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    position: int
    parts: int = 1
    blocks: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Elements in one vector."""
        return math.prod(self.shape) // self.parts

    @property
    def work(self) -> int:
        """The cost of products of a matrix with its transpose, up to a factor."""
        numel = math.prod(self.shape)
        return numel * min(self.shape[-2:], default=1) if len(self.shape) > 1 else numel

    def in_shard(self, rank: int, n: int) -> range:
        """Returns the elements of the flat vector that are in this leaf and in the shard [n] of `rank`."""
        return range(max(self.offset, rank * n), max(min(self.offset + self.numel, (rank + 1) * n), rank * n))


def assign(
    units: Iterable[tuple[int, int, Sequence[Leaf], Sequence[Sequence[int]]]], ranks: int
) -> dict[int, list[int]]:
    """Returns unit -> owners of its leaves: the same on every rank.

    units: `(unit, elements of a shard, leaves, subgroups)`. subgroups: the ranks over which the vector of each part is
        cut
    """
    load = [0] * ranks
    out: dict[int, list[int]] = {}
    for unit, n, leaves, subgroups in units:
        out[unit] = []
        for leaf in leaves:
            ends = leaf.offset, leaf.offset + max(leaf.numel, 1) - 1
            first, last = (min(at // max(n, 1), len(subgroups[0]) - 1) for at in ends)
            holders = (rank for members in subgroups for rank in members[first : last + 1])
            owner = min(holders, key=lambda rank: (load[rank], rank))
            load[owner] += leaf.work
            out[unit].append(owner)
    return out
