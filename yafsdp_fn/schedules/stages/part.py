"""The part of a step that is one stage's: its computes in the order of its calls.

calls of a stage    F0 F1 B0 F2 B1 B2
order               forwards of the segment's visits, microbatch 0; ... ; backwards in reverse, microbatch 0; ...
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from yafsdp_fn.schedules.split import Call
from yafsdp_fn.schedules.trace import Compute, Trace, Visit, elsewhere, writes_of


def part_of(trace: Trace, stage: int, calls: Sequence[Call]) -> Trace:
    """What `stage` does of the step `trace`, in the order of `calls`. Any schedule builds a program from it."""
    split = trace.split
    assert split is not None and trace.stage is None, "a whole step that is split"
    held = units_of(trace, stage)
    here = {number for segment in split.of(stage) for number in range(*split.segments[segment])}
    visits = tuple(v if v.id in here else Visit(v.id, v.name, (), ()) for v in trace.visits)
    units = tuple(unit if unit.id in held else elsewhere(unit) for unit in trace.units)
    lent = tuple(of for of in trace.lent if of.unit in held)
    shards = _of_units(trace.optimizer.shards, trace, held)
    optimizer = trace.optimizer._replace(shards=shards)
    own = trace._replace(units=units, visits=visits, lent=lent, optimizer=optimizer, stage=stage)
    return own._replace(order=tuple(_closing(own, list(_computes(own, calls)))))


def units_of(trace: Trace, stage: int) -> frozenset[int]:
    """The units that `stage` holds: those that its visits use; the first stage also those that no visit uses."""
    assert trace.split is not None
    home = [trace.split.homes[trace.split.segment(visit.id)] for visit in trace.visits]
    used = {unit for visit in trace.visits for unit in visit.units}
    own = {unit for visit in trace.visits if home[visit.id] == stage for unit in visit.units}
    return frozenset(own | ({unit.id for unit in trace.units} - used if stage == 0 else set()))


def _of_units(shards: tuple[tuple[int, int], ...], trace: Trace, held: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """`OptimizerMemory.shards` of the units in `held`: of units of one size alike."""
    every = Counter(trace.units[unit].numel for unit in trace.trained)
    here = Counter(trace.units[unit].numel for unit in trace.trained if unit in held)
    return tuple((numel, nbytes * here[numel] // every[numel]) for numel, nbytes in shards if here[numel])


def _computes(trace: Trace, calls: Sequence[Call]) -> Iterator[Compute]:
    assert trace.split is not None
    for kind, segment, microbatch in calls:
        visits = range(*trace.split.segments[segment])
        for visit in visits if kind == "forward" else reversed(visits):
            yield Compute(kind, visit, microbatch)


def _closing(trace: Trace, order: Sequence[Compute]) -> Iterator[Compute]:
    """`order` with the units whose gradient is complete, in a microbatch, after each compute."""
    last: dict[tuple[int, int], int] = {}  # (unit, microbatch) -> the compute that writes its gradient last
    for index, now in enumerate(order):
        last |= {(unit, now.microbatch): index for unit in writes_of(now, trace)}
    for index, now in enumerate(order):
        closed = (unit for unit in writes_of(now, trace) if last[unit, now.microbatch] == index)
        yield now._replace(closes=tuple(closed))
