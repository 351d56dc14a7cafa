"""Assigns units to pipeline stages.

assignment = assign(trace, stages=4)           # even by cost; or written by hand
state = ya.init(params, tx, mesh=ya.mesh(stage=4), stages=assignment)
whole = cut(trace, assignment)                 # the same step with its segments and flows: cut.py
"""

from collections.abc import Sequence
from typing import Literal

from yafsdp_fn.pipelines.cut import costs_of
from yafsdp_fn.program.split import Assignment
from yafsdp_fn.program.trace import Trace

Shape = Literal["loop", "v"]
"""The way segments lie on stages: 0 1 2 3 0 1 2 3, or 0 1 2 3 3 2 1 0."""


# ---- The verb.


def assign(
    trace: Trace, stages: int, *, per_stage: int = 1, shape: Shape = "loop", at: Sequence[str] | None = None
) -> Assignment:
    """Units on `stages` stages, so that the dearest of `stages * per_stage` segments is as cheap as it can be; or by
    hand.

    trace: of the loss, from `ya.planner.trace`; visits cost their floating-point operations, or one each where nothing
        has measured them
    shape: "v" has the first and the last segment on one stage; it needs `per_stage` 2
    at: names of the units whose first visits begin all segments but the first, such as `["layers[8]", "layers[24]"]`

    Raises ValueError where there are fewer visits than segments, or where the names in `at` do not begin segments.

    >>> assignment = ya.schedules.assign(trace, stages=2)
    >>> assignment.stages, assignment.held(0)
    (2, frozenset({0, 2, 3}))
    """
    if type(stages) is not int or type(per_stage) is not int or stages < 1 or per_stage < 1:
        raise ValueError(f"assign(stages={stages!r}, per_stage={per_stage!r}): expected integers >= 1")
    if shape not in ("loop", "v") or (shape == "v" and per_stage != 2):
        raise ValueError(f"assign(shape={shape!r}, per_stage={per_stage}): expected 'loop', or 'v' with per_stage=2")
    count = stages * per_stage
    if count > len(trace.visits):
        raise ValueError(f"assign: {count} segments of {len(trace.visits)} visits; take fewer stages, or per_stage")
    # where segments begin
    begins = _even(costs_of(trace.visits), count) if at is None else _named(trace, at, count)
    bounds = [*begins, len(trace.visits)]
    # the segments of each unit, and their stages
    used: list[list[int]] = [[] for _ in trace.units]
    for segment in range(count):
        for visit in trace.visits[bounds[segment] : bounds[segment + 1]]:
            for unit in visit.units:
                used[unit] += [segment] * (segment not in used[unit])
    order = range(stages)
    homes = (*order, *reversed(order)) if shape == "v" else tuple(order) * per_stage
    return Assignment(tuple(tuple(segments) for segments in used), homes)


# ---- Where segments begin: as named, or at costs that are as even as can be.


def _named(trace: Trace, at: Sequence[str], count: int) -> list[int]:
    """Returns the first visit of each of `count` segments that begin at the units of these names."""
    first: dict[str, int] = {}
    for number, visit in enumerate(trace.visits):
        for unit in visit.units:
            first.setdefault(trace.units[unit].name, number)
    begins = [0, *(first.get(name, -1) for name in at)]
    if len(begins) != count or begins != sorted(set(begins)):
        raise ValueError(
            f"assign(at={at!r}): expected a list of {count - 1} names of units, with which segments but the first "
            f"begin, in the order of their first visits; visited are {', '.join(first)}"
        )
    return begins


def _even(costs: Sequence[int], count: int) -> list[int]:
    """Returns the first visit of each of `count` segments whose largest cost is least; among those, even in visits."""
    # the least bound under which so many segments are enough
    low = max(costs)
    high = sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(costs, count, middle) else (middle + 1, high)
    return _filled(costs, count, low)


def _fits(costs: Sequence[int], count: int, most: int) -> bool:
    """Tells whether `count` segments of at most `most` are enough."""
    segments = 1
    held = 0
    for cost in costs:
        segments, held = (segments + 1, cost) if held + cost > most else (segments, held + cost)
    return segments <= count


def _filled(costs: Sequence[int], count: int, most: int) -> list[int]:
    """Segments of at most `most`, each as near to an even share of what is left as that lets it be."""
    starts = [0]
    at = 0
    for left in range(count - 1, 0, -1):
        share = sum(costs[at:]) / (left + 1)
        held = costs[at]
        at += 1
        while len(costs) - at > left and held + costs[at] <= most:
            enough = _fits(costs[at:], left, most)
            if enough and held + costs[at] / 2 > share:
                break
            held += costs[at]
            at += 1
        starts.append(at)
    return starts
