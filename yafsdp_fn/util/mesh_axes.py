"""The axes of a mesh, and the cut of flat vectors over ranks, as plain numbers."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

# stages x replicas x nodes x local ranks = all ranks of a mesh. A copy of a stage's part of the state is cut over
# nodes x local ranks. Axes inside blocks, such as `tensor`, are a part of the local ranks, and so inside of a node:
# local ranks = shard (or local) x expert x context x tensor.

STAGE, REPLICATE, SHARD, NODE, LOCAL = "stage", "replicate", "shard", "node", "local"
_IN_A_STAGE = ((SHARD,), (REPLICATE, SHARD), (NODE, LOCAL), (REPLICATE, NODE, LOCAL))
AXES = (*_IN_A_STAGE, *((STAGE, *axes) for axes in _IN_A_STAGE))
"""The axes that a mesh can have, outermost first, without those inside blocks."""

OUTSIDE = frozenset((STAGE, REPLICATE, SHARD, NODE, LOCAL))

EXPERT, CONTEXT, TENSOR = "expert", "context", "tensor"
INSIDE = (EXPERT, CONTEXT, TENSOR)
"""The usual axes inside blocks, outermost first. Other names may come before them."""

ALIGN = 8
"""Elements. 16 bytes in bf16, the narrowest dtype gathered: every view is aligned for vector loads."""


MOST_RANKS = 2**17
"""The most ranks of a mesh: more GPUs than anybody trains on."""


def round_up(n: int, multiple: int = ALIGN) -> int:
    return -(-n // multiple) * multiple


def padded_numel(numel: int, ranks: int, align: int = ALIGN) -> int:
    """Returns the elements of a flat vector of `numel`, padded so that slices are aligned and equal on all ranks."""
    return round_up(-(-numel // ranks), align) * ranks


class AxisCollective(NamedTuple):
    """A collective over an axis inside blocks.

    kind: its function (axes.py), or "uneven all_to_all"; nbytes: of the whole tensor, which an all_gather gives and the
        others take. Parts of an uneven one, and what follows from their sizes, may be others on each rank
    """

    axis: str
    kind: str
    nbytes: int


def subgroups(
    ranks: int, axes: Mapping[str, int], *, along: Collection[str] = (), across: Collection[str] = ()
) -> list[list[int]]:
    """Divides a shard group, [0, ..., ranks - 1], into groups whose ranks differ only on the axes `along`; if these are
    not given, on all axes but `across`. Each of these groups has one part of a vector that is split over `across`, and
    cuts it into shards.

    axes: those inside blocks with their sizes, outermost first
    """
    names = (SHARD, *axes)
    sizes = (ranks // math.prod(axes.values()), *axes.values())
    # ranks of a group have the same places on these axes
    alike = [name not in along if along else name in across for name in names]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, places in enumerate(itertools.product(*map(range, sizes))):
        group = tuple(itertools.compress(places, alike))
        found.setdefault(group, []).append(rank)
    return list(found.values())


def inside_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes inside blocks among the axes of a mesh: those behind `shard` or `local`."""
    last = next((names.index(name) for name in (SHARD, LOCAL) if name in names), len(names))
    return tuple(names[last + 1 :])


def check_inside(names: Sequence[str]) -> None:
    """Raises for names of axes inside blocks that cannot be."""
    if taken := OUTSIDE.intersection(names):
        raise TypeError(f"mesh: {min(taken)!r} is the name of an axis outside of blocks; give yours another")
