"""A stage's program with its gathers, or its reductions, where a row of actions has them, in place of its own.

0UNSHARD        gather the units of segment 0 that are not there
0RESHARD        their slots are free: for segments that are never there at the same time
0REDUCE_GRAD    reduce what the units of segment 0 have added up, each in a gradient slot of its own
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from yafsdp_fn.schedules.build import begun_early, sums_over_stages
from yafsdp_fn.schedules.further_ops import AllReduce, Stash
from yafsdp_fn.schedules.ops import Backward, Forward, Gather, Op, Reduce
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.split import Call, Split
from yafsdp_fn.schedules.stages.action_rows import REDUCTION, WEIGHTS, Action
from yafsdp_fn.schedules.trace import Trace, writes_of


def literal(program: Program, actions: Sequence[Action], *, gathers: bool, reductions: bool) -> Program:
    """`program` with the gathers of `actions`, the row that its order was made of, with their reductions, or both."""
    if not gathers and not reductions:
        return program
    dropped = [*[Gather, Stash] * gathers, *[Reduce, AllReduce] * reductions]
    slots = _slots(program.trace, actions) if gathers else {}
    listed = list(_listed(program.trace, actions, slots, gathers, reductions))
    ops: list[Op] = list(listed[0])
    done = calls = 0
    ends = [end for _, end in _calls(program.trace, actions)]
    for op in program.ops:
        if isinstance(op, tuple(dropped)):
            continue
        if isinstance(op, Forward | Backward):
            visit = program.trace.visits[op.visit]
            if gathers and op.slots:
                op = op._replace(slots=tuple(slots[unit] for unit in visit.units))
            if reductions and isinstance(op, Backward) and op.grad_slots:
                op = op._replace(grad_slots=visit.trained)
            elif reductions and isinstance(op, Forward):
                op = op._replace(early=())
            done += 1
        ops.append(op)
        while calls < len(ends) and done == ends[calls] and isinstance(op, Forward | Backward):
            calls += 1
            ops += listed[calls]
    return Program(program.trace, tuple(begun_early(ops) if reductions else ops))


def _calls(trace: Trace, actions: Iterable[Action]) -> Iterator[tuple[Call, int]]:
    """Each call, and how many computes there are up to its end."""
    total = 0
    for action in actions:
        if action.call is not None:
            total += len(_visits(trace, action.segment))
            yield action.call, total


def _listed(
    trace: Trace, actions: Iterable[Action], slots: dict[int, int], gathers: bool, reductions: bool
) -> Iterator[list[Op]]:
    """The ops of a row's actions: those before its first call, and those after each of its calls."""
    held: Counter[int] = Counter()  # unit -> segments that want it
    added: set[int] = set()  # units with a gradient that is not reduced
    left = Counter(unit for now in trace.order for unit in writes_of(now, trace))
    ops: list[Op] = []
    for action in actions:
        visits = [trace.visits[number] for number in _visits(trace, action.segment)]
        units = tuple(dict.fromkeys(unit for visit in visits for unit in visit.units))
        if action.call is not None:
            yield ops
            ops = []
            if action.call.kind in ("backward", "weights"):
                trained = [unit for visit in visits for unit in visit.trained]
                added.update(trained)
                left.subtract(trained)
        elif gathers and action.word == "UNSHARD":
            missing = {unit for unit in units if not held[unit]}
            for visit in visits:
                new = tuple(unit for unit in visit.units if unit in missing)
                ops += [Gather(new, tuple(slots[unit] for unit in new))] * bool(new)
                missing.difference_update(new)
            held.update(units)
        elif gathers and action.word in WEIGHTS:
            held.subtract(units)
        elif reductions and action.word == REDUCTION:
            for visit in reversed(visits):
                ready = tuple(unit for unit in visit.trained if unit in added)
                added.difference_update(ready)
                ops += [Reduce(ready, ready)] * bool(ready)
                complete = tuple(unit for unit in ready if not left[unit])
                ops += [AllReduce(complete)] * bool(complete and trace.replicas > 1)
    yield ops + sums_over_stages(trace) * reductions


def _slots(trace: Trace, actions: Sequence[Action]) -> dict[int, int]:
    """Unit -> slot: segments that are there at the same time are in different ones, units of a size share them."""
    assert trace.split is not None and trace.stage is not None
    there: list[int] = []
    beside: dict[int, set[int]] = {}
    for action in actions:
        if action.word == "UNSHARD":
            beside.setdefault(action.segment, set()).update(there)
            for other in there:
                beside[other].add(action.segment)
            there.append(action.segment)
        elif action.word == "RESHARD":
            there.remove(action.segment)
    lane: dict[int, int] = {}
    for segment, others in beside.items():
        taken = {lane[other] for other in others if other in lane}
        lane[segment] = next(k for k in range(len(beside)) if k not in taken)
    uses = Counter(unit for segment in trace.split.of(trace.stage) for unit in _units(trace, segment))
    numbers: dict[tuple[int, ...], int] = {}
    slots: dict[int, int] = {}
    for segment in trace.split.of(trace.stage):
        sizes: Counter[int] = Counter()
        for unit in _units(trace, segment):
            size = trace.units[unit].gather_bytes
            key = (-1, unit) if uses[unit] > 1 else (lane.get(segment, -2), size, sizes[size])
            sizes[size] += 1
            slots[unit] = numbers.setdefault(key, len(numbers))
    return slots


def _units(trace: Trace, segment: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(unit for number in _visits(trace, segment) for unit in trace.visits[number].units))


def _visits(trace: Trace, segment: int) -> range:
    split: Split | None = trace.split
    assert split is not None
    return range(*split.segments[segment])
