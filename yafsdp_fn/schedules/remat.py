"""Which visits recompute their graph in the backward instead of keeping it.

A policy is a function from a trace to the ids of the visits that recompute. These choose among the layers of stacks;
an embedding or a head keeps its graph, since it is used at once or costs little.
"""

from __future__ import annotations

from collections.abc import Callable

from yafsdp_fn.schedules.trace import Trace

Remat = Callable[[Trace], frozenset[int]]


def layer_visits(trace: Trace) -> list[int]:
    """Ids of the visits to layers of stacks, in forward order."""
    return [v.id for v in trace.visits if any(trace.units[unit].stack is not None for unit in v.units)]


def none(trace: Trace) -> frozenset[int]:
    """Every visit keeps its graph."""
    return frozenset()


def all(trace: Trace) -> frozenset[int]:
    """Every layer recomputes: only the carries between layers are saved."""
    return frozenset(layer_visits(trace))


def first(n: int) -> Remat:
    """The first `n` layers recompute, those whose graphs would be held longest."""
    if n < 0:
        raise ValueError(f"remat.first({n}): expected a number of layers >= 0")
    return lambda trace: frozenset(layer_visits(trace)[:n])


def every(k: int) -> Remat:
    """Every `k`-th layer recomputes, beginning with the first."""
    if k < 1:
        raise ValueError(f"remat.every({k}): expected k >= 1")
    return lambda trace: frozenset(layer_visits(trace)[::k])
