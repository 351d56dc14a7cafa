"""Cuts a step into pipeline stages, and finds what travels between them.

whole = cut(trace, assignment)                 # the same step with its segments and flows
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from yafsdp_fn.program.split import Argument, Assignment, Flow, Split
from yafsdp_fn.program.trace import Trace, Visit

# ---- Where a step is cut.


def cut(trace: Trace, assignment: Assignment) -> Trace:
    """Returns `trace` with its segments and flows. Raises ValueError, naming the visit or unit, where it cannot be cut
    so: a visit whose units are in different segments, visits that come back to an earlier segment, a stage that holds a
    unit which none of its visits uses, code between visits that mixes what two segments have made.

    >>> two_stages = ya.schedules.cut(trace, ya.schedules.assign(trace, stages=2))
    >>> two_stages.split.stages, [(flow.source, flow.target) for flow in two_stages.split.flows]
    (2, [(0, 1)])
    """
    if len(assignment.units) != len(trace.units):
        raise ValueError(f"the assignment is of {len(assignment.units)} units, the step has {len(trace.units)}")
    bounds = [*_starts(trace, assignment), len(trace.visits)]
    split = Split(tuple(itertools.pairwise(bounds)), assignment.homes, ())
    shared, unused = _held(trace, assignment, split)
    # a tensor travels once between two segments, whoever takes it there
    flows: list[Flow] = []
    for ends, tensors in _crossing(trace, split).items():
        first = [takers[0][1] for takers in tensors]
        flows.append(Flow(*ends, sum(each.nbytes for each in first), sum(each.grad_bytes for each in first)))
    loss = set(map(split.segment, trace.loss_of))
    if len(loss) > 1:
        raise ValueError(
            f"the loss is made of what segments {sorted(loss)} have made: it can be of one. Pass what the others give "
            "it through the visits, or report it as aux"
        )
    return trace._replace(split=split._replace(flows=tuple(flows), shared=shared, unused=unused))


class Begun(NamedTuple):
    """A cut of the visits up to one, better if it is less. unused: assigned units that its segments do not use;
    dearest: cost of its dearest segment; starts: first visits of its segments"""

    unused: int
    dearest: int
    starts: tuple[int, ...]


def _starts(trace: Trace, assignment: Assignment) -> tuple[int, ...]:
    """Returns the first visit of each segment. Every visit is in a segment to which its units are assigned. Of all such
    cuts this is one that leaves the fewest assigned units unused, and then has the cheapest dearest segment."""
    costs = costs_of(trace.visits)
    found = {0: Begun(0, 0, ())}  # the visit that a cut has come to -> the best one
    # segment by segment, each as long as its units allow; of cuts at one visit the best goes on
    for segment in range(len(assignment.homes)):
        may = {unit for unit, segments in enumerate(assignment.units) if segment in segments}
        longer: dict[int, Begun] = {}
        for start, before in found.items():
            left = set(may)
            cost = 0
            for visit in trace.visits[start:]:
                if not may.issuperset(visit.units):
                    break
                left.difference_update(visit.units)
                cost += costs[visit.id]
                new = Begun(before.unused + len(left), max(before.dearest, cost), (*before.starts, start))
                end = visit.id + 1
                longer[end] = min(new, longer.get(end, new))
        found = longer
    if len(trace.visits) not in found:
        raise ValueError(_why_not(trace, assignment))
    return found[len(trace.visits)].starts


def _why_not(trace: Trace, assignment: Assignment) -> str:
    """Says what keeps a step from being cut."""
    now = -1
    count = len(assignment.homes)
    for visit in trace.visits:
        may = set(range(count)).intersection(*[assignment.units[unit] for unit in visit.units])
        ahead = sorted(segment for segment in may if segment >= now)
        if not ahead or ahead[0] > now + 1:
            where = f"segments {sorted(may)}" if may else "different segments"
            return (
                f"{visit.name} (visit {visit.id}): its units are in {where}, and the visits before it have come to "
                f"segment {max(now, 0)}; a step goes through the segments in order. Take another assignment "
                f"(ya.schedules.assign)"
            )
        now = ahead[0]
    return f"no visit of the step is in segment {now + 1} of the assignment's {count}"


# ---- The units of each stage.

Held = tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[tuple[int, int], ...]]
"""`Split.shared` and `Split.unused`."""


def _held(trace: Trace, assignment: Assignment, split: Split) -> Held:
    """Finds the units that several stages hold, and those that no visit uses."""
    used: list[set[int]] = [set() for _ in trace.units]
    for visit in trace.visits:
        for unit in visit.units:
            used[unit].add(split.homes[split.segment(visit.id)])
    shared: list[tuple[int, tuple[int, ...]]] = []
    unused: list[tuple[int, int]] = []
    for unit, stages in enumerate(assignment.holders):
        several = len(stages) > 1
        if used[unit] != set(stages) and (used[unit] or several):
            raise ValueError(
                f"{trace.units[unit].name}: the assignment has it on stages {list(stages)}, and the step's visits use "
                f"it on {sorted(used[unit]) or 'none'}: what several stages hold, each of them must visit. Take "
                "another assignment (ya.schedules.assign of a trace of this loss)"
            )
        if several:
            shared.append((unit, stages))
        elif not used[unit] and stages[0] > 0:
            unused.append((unit, stages[0]))
    return tuple(shared), tuple(unused)


# ---- What crosses.

Takers = list[tuple[int, Argument]]
"""The visits of a segment that take one tensor, and which argument it is of each."""


def crossing(trace: Trace) -> list[list[Takers]]:
    """Returns the tensors of each flow of a step that is cut, in the order in which they travel."""
    return list(_crossing(trace, trace.cut).values())


def _crossing(trace: Trace, split: Split) -> dict[tuple[int, int], list[Takers]]:
    """Returns (source, target) -> what that segment takes of this one, every tensor once; by source, then target."""
    found: dict[tuple[int, int], dict[int, Takers]] = {}
    for visit in trace.visits:
        target = split.segment(visit.id)
        for argument in visit.cost.arguments:
            sources = sorted(set(map(split.segment, argument.made)))
            if len(sources) > 1:
                raise ValueError(
                    f"{visit.name} (visit {visit.id}): argument {argument.place} mixes, between visits, what segments "
                    f"{sources} have made, and no stage has all of it. Mix inside a visit: give it both"
                )
            if sources != [target]:
                tensors = found.setdefault((sources[0], target), {})
                tensors.setdefault(argument.number, []).append((visit.id, argument))
    return {ends: list(tensors.values()) for ends, tensors in sorted(found.items())}


# ---- Costs, where something has measured them.


def costs_of(visits: Sequence[Visit]) -> list[int]:
    """Returns the cost of each visit, 1 where nothing has measured them."""
    costs = [visit.cost for visit in visits]
    found = [cost.flops + cost.bwd_flops + cost.attention_flops + cost.bwd_attention_flops for cost in costs]
    return found if any(found) else [1] * len(found)
