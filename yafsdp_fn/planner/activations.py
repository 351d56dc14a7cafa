"""Counts the bytes that blocks need while a program runs, and finds where they are most.

    forward     holds what it takes and gives, and what its graph saves inside where that is kept
    backward    its own most, or that of the forward again; then lets go of all that, and of what it took
    in halves   the first is as a backward, and leaves the factors of products of weights' gradients to the second
    update      what the optimizer allocates

A value that several visits take, such as a rotary table, is held once. What an offloaded visit saves is held until its
forward has copied it into a carry slot, unless something else holds it.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from yafsdp_fn.program.ops import Backward, Forward, Update
from yafsdp_fn.program.program import Program, after_program
from yafsdp_fn.program.trace import Trace, UnitSpec
from yafsdp_fn.util.mesh_axes import padded_numel


def shard_numel(trace: Trace, unit: UnitSpec) -> int:
    """Elements of one rank's shard of `unit`."""
    ranks = trace.ranks_of(unit)
    return padded_numel(unit.numel, ranks) // ranks


class Peak(NamedTuple):
    """The memory that blocks need at an op. op: its number; the rest in bytes, as in `Memory`."""

    op: int
    activations: int
    logits: int
    workspace: int


class _Held(dict[tuple[int, int], int]):
    """(microbatch, number of a value or visit) -> bytes, and their `total`."""

    total = 0

    def put(self, key: tuple[int, int], nbytes: int) -> None:
        self.drop(key)
        self[key] = nbytes
        self.total += nbytes

    def drop(self, key: tuple[int, int]) -> None:
        self.total -= self.pop(key, 0)


def peak_of(program: Program) -> Peak:
    """Walks the ops: what is held when each runs, and what it has allocated itself."""
    trace = program.trace
    visits = trace.visits
    kept = _forwards(program, lambda op: op.keep)
    saved = _forwards(program, lambda op: op.carry_slot is not None)
    ends = {both: _ends(trace, *both) for both in {(kept[m], saved[m]) for m in kept}}
    values, inner, grads = _Held(), _Held(), _Held()  # inner: of visits, with what the loss saved after them
    peaks: list[Peak] = []

    def offer(number: int, own: int, logits: bool = False) -> None:
        peaks.append(Peak(number, values.total + inner.total, own * logits, grads.total + own * (not logits)))

    def update(number: int, units: Iterable[int]) -> None:
        nbytes, elements = trace.optimizer.step
        offer(number, nbytes * sum(shard_numel(trace, trace.units[unit]) for unit in units) // elements)

    for number, op in enumerate(program.ops):
        if isinstance(op, Update):
            update(number, op.units)
        if not isinstance(op, Forward | Backward):
            continue
        m, visit, cost = op.microbatch, op.visit, visits[op.visit].cost
        last = visit == len(visits) - 1
        taken = {value.number for value in cost.takes}
        gives = {value.number: value.nbytes for value in cost.gives if value.number not in taken}
        given = sum(gives.values())
        if isinstance(op, Forward):
            for value in cost.takes:
                values.put((m, value.number), value.nbytes)
            # without a graph it needs no more than its backward, which runs it again with more beside it
            offer(number, cost.peak_bytes if op.keep else given, last)
            for name, nbytes in gives.items():
                values.put((m, name), nbytes)
            inner.put((m, visit), cost.inner_bytes * op.keep)
            offer(number, cost.beside_peak_bytes, last)
            inner.put((m, visit), cost.inner_bytes * op.keep + cost.beside_bytes)
            for name in ends[kept[m], saved[m]].forward.get(visit, ()):
                values.drop((m, name))
            continue
        if op.half == "weights":
            offer(number, 0)
            inner.drop((m, visit))
            continue
        inner.drop((m, visit))
        for value in cost.gives:
            grads.put((m, value.number), value.grad_bytes)
        again = max(cost.peak_bytes, given + cost.bwd_peak_bytes)
        offer(number, cost.bwd_peak_bytes if visit in kept[m] else again, last)
        for value in cost.gives:
            grads.drop((m, value.number))
        for value in cost.takes:
            grads.put((m, value.number), value.grad_bytes)
        for name in ends[kept[m], saved[m]].backward.get(visit, ()):
            values.drop((m, name))
            grads.drop((m, name))
        if op.half == "inputs":
            inner.put((m, visit), cost.between_bytes)
    for op in after_program(trace.trained, trace.lent) if not program.has_updates else ():
        if isinstance(op, Update):
            update(len(program.ops), op.units)
    return max(peaks, key=lambda peak: sum(peak[1:]))


def _forwards(program: Program, which: Callable[[Forward], bool]) -> dict[int, frozenset[int]]:
    """Microbatch -> the visits of such forwards: those that keep their graphs, or that save carries in carry slots."""
    found: dict[int, set[int]] = {microbatch: set() for microbatch in range(program.trace.microbatches)}
    for op in program.ops:
        if isinstance(op, Forward) and which(op):
            found[op.microbatch].add(op.visit)
    return {microbatch: frozenset(those) for microbatch, those in found.items()}


def _holders(trace: Trace, kept: frozenset[int], saved: frozenset[int]) -> dict[int, list[int]]:
    """Value -> the visits that hold it until their backward: that have it in the graph they keep, or that save what
    they take, to run again. What nobody takes and no graph is known to leave out is held by the visit that gave it."""
    holders: dict[int, list[int]] = {}
    leaving = (
        {end - 1 for n, (_, end) in enumerate(trace.split.segments) if trace.split.leaving(n)} if trace.split else ()
    )
    for visit in trace.visits:
        cost, keeps = visit.cost, visit.id in kept
        for value in cost.takes:
            in_slot = visit.id in saved and value.number in cost.carries
            free = value.number in cost.unsaved if keeps else in_slot
            holders.setdefault(value.number, []).extend([] if free else [visit.id])
        for value in cost.gives:
            alone = value.number not in holders and visit.id not in leaving
            free = value.number in cost.unsaved or not (keeps or alone)
            holders.setdefault(value.number, []).extend([] if free else [visit.id])
    return holders


def held_values(trace: Trace) -> tuple[int, int]:
    """Bytes of values that are held between the last forward of a microbatch and its first backward, whatever keeps its
    graph; and of those that are unless what saves them is offloaded."""
    always: dict[int, int] = {}
    movable: dict[int, int] = {}
    for visit in trace.visits:
        for value in visit.cost.takes:
            if value.number not in visit.cost.unsaved:
                moves = value.number in visit.cost.carries and trace.split is None
                (movable if moves else always)[value.number] = value.nbytes
    return sum(always.values()), sum(nbytes for number, nbytes in movable.items() if number not in always)


class _Ends(NamedTuple):
    """The values that nothing holds any more after a visit's forward, and after its backward, by visit."""

    forward: dict[int, list[int]]
    backward: dict[int, list[int]]


def _ends(trace: Trace, kept: frozenset[int], saved: frozenset[int]) -> _Ends:
    """Returns when values end: with the backward of the first visit that holds them, since backwards run from the last
    visit to the first; if none does, with the forward of the last that uses them."""
    last = {value.number: visit.id for visit in trace.visits for value in (*visit.cost.gives, *visit.cost.takes)}
    holders = _holders(trace, kept, saved)
    return _Ends(
        _by_visit({number: visit for number, visit in last.items() if not holders[number]}),
        _by_visit({number: min(visits) for number, visits in holders.items() if visits}),
    )


def _by_visit(last: dict[int, int]) -> dict[int, list[int]]:
    """Visit -> values, of value -> visit."""
    out: dict[int, list[int]] = {}
    for value, visit in last.items():
        out.setdefault(visit, []).append(value)
    return out
