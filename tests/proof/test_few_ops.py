"""Every program of a few ops, in any order and number: what `verify` accepts is right.

SCHEDULE_MUTANTS=all has programs of one op more.
"""

from __future__ import annotations

import itertools

import pytest

from tests.harness.marks import by_day
from tests.program.traces import on, trace_of, unit
from tests.proof.verdicts import Verdicts, judged, refusal
from tests.schedules.cases import EVERY
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Exchange,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Program,
    Reduce,
    Refused,
    Stash,
    Trace,
    Update,
    UpdateWhen,
    verify,
)


def alphabet(trace: Trace, slots: int, carries: int) -> list[Op]:
    """Ops on the units and visits of `trace`, with so many slots and gradient slots, and so many carry slots."""
    units = range(len(trace.units))
    ops = list[Op]()
    keeps = (False, True) if EVERY or (len(units) == 1 and not carries) else (False,)
    for u, slot in itertools.product(units, range(slots)):
        ops += [Gather((u,), (slot,)), Reduce((u,), (slot,))]
        if trace.local_ranks < trace.ranks:
            ops += [Gather((u,), (slot,), "node"), Stash((u,), (slot,))]
    for visit, slot in itertools.product(trace.visits, range(slots)):
        assert len(visit.units) == len(visit.trained) == 1
        for microbatch in range(trace.microbatches):
            ops += [Forward(visit.id, (slot,), keep, microbatch) for keep in keeps]
            if True in keeps:
                ops += [Forward(visit.id, (slot,), True, microbatch, early=(grad,)) for grad in range(slots)]
            ops += [Backward(visit.id, (slot,), (grad,), microbatch) for grad in range(slots)]
            for carry in range(carries):
                ops += [Forward(visit.id, (slot,), False, microbatch, carry)]
                ops += [Backward(visit.id, (slot,), (grad,), microbatch, carry) for grad in range(slots)]
    for visit, carry in itertools.product(trace.visits, range(carries)):
        ops += [Offload(visit.id, carry), Fetch(visit.id, carry)]
    if trace.replicas > 1:
        ops += [AllReduce((u,)) for u in units]
    if trace.update_when != "never":
        ops += [Update((u,), part) for u in units for part in range(trace.parts(u))]
        ops += [Exchange((u,), part) for u in units for part in range(trace.parts(u) - 1)]
        ops.append(Norm(tuple(units)))
    return ops


def alive(start: Program) -> bool:
    """Whether a program that begins with `start` can be accepted: it gets as far as an op that is surely refused."""
    with pytest.raises(Refused) as refused:
        verify(start.with_ops((*start.ops, Reduce((0,), (99,)))))
    return refused.value.op == len(start.ops)


def of(*uses: int, mesh: str = "ranks", updates: UpdateWhen = "never", microbatches: int = 1) -> Trace:
    """A step of visits to a unit each."""
    units = [unit(0, "a"), unit(1, "b")][: max(uses) + 1]
    return on(trace_of(units, [[used] for used in uses], microbatches), mesh, updates)


WALKS: dict[str, tuple[Trace, int, int, int]] = {  # slots, carry slots, ops
    "one visit": (of(0), 2, 0, 5),
    "one visit, update": (of(0, updates="after norm"), 1, 0, 8),
    "one visit, replicas": (of(0, mesh="replicas", updates="after norm"), 1, 0, 8),
    "one visit, nodes": (of(0, mesh="nodes"), 1, 0, 6),
    "two microbatches": (of(0, microbatches=2), 1, 0, 7),
    "two visits of one unit": (of(0, 0), 1, 0, 7),
    "three visits of one unit": (of(0, 0, 0), 1, 0, 8),
    "one visit, two carry slots": (of(0), 1, 2, 7),
    "two visits, a carry slot": (of(0, 0), 1, 1, 7),
    "two units": (of(0, 1), 1, 0, 10),
}


DAILY = ("one visit, update",)


@pytest.mark.parametrize("name", by_day(WALKS, *DAILY))
def test_every_program_of_few_ops(name: str) -> None:
    trace, slots, carries, length = WALKS[name]
    ops = alphabet(trace, slots, carries)
    begun = [Program(trace, ())]
    verdicts = Verdicts()
    for _ in range(length + EVERY):
        begun = [Program(trace, (*start.ops, op)) for start in begun for op in ops]
        begun = [start for start in begun if alive(start)]
        for start in begun:
            if not refusal(start):
                judged(start, verdicts)
    assert verdicts["", True] >= 8
