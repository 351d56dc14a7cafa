"""What blocks need while a program runs, and where that is most.

    forward     holds what it takes and gives, and what its graph saves inside where that is kept
    backward    its own most, or that of the forward again; then lets go of all that, and of what it took
    update      what the optimizer allocates

A value that several visits take, such as a rotary table, is held once.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    kept = _kept(program)
    last_uses = {those: _last_uses(visits, those) for those in set(kept.values())}
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
    found: dict[int, set[int]] = {}
    for op, compute in with_computes(program.ops, program.trace):
        if compute is not None:
            kept = found.setdefault(compute.microbatch, set())
            if isinstance(op, Forward) and op.keep:
                kept.add(op.visit)
    return {microbatch: frozenset(kept) for microbatch, kept in found.items()}


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
