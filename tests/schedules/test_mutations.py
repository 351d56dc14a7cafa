"""Every small change of a right program is refused by `verify`, or leaves it right: nothing wrong is accepted.

The judge is `reference.right`, which executes a program on symbols and knows no rules. Of what is refused, a part would
have been right; how large it is is printed (pytest -s) and bounded.

SCHEDULE_MUTANTS=all tries every trace with every schedule, and many more pairs of changes.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.schedules.cases import LARGER, SCHEDULES, SMALL, program
from tests.schedules.mutants import mutants, relocated
from tests.schedules.reference import right
from tests.schedules.traces import on, trace_of, unit
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
    verify,
)

EVERY = os.environ.get("SCHEDULE_MUTANTS") == "all"
RULES = {
    *("form", "order", "weights", "carry", "secondary", "graph"),
    *("gradient", "early", "reduce", "once", "replicas", "norm", "update", "offload", "flow"),
}
Verdicts = Counter[tuple[str, bool]]
"""(rule that refuses, "" if none does; whether the result is right) -> how many"""


def refusal(mutant: Program) -> str:
    """The rule that refuses `mutant`, "" if none does."""
    try:
        verify(mutant)
    except Refused as refused:
        assert refused.rule in RULES and f"rule {refused.rule!r}" in str(refused)
        return refused.rule
    return ""


def judged(mutant: Program, verdicts: Verdicts) -> bool:
    """Counts the verdict on `mutant`, which must not be accepted if it is wrong. Gives whether it is accepted."""
    rule, fine = refusal(mutant), right(mutant)
    assert rule or fine, f"accepted, though wrong (updates {mutant.trace.update_when}):\n{mutant}"
    verdicts[rule, fine] += 1
    return not rule


def harmless(verdicts: Verdicts) -> float:
    """The share of refused programs that would have been right."""
    refused = {key: number for key, number in verdicts.items() if key[0]}
    fine = sum(number for (_, fine), number in refused.items() if fine)
    by_rule = ", ".join(f"{rule} {n}" for (rule, fine), n in sorted(refused.items()) if fine)
    print(
        f"\nrefused: {sum(refused.values())}, of these {fine} would have been right ({by_rule}); {verdicts['', True]} "
    )
    return fine / max(1, sum(refused.values()))


def neighbours(program: Program) -> Iterator[Program]:
    return itertools.chain(mutants(program), relocated(program))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_wrong_neighbour_of_a_small_program_is_accepted(schedule: str) -> None:
    """All that differ in one op from programs of up to three visits; by default every fourth one."""
    verdicts = Verdicts()
    for trace in SMALL.values():
        start = program(trace, schedule)
        assert judged(start, Verdicts())
        for number, mutant in enumerate(itertools.islice(neighbours(start), 0, None, 1 if EVERY else 4)):
            # of those that are refused, some are enough to estimate how many would have been right
            if EVERY or number % 2 == 0 or not refusal(mutant):
                judged(mutant, verdicts)
    assert verdicts["", True] > 25
    assert all(verdicts[rule, False] for rule in ("form", "order", "weights", "reduce", "secondary"))
    # a copy too many to the host, or from it, would do no harm, and is refused
    assert harmless(verdicts) < (0.25 if "offload" in schedule else 0.15)


def test_every_rule_refuses_something_wrong() -> None:
    rules = set()
    for schedule in ("zero3", "hsdp", "zero3, update after norm", "zero3, offload"):
        for trace in ("tied", "two microbatches"):
            for mutant in neighbours(program(SMALL[trace], schedule)):
                rule = refusal(mutant)
                if rule not in rules and not right(mutant):
                    rules.add(rule)
    assert rules == RULES


CASES = [
    (trace, schedule)
    for (i, trace), (j, schedule) in itertools.product(enumerate(LARGER), enumerate(SCHEDULES))
    if EVERY or (i + j) % 16 == 0
]


@pytest.mark.parametrize(("trace", "schedule"), CASES, ids=[" - ".join(case) for case in CASES])
def test_no_wrong_neighbour_of_a_larger_program_is_accepted(trace: str, schedule: str) -> None:
    start = program(LARGER[trace], schedule)
    assert judged(start, Verdicts())
    verdicts = Verdicts()
    for number, mutant in enumerate(neighbours(start)):
        if (EVERY or number % 4 == 0) and not refusal(mutant):
            judged(mutant, verdicts)
    assert verdicts["", True] > 15


def test_no_wrong_pair_of_changes_is_accepted() -> None:
    """Changes of changed programs that are still right; by default some, of every second small program."""
    rng, verdicts = random.Random(0), Verdicts()
    for trace, schedule in list(itertools.product(SMALL.values(), SCHEDULES))[:: 1 if EVERY else 2]:
        start = program(trace, schedule)
        once = [mutant for mutant in neighbours(start) if not refusal(mutant)]
        for mutant in rng.sample(once, min(len(once), 40 if EVERY else 1)):
            again = list(neighbours(mutant))
            for twice in again if EVERY else rng.sample(again, min(len(again), 30)):
                if not refusal(twice):
                    judged(twice, verdicts)
    assert verdicts["", True] > 300


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pair_of_changes_of_the_smallest_program(schedule: str) -> None:
    """One visit of one unit, whatever two changes do to it, also where the first alone is wrong; by default every
    fourth pair."""
    verdicts, tried = Verdicts(), 0
    for trace in SMALL if EVERY else ("one unit",):
        seen = set()
        for once in neighbours(program(SMALL[trace], schedule)):
            if once.ops in seen or refusal(once) == "form":
                continue
            seen.add(once.ops)
            for twice in itertools.islice(neighbours(once), 0 if EVERY else tried % 4, None, 1 if EVERY else 4):
                tried += 1
                if not refusal(twice) and twice.ops not in seen:
                    seen.add(twice.ops)
                    judged(twice, verdicts)
    print(f"\ntried: {tried} pairs of changes; {verdicts['', True]} different programs accepted, all right")
    assert verdicts["", True] > 15


# ---- every program of few ops


def alphabet(trace: Trace, slots: int, carries: int) -> list[Op]:
    """Ops on the units and visits of `trace`, with so many slots and gradient slots, and so many carry slots."""
    units, ops = range(len(trace.units)), list[Op]()
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
    if trace.update_when == "after norm":
        ops.append(Norm(tuple(units)))
    return ops


def alive(start: Program) -> bool:
    """Whether a program that begins with `start` can be accepted: it gets as far as an op that is surely refused."""
    with pytest.raises(Refused) as refused:
        verify(start._replace(ops=(*start.ops, Reduce((0,), (99,)))))
    return refused.value.op == len(start.ops)


TWO = [unit(0, "a"), unit(1, "b")]
WALKS: dict[str, tuple[Trace, int, int, int]] = {  # slots, carry slots, ops
    "one visit": (on(trace_of(TWO[:1], [[0]]), "ranks"), 2, 0, 5),
    "one visit, update": (on(trace_of(TWO[:1], [[0]]), "ranks", "any time"), 1, 0, 8),
    "one visit, update after the norm": (on(trace_of(TWO[:1], [[0]]), "ranks", "after norm"), 1, 0, 8),
    "one visit, replicas": (on(trace_of(TWO[:1], [[0]]), "replicas", "any time"), 1, 0, 8),
    "one visit, nodes": (on(trace_of(TWO[:1], [[0]]), "nodes"), 1, 0, 6),
    "two microbatches": (on(trace_of(TWO[:1], [[0]], 2), "ranks"), 1, 0, 7),
    "two visits of one unit": (on(trace_of(TWO[:1], [[0], [0]]), "ranks"), 1, 0, 7),
    "three visits of one unit": (on(trace_of(TWO[:1], [[0], [0], [0]]), "ranks"), 1, 0, 8),
    "one visit, two carry slots": (on(trace_of(TWO[:1], [[0]]), "ranks"), 1, 2, 7),
    "two visits, a carry slot": (on(trace_of(TWO[:1], [[0], [0]]), "ranks"), 1, 1, 7),
    "two units": (on(trace_of(TWO, [[0], [1]]), "ranks"), 1, 0, 10),
}


@pytest.mark.parametrize("name", WALKS)
def test_every_program_of_few_ops(name: str) -> None:
    """All programs from a few ops, in any order and number: what is accepted is right."""
    trace, slots, carries, length = WALKS[name]
    ops, begun, verdicts = alphabet(trace, slots, carries), [Program(trace, ())], Verdicts()
    for _ in range(length + EVERY):
        begun = [Program(trace, (*start.ops, op)) for start in begun for op in ops]
        begun = [start for start in begun if alive(start)]
        for start in begun:
            if not refusal(start):
                judged(start, verdicts)
    assert verdicts["", True] >= 8
