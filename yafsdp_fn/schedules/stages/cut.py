"""Cuts a step into pipeline stages: which units go where, and what travels between them.

assignment = assign(trace, stages=4)           # even by cost; or written by hand
state = ya.init(params, tx, mesh=ya.mesh(stage=4), stages=assignment)
whole = cut(trace, assignment)                 # the same step with its segments and flows
"""

import itertools
from collections.abc import Sequence
from typing import Literal

from yafsdp_fn.schedules.measured import Argument
from yafsdp_fn.schedules.split import Assignment, Flow, Split
from yafsdp_fn.schedules.trace import Trace, Visit

Shape = Literal["loop", "v"]
"""How segments lie on stages: 0 1 2 3 0 1 2 3, or 0 1 2 3 3 2 1 0."""


def assign(trace: Trace, stages: int, *, per_stage: int = 1, shape: Shape = "loop") -> Assignment:
    """Units on `stages` stages, so that the dearest of `stages * per_stage` segments is as cheap as it can be.

    trace: of the loss, from `ya.trace`; visits cost their floating-point operations, or one each where nothing has
        measured them
    shape: "v" has the first and the last segment on one stage; it needs `per_stage` 2

    Raises ValueError where there are fewer visits than segments.
    """
    if type(stages) is not int or type(per_stage) is not int or stages < 1 or per_stage < 1:
        raise ValueError(f"assign(stages={stages!r}, per_stage={per_stage!r}): expected integers >= 1")
    if shape not in ("loop", "v") or (shape == "v" and per_stage != 2):
        raise ValueError(f"assign(shape={shape!r}, per_stage={per_stage}): expected 'loop', or 'v' with per_stage=2")
    count = stages * per_stage
    if count > len(trace.visits):
        raise ValueError(f"assign: {count} segments of {len(trace.visits)} visits; take fewer stages, or per_stage")
    bounds = [*_even([_cost(visit) for visit in trace.visits], count), len(trace.visits)]
    used: list[list[int]] = [[] for _ in trace.units]
    for segment in range(count):
        for visit in trace.visits[bounds[segment] : bounds[segment + 1]]:
            for unit in visit.units:
                used[unit] += [segment] * (segment not in used[unit])
    order = range(stages)
    homes = (*order, *reversed(order)) if shape == "v" else tuple(order) * per_stage
    return Assignment(tuple(tuple(segments) for segments in used), homes)


def _cost(visit: Visit) -> int:
    cost = visit.cost
    return cost.flops + cost.bwd_flops + cost.attention_flops + cost.bwd_attention_flops


def _even(costs: Sequence[int], count: int) -> list[int]:
    """The first visit of each of `count` segments whose largest cost is least; among those, even in visits."""
    costs = list(costs) if any(costs) else [1] * len(costs)
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(costs, count, middle) else (middle + 1, high)
    return _filled(costs, count, low)


def _fits(costs: Sequence[int], count: int, most: int) -> bool:
    segments, held = 1, 0
    for cost in costs:
        segments, held = (segments + 1, cost) if held + cost > most else (segments, held + cost)
    return segments <= count


def _filled(costs: Sequence[int], count: int, most: int) -> list[int]:
    """Segments of at most `most`, each as near to an even share of what is left as that lets it be."""
    starts, at = [0], 0
    for left in range(count - 1, 0, -1):
        share, held = sum(costs[at:]) / (left + 1), costs[at]
        at += 1
        while len(costs) - at > left and held + costs[at] <= most:
            enough = _fits(costs[at:], left, most)
            if enough and held + costs[at] / 2 > share:
                break
            held += costs[at]
            at += 1
        starts.append(at)
    return starts


def cut(trace: Trace, assignment: Assignment) -> Trace:
    """`trace` with its segments and flows. Raises ValueError, naming the visit or unit, where it cannot be cut so: a
    visit whose units are in different segments, visits that come back to an earlier segment, code between visits that
    mixes what two segments have made."""
    if len(assignment.units) != len(trace.units):
        raise ValueError(f"the assignment is of {len(assignment.units)} units, the step has {len(trace.units)}")
    of_visit = list(_segments(trace, assignment))
    shared = [(unit, stages) for unit, stages in enumerate(assignment.holders) if len(stages) > 1]
    starts = [of_visit.index(segment) for segment in range(len(assignment.homes))]
    segments: tuple[tuple[int, int], ...] = (*itertools.pairwise([*starts, len(trace.visits)]),)
    flows = tuple(
        Flow(*ends, sum(of[0][1].nbytes for of in tensors), sum(of[0][1].grad_bytes for of in tensors))
        for ends, tensors in _crossing(trace, of_visit).items()
    )
    loss = {of_visit[visit] for visit in trace.loss_of}
    if len(loss) > 1:
        raise ValueError(
            f"the loss is made of what segments {sorted(loss)} have made: it can be of one. Pass what the others give "
            "it through the visits, or report it as aux"
        )
    return trace._replace(split=Split(segments, assignment.homes, flows, tuple(shared)))


def _segments(trace: Trace, assignment: Assignment) -> list[int]:
    """Visit -> segment, never going back."""
    out: list[int] = []
    now = 0
    for visit in trace.visits:
        may = set(range(len(assignment.homes)))
        for unit in visit.units:
            may &= set(assignment.units[unit])
        ahead = sorted(segment for segment in may if segment >= now)
        if not ahead or ahead[0] > now + bool(out):
            where = f"segments {sorted(may)}" if may else "different segments"
            raise ValueError(
                f"{visit.name} (visit {visit.id}): its units are in {where}, and the visits before it have come to "
                f"segment {now}; a step goes through the segments in order. Take another assignment (ya.assign)"
            )
        now = ahead[0]
        out.append(now)
    if now + 1 < len(assignment.homes):
        raise ValueError(f"no visit of the step is in segment {now + 1} of the assignment's {len(assignment.homes)}")
    return out


Takers = list[tuple[int, Argument]]
"""The visits of a segment that take one tensor, and which argument it is of each."""


def crossing(trace: Trace) -> list[list[Takers]]:
    """The tensors of each flow of a step that is cut, in the order in which they travel."""
    assert trace.split is not None
    of_visit = [trace.split.segment(visit.id) for visit in trace.visits]
    return list(_crossing(trace, of_visit).values())


def _crossing(trace: Trace, of_visit: Sequence[int]) -> dict[tuple[int, int], list[Takers]]:
    """(source, target) -> what that segment takes of this one, every tensor once; by source, then target."""
    found: dict[tuple[int, int], dict[int, Takers]] = {}
    for visit in trace.visits:
        for argument in visit.cost.arguments:
            sources = sorted({of_visit[made] for made in argument.made})
            target = of_visit[visit.id]
            if len(sources) > 1:
                raise ValueError(
                    f"{visit.name} (visit {visit.id}): argument {argument.place} mixes, between visits, what segments "
                    f"{sources} have made, and no stage has all of it. Mix inside a visit: give it both"
                )
            if sources != [target]:
                takers = found.setdefault((sources[0], target), {}).setdefault(argument.number, [])
                takers.append((visit.id, argument))
    return {ends: list(tensors.values()) for ends, tensors in sorted(found.items())}
