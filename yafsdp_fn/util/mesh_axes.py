"""The axes of a mesh, and the cut of flat vectors over ranks, as plain numbers."""

import difflib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from yafsdp_fn.util.foreign_names import KEYWORDS, renamed
from yafsdp_fn.util.words import counted

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


MeshAxes = tuple[tuple[str, int], ...]
"""`(name, size)` of each axis of a mesh, or of some of them, outermost first."""

MOST_RANKS = 2**17
"""The most ranks of a mesh: more GPUs than anybody trains on."""


def ranks_on(axes: MeshAxes) -> int:
    """Returns the ranks of a mesh that differ on these axes alone."""
    return math.prod(size for _, size in axes)


def round_up(n: int, multiple: int = ALIGN) -> int:
    return -(-n // multiple) * multiple


def padded_numel(numel: int, ranks: int, align: int = ALIGN) -> int:
    """Returns the elements of a flat vector of `numel`, padded so that slices are aligned and equal on all ranks."""
    return round_up(numel, align * ranks)


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
        found.setdefault(tuple(itertools.compress(places, alike)), []).append(rank)
    return list(found.values())


def inside_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes inside blocks among the axes of a mesh: those behind `shard` or `local`."""
    last = next((names.index(name) for name in (SHARD, LOCAL) if name in names), len(names))
    return tuple(names[last + 1 :])


def mesh_sizes(
    world: int,
    inside: Mapping[str, int],
    *,
    stage: int = 1,
    replicate: int | None = None,
    shard: int = -1,
    local: int | None = None,
) -> dict[str, int]:
    """Returns the axes of a mesh of `world` ranks with their sizes, outermost first, as `ya.mesh` makes them of these
    arguments. inside: sizes of axes inside blocks, of which the usual ones come last. Raises ValueError for what cannot
    be."""
    replicas, ranks = _completed(world, inside, stage, 1 if replicate is None else replicate, shard)
    sizes = {STAGE: stage} if stage > 1 else {}
    if replicate is not None:
        sizes[REPLICATE] = replicas
    if local is None:
        sizes[SHARD] = ranks
    elif local < 1:
        raise ValueError(f"mesh(local={local}): expected a number of ranks per node, or None")
    elif ranks % local:
        raise ValueError(
            f"mesh(local={local}): a copy of the state is cut over {ranks} ranks, not a multiple of {local}; "
            "give the number of ranks per node (torchrun's --nproc-per-node), or leave local=None"
        )
    else:
        sizes |= {NODE: ranks // local, LOCAL: local}
    names = sorted(inside, key=lambda name: INSIDE.index(name) if name in INSIDE else -1)
    return sizes | {name: inside[name] for name in names}


def _completed(world: int, inside: Mapping[str, int], stage: int, replicate: int, shard: int) -> tuple[int, int]:
    """Returns `(replicas, ranks on the axis shard)` of a stage, where one of them may be -1, for all that there are
    ranks for."""
    given = {"replicate": replicate, "shard": shard}
    shown = {"stage": stage, **given, **inside}.items()
    asked = ", ".join(f"{name}={size}" for name, size in shown if name == SHARD or size != 1)
    if any(size < 1 and size != -1 for size in given.values()):
        raise ValueError(f"mesh({asked}): sizes are positive, or -1 for as many as there are ranks for")
    if stage < 1:
        raise ValueError(f"mesh({asked}): expected the number of stages, 1 for no pipeline")
    if replicate == shard == -1:
        why = "at most one of them can follow from the number of ranks; for plain data parallelism give shard=1"
        raise ValueError(f"mesh({asked}): {why}")
    each = stage * math.prod(inside.values())
    if -1 in given.values():
        other = max(replicate, shard) * each
        if world % other:
            raise ValueError(
                f"mesh({asked}): the job has {counted(world, 'rank')}, not a multiple of {other}; "
                f"start {round_up(world, other)} of them, or give a divisor of {world}"
            )
        return (world // other, shard) if replicate == -1 else (replicate, world // other)
    wanted = replicate * shard * each
    if wanted != world:
        raise ValueError(
            f"mesh({asked}): the job has {counted(world, 'rank')}; start {wanted} of them "
            f"(torchrun --nproc-per-node {wanted} ...), or leave shard=-1"
        )
    return replicate, shard


def check_inside(inside: Mapping[str, int]) -> None:
    """Raises TypeError or ValueError unless these names and sizes of axes inside blocks can be."""
    known = [*INSIDE, STAGE, REPLICATE, SHARD, LOCAL, "device", "timeout", "deterministic"]
    for name, size in inside.items():
        if name in OUTSIDE:
            raise TypeError(
                f"mesh: {name!r} is the name of an axis outside of blocks, which follows from stage (in a plan "
                "stages), replicate and local; give yours another"
            )
        if KEYWORDS.get(name) in OUTSIDE:
            raise renamed("mesh", name)
        near = [] if name in known else difflib.get_close_matches(name, known, 1, 0.8)
        if near:
            raise TypeError(f"mesh({name}={size!r}): did you mean {near[0]}? If not, give your axis another name")
        if type(size) is not int or size < 1:
            raise ValueError(f"mesh({name}={size!r}): expected the number of ranks on this axis, 1 or more")
