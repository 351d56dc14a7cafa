"""Traces of small models, made by hand: nothing here runs a loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from yafsdp_fn.schedules import Compute, Flow, Lent, Split, Trace, UnitSpec, UpdateWhen, Visit, chained_order

Mesh = tuple[tuple[str, int], ...]
MESHES: dict[str, Mesh] = {
    "one rank": (("shard", 1),),
    "ranks": (("shard", 2),),
    "replicas": (("replicate", 2), ("shard", 2)),
    "replicas of the whole": (("replicate", 4), ("shard", 1)),
    "nodes": (("node", 2), ("local", 2)),
    "replicas and nodes": (("replicate", 3), ("node", 2), ("local", 4)),
}


def unit(id: int, name: str, stack: str | None = None, layer: int = 0, trainable: bool = True) -> UnitSpec:
    """A unit of its own size, so that slot sizes tell which units were in a slot."""
    numel = 10 + id
    return UnitSpec(id, name, stack, layer, numel, 4 * numel, 8 * numel * trainable, trainable)


def layers(stack: str, count: int, first: int, trainable: bool = True) -> list[UnitSpec]:
    return [unit(first + k, f"{stack}[{k}]", stack, k, trainable) for k in range(count)]


def trace_of(
    units: Sequence[UnitSpec], uses: Sequence[Sequence[int]], microbatches: int = 1, *, backward: bool = True
) -> Trace:
    """The trace of visits to `uses`, unit ids in order."""
    visits = []
    for number, ids in enumerate(uses):
        name = "+".join(units[i].name for i in ids)
        trained = tuple(i for i in ids if units[i].trainable) if backward else ()
        visits.append(Visit(number, name, tuple(ids), trained))
    order: tuple[Compute, ...] = chained_order(visits, microbatches, backward)
    return Trace(tuple(units), tuple(visits), order, (("shard", 2),), microbatches)


def on(trace: Trace, mesh: str | Mesh, updates: UpdateWhen = "never", parts: int = 1) -> Trace:
    """`trace` on another mesh, its units padded for it, with an optimizer. parts: of the updates of its even units"""
    axes = MESHES[mesh] if isinstance(mesh, str) else mesh
    lent = tuple(Lent(u.id, parts) for u in trace.units if parts > 1 and u.trainable and u.id % 2 == 0)
    trace = trace._replace(mesh=axes, update_when=updates, lent=lent)
    padded = [-(-u.numel // trace.ranks) * trace.ranks for u in trace.units]
    units = [
        u._replace(gather_bytes=4 * n, reduce_bytes=8 * n * u.trainable)
        for u, n in zip(trace.units, padded, strict=True)
    ]
    return trace._replace(units=tuple(units))


def model(
    count: int,
    microbatches: int = 1,
    *,
    stacks: int = 1,
    unroll: int = 1,
    tied: bool = False,
    frozen: bool = False,
    twice: bool = False,
    backward: bool = True,
) -> Trace:
    """embed, `stacks` stacks of `count` layers one after the other, head.

    tied: the head visits the embedding as well; frozen: the first stack is not trained; twice: stacks are scanned twice
    """
    units = [unit(0, "embed")]
    uses: list[list[int]] = [[0]]
    for k in range(stacks):
        ids = [len(units) + layer for layer in range(count)]
        units += layers("abc"[k], count, len(units), trainable=not (frozen and k == 0))
        for _ in range(1 + twice):
            uses += [list(chunk) for chunk in batched(ids, unroll)]
    units.append(unit(len(units), "head"))
    uses.append([len(units) - 1, 0] if tied else [len(units) - 1])
    return trace_of(units, uses, microbatches, backward=backward)


def together(count: int, microbatches: int = 1, *, alternating: bool = False) -> Trace:
    """Two stacks visited in one scan: both layers in one visit, or one after the other."""
    a = layers("a", count, 0)
    b = layers("b", count, count)
    pairs = [[x.id, y.id] for x, y in zip(a, b, strict=True)]
    return trace_of([*a, *b], [[i] for pair in pairs for i in pair] if alternating else pairs, microbatches)


def batched(ids: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    rest = iter(ids)
    while chunk := tuple(itertools.islice(rest, n)):
        yield chunk


def cut(trace: Trace, homes: Sequence[int], skips: Sequence[tuple[int, int]] = (), bounds: Sequence[int] = ()) -> Trace:
    """`trace` on pipeline stages: its visits in as many segments as there are homes, each taking what the one before
    has made. skips: further flows, `(source, target)`; bounds: the first visit of each segment, even by default"""
    count = len(homes)
    visits = len(trace.visits)
    starts = list(bounds) or [visits * k // count for k in range(count)]
    pairs = sorted([*((k, k + 1) for k in range(count - 1)), *skips])
    flows = tuple(Flow(*pair, 64, 32) for pair in pairs)
    segments = tuple(itertools.pairwise([*starts, visits]))
    mesh = (("stage", max(homes) + 1), *(axis for axis in trace.mesh if axis[0] != "stage"))
    used: dict[int, set[int]] = {}
    for home, ends in zip(homes, segments, strict=True):
        for visit in trace.visits[slice(*ends)]:
            for number in visit.units:
                used.setdefault(number, set()).add(home)
    shared = tuple((number, tuple(sorted(stages))) for number, stages in sorted(used.items()) if len(stages) > 1)
    return trace._replace(split=Split(segments, tuple(homes), flows, shared), mesh=mesh)
