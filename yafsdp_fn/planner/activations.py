"""What blocks need while a program runs, and where that is most.

    forward     holds what it takes and gives, and what its graph saves inside where that is kept
    backward    its own most, or that of the forward again; then lets go of all that, and of what it took
    update      what the optimizer allocates

A value that several visits take, such as a rotary table, is held once. What an offloaded visit saves is held until its
forward has copied it into a carry slot, unless something else holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from yafsdp_fn.layout import padded_numel
from yafsdp_fn.schedules.ops import Backward, Forward, Update, with_computes
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.trace import Trace, Unit, Visit


def shard_numel(trace: Trace, unit: Unit) -> int:
    """Elements of one rank's shard of `unit`."""
    return padded_numel(unit.numel, trace.ranks) // trace.ranks


class Peak(NamedTuple):
    """op: its number; the rest in bytes, as in `Memory`."""

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
    kept, saved = _kept(program), _saved(program)
    last_uses = {those: _last_uses(visits, those) for those in set(kept.values())}
    let_go = {(kept[m], saved[m]): _let_go(visits, kept[m], saved[m]) for m in kept}
    values, inner, grads = _Held(), _Held(), _Held()  # inner: of visits, with what the loss saved after them
    best, most = Peak(0, 0, 0, 0), -1

    def offer(number: int, own: int, logits: bool = False) -> None:
        nonlocal best, most
        saved, between = values.total + inner.total, grads.total
        if saved + between + own > most:
            most = saved + between + own
            best = Peak(number, saved, own * logits, between + own * (not logits))

    def update(number: int, units: Iterable[int]) -> None:
        nbytes, elements = trace.optimizer.step
        offer(number, nbytes * sum(shard_numel(trace, trace.units[unit]) for unit in units) // elements)

    for number, (op, compute) in enumerate(with_computes(program.ops, trace)):
        if isinstance(op, Update):
            update(number, op.units)
        if compute is None or not isinstance(op, Forward | Backward):
            continue
        m, visit = compute.microbatch, visits[op.visit]
        last = visit is visits[-1]
        taken = {value.number for value in visit.takes}
        gives = {value.number: value.nbytes for value in visit.gives if value.number not in taken}
        given = sum(gives.values())
        if isinstance(op, Forward):
            for value in visit.takes:
                values.put((m, value.number), value.nbytes)
            # without a graph it needs no more than its backward, which runs it again with more beside it
            offer(number, visit.peak_bytes if op.keep else given, last)
            for name, nbytes in gives.items():
                values.put((m, name), nbytes)
            inner.put((m, visit.id), visit.inner_bytes * op.keep)
            offer(number, visit.beside_peak_bytes, last)
            inner.put((m, visit.id), visit.inner_bytes * op.keep + visit.beside_bytes)
            for name in let_go[kept[m], saved[m]].get(visit.id, ()):
                values.drop((m, name))
            continue
        inner.drop((m, visit.id))
        for value in visit.gives:
            grads.put((m, value.number), value.grad_bytes)
        if visit.id in kept[m]:
            offer(number, visit.bwd_peak_bytes, last)
        else:
            offer(number, max(visit.peak_bytes, given + visit.bwd_peak_bytes), last)
        for value in visit.gives:
            grads.drop((m, value.number))
        for value in visit.takes:
            grads.put((m, value.number), value.grad_bytes)
        for name in last_uses[kept[m]].get(visit.id, ()):
            values.drop((m, name))
            grads.drop((m, name))
    if not program.updates:
        update(len(program.ops), (unit.id for unit in trace.units if unit.trainable))
    return best


def _kept(program: Program) -> dict[int, frozenset[int]]:
    """Microbatch -> the visits whose graphs it keeps."""
    return _forwards(program, lambda op: op.keep)


def _saved(program: Program) -> dict[int, frozenset[int]]:
    """Microbatch -> the visits that save their carries in carry slots."""
    return _forwards(program, lambda op: op.carry_slot is not None)


def _forwards(program: Program, which: Callable[[Forward], bool]) -> dict[int, frozenset[int]]:
    """Microbatch -> the visits of such forwards."""
    found: dict[int, set[int]] = {}
    for op, compute in with_computes(program.ops, program.trace):
        if compute is not None:
            those = found.setdefault(compute.microbatch, set())
            if isinstance(op, Forward) and which(op):
                those.add(op.visit)
    return {microbatch: frozenset(those) for microbatch, those in found.items()}


def _let_go(visits: tuple[Visit, ...], kept: frozenset[int], saved: frozenset[int]) -> dict[int, list[int]]:
    """Visit -> the values that nothing holds after its forward: all that take them have saved them in carry slots, and
    what gave them kept no graph."""
    held = {value.number for visit in visits for value in visit.gives if visit.id in kept}
    last: dict[int, int] = {}
    for visit in visits:
        for value in visit.takes:
            if visit.id in saved and value.number in visit.carries:
                last[value.number] = visit.id
            else:
                held.add(value.number)
    out: dict[int, list[int]] = {}
    for number, visit_id in last.items():
        if number not in held:
            out.setdefault(visit_id, []).append(number)
    return out


def _last_uses(visits: tuple[Visit, ...], kept: frozenset[int]) -> dict[int, list[int]]:
    """Visit -> the values that nothing needs after its backward. Backwards run from the last visit to the first: a
    value is needed until that of the first visit that takes it, or of the one that gives it where that keeps its graph.
    """
    until: dict[int, int] = {}
    for visit in reversed(visits):
        until.update({value.number: visit.id for value in visit.gives if visit.id in kept or value.number not in until})
        until.update({value.number: visit.id for value in visit.takes})
    out: dict[int, list[int]] = {}
    for value, visit_id in until.items():
        out.setdefault(visit_id, []).append(value)
    return out
