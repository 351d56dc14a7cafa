"""`assign` and `cut`: what the one says, the other can do, for any order in which units are visited."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.program.traces import trace_of, unit
from tests.proof.overlapped import right
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.split import Argument
from yafsdp_fn.schedules import Assignment, Trace, assign, cut, gpipe, verify, zero2


def step(uses: Sequence[Sequence[int]], costs: Sequence[int] = ()) -> Trace:
    """Visits to `uses`, unit ids in order, each of which takes what the one before has made."""
    units = [unit(k, f"u{k}") for k in range(1 + max(max(of) for of in uses))]
    trace = trace_of(units, uses, 2)
    visits = []
    for visit in trace.visits:
        given = (Argument(0, visit.id, (visit.id - 1,), 64, 32),) * bool(visit.id)
        cost = Cost(flops=costs[visit.id] if costs else 0, arguments=given)
        visits.append(visit._replace(cost=cost))
    return trace._replace(visits=tuple(visits), loss_of=(len(visits) - 1,))


Segments = Sequence[tuple[int, int]]


def dearest(trace: Trace, segments: Segments) -> int:
    return max(sum(visit.cost.flops for visit in trace.visits[slice(*ends)]) for ends in segments)


def cuts(visits: int, segments: int) -> Iterator[Segments]:
    for bounds in itertools.combinations(range(1, visits), segments - 1):
        yield [*itertools.pairwise((0, *bounds, visits))]


@pytest.mark.parametrize(
    ("uses", "stages", "segments"),
    [
        pytest.param([[0], [1], [0]], 2, ((0, 2), (2, 3)), id="a tied table is all that the head uses"),
        pytest.param(
            [[0], [1], [1], [2], [2], [3]], 3, ((0, 2), (2, 4), (4, 6)), id="layers twice in a row, across borders"
        ),
        pytest.param([[0], [0], [0], [0]], 3, ((0, 1), (1, 2), (2, 4)), id="one unit is all there is"),
    ],
)
def test_what_is_assigned_can_be_cut(uses: Sequence[Sequence[int]], stages: int, segments: Any) -> None:
    whole = cut(step(uses), assign(step(uses), stages))
    assert whole.split is not None
    assert whole.split.segments == segments
    assert right(verify(gpipe(zero2())(on_stages(whole))))


def on_stages(trace: Trace) -> Trace:
    assert trace.split is not None
    return trace._replace(mesh=(("stage", trace.split.stages), ("shard", 2)))


def test_any_order_of_visits() -> None:
    """Units that come back, twice in a row and in several places: what was assigned is cut as evenly, and proved."""
    rng = random.Random(0)
    for _ in range(100):
        count = rng.randrange(1, 6)
        uses = [
            sorted(rng.sample(range(count), rng.choice((1, 1, 1, min(2, count))))) for _ in range(rng.randrange(2, 9))
        ]
        trace = step(
            [*([k] for k in range(count)), *uses], [rng.choice((1, 1, 2, 5)) for _ in range(count + len(uses))]
        )
        stages, per_stage = rng.choice([(2, 1), (3, 1), (2, 2), (1, 2)])
        if stages * per_stage > len(trace.visits):
            continue
        assignment = assign(trace, stages, per_stage=per_stage)
        whole = on_stages(cut(trace, assignment))
        assert whole.split is not None
        used = [{unit for visit in trace.visits[slice(*ends)] for unit in visit.units} for ends in whole.split.segments]
        assert used == [{u for u, of in enumerate(assignment.units) if s in of} for s in range(len(used))]
        assert dearest(trace, whole.split.segments) == min(
            dearest(trace, of) for of in cuts(len(trace.visits), len(used))
        )
        verify(gpipe(zero2())(whole))


def test_segments_begin_at_units_by_name() -> None:
    """By hand: uneven, a unit that two segments use, and two segments on each stage."""
    trace = step([[0], [1], [2], [3], [4], [0]])
    for at, options, segments in (
        (["u3"], {"stages": 2}, ((0, 3), (3, 6))),
        (["u4"], {"stages": 2}, ((0, 4), (4, 6))),
        (["u1", "u2", "u4"], {"stages": 2, "per_stage": 2, "shape": "v"}, ((0, 1), (1, 2), (2, 4), (4, 6))),
    ):
        assignment = assign(trace, at=at, **options)
        whole = cut(trace, assignment)
        assert whole.split is not None
        assert whole.split.segments == segments
        assert assignment.units[0] == ((0, len(segments) - 1))
        assert assignment.homes == (assign(trace, **options).homes)
    for stages, wrong in ((2, []), (2, ["u1", "u2"]), (2, ["u0"]), (2, ["u9"]), (2, "u1"), (3, ["u3", "u1"])):
        told = rf"^assign\(at={re.escape(repr(wrong))}\): expected a list of {stages - 1} names of units, "
        with pytest.raises(ValueError, match=told + ".*visited are u0, u1, u2, u3, u4$"):
            assign(trace, stages, at=wrong)


def test_what_no_visit_uses_is_where_the_assignment_has_it() -> None:
    trace = step([[0], [2]])  # and unit 1
    homes = (0, 1)
    first, second = (cut(trace, Assignment(((0,), of, (1,)), homes)) for of in ((), (1,)))
    assert first.split is not None
    assert second.split is not None
    assert (first.split.unused, second.split.unused) == ((), ((1, 1),))
    for whole, stage in (first, 0), (second, 1):
        made = verify(gpipe(zero2())(on_stages(whole)))
        assert [1 in program.trace.trained for program in made.by_stage] == [stage == 0, stage == 1]


@pytest.mark.parametrize(
    ("uses", "units", "message"),
    [
        ([[0, 1]], ((0,), (1,)), r"u0\+u1 \(visit 0\): its units are in different segments, and .* come to segment 0"),
        ([[0], [1], [0]], ((0,), (1,)), r"u0 \(visit 2\): its units are in segments \[0\], .* have come to segment 1"),
        ([[1], [0]], ((0,), (1,)), r"u1 \(visit 0\): its units are in segments \[1\]"),
        ([[0], [1]], ((0,), (0,)), "no visit of the step is in segment 1 of the assignment's 2"),
        ([[0], [1]], ((0, 1), (1,)), r"u0: the assignment has it on stages \[0, 1\], .* use it on \[0\]: what several"),
        ([[0], [2]], ((0,), (0, 1), (1,)), r"u1: the assignment has it on stages \[0, 1\], .* use it on none"),
        ([[0], [1]], ((0,),), "the assignment is of 1 units, the step has 2"),
    ],
)
def test_what_cannot_be_cut(uses: Sequence[Sequence[int]], units: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(step(uses), Assignment(units, (0, 1)))
