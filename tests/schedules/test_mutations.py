"""Every small change of a right program is refused by `verify`, or leaves it right: nothing wrong is accepted.

The judge is `reference.run`, which executes a program on symbols and knows no rules.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.schedules.reference import expected, run
from tests.schedules.traces import model, together, trace_of, unit
from yafsdp_fn.schedules import (
    Backward,
    Forward,
    Gather,
    Op,
    Program,
    Reduce,
    Refused,
    Trace,
    remat,
    verify,
    zero2,
    zero3,
)

SCHEDULES = {
    "zero3": zero3(),
    "on demand": zero3(prefetch=0),
    "wide": zero3(prefetch=2),
    "remat": zero3(remat=remat.first(2)),
    "resident": zero3(resident=1),
    "zero2": zero2(remat=remat.all),
}
TRACES = {
    "one layer": model(1),
    "three layers": model(3),
    "two microbatches": model(2, 2),
    "tied": model(2, tied=True),
    "frozen stack": model(2, stacks=2, frozen=True),
    "scanned twice": model(3, twice=True),
    "unrolled": model(3, unroll=2),
    "one scan over two stacks": together(3),
    "one unit, two visits": trace_of([unit(0, "a")], [[0], [0]], 2),
    "interleaved": together(2, alternating=True),
    "forward only": model(3, backward=False),
}
CASES = [
    *((trace, schedule) for trace in TRACES for schedule in ("zero3", "remat")),
    *(("two microbatches", schedule) for schedule in SCHEDULES if schedule not in ("zero3", "remat")),
]


def edits(op: Op, trace: Trace) -> Iterator[Op]:
    """`op` with one field, or one number in a field, changed."""
    numbers = range(-1, len(trace.units) + 2)
    for name, value in op._asdict().items():
        if isinstance(value, bool):
            yield op._replace(**{name: not value})
        elif isinstance(value, int):
            yield from (op._replace(**{name: n}) for n in range(-1, len(trace.visits) + 1) if n != value)
        else:
            for at, old in enumerate(value):
                for new in numbers:
                    if new != old:
                        yield op._replace(**{name: (*value[:at], new, *value[at + 1 :])})
            yield op._replace(**{name: value[1:]})
            yield op._replace(**{name: (*value, 0)})


def mutants(program: Program) -> Iterator[Program]:
    """Programs that differ in one op: dropped, doubled, moved, changed."""
    ops = program.ops
    for at, op in enumerate(ops):
        rest = (*ops[:at], *ops[at + 1 :])
        yield Program(program.trace, rest)
        for to in range(len(ops)):
            yield Program(program.trace, (*ops[:to], op, *ops[to:]))
            if to not in (at, at - 1):
                yield Program(program.trace, (*rest[:to], op, *rest[to:]))
        for new in edits(op, program.trace):
            yield Program(program.trace, (*ops[:at], new, *ops[at + 1 :]))


def judge(program: Program, right: Any) -> tuple[str, bool]:
    """The rule that refuses `program` ("" if none does), and whether it computes the right result."""
    try:
        verify(program)
        rule = ""
    except Refused as refusal:
        rule = refusal.rule
    return rule, run(program) == right


def relocated(program: Program) -> Iterator[Program]:
    """Programs where one gather goes to another slot, and with it what reads it, or one gradient does."""
    slots = range(len(program.trace.units) + 2)
    for at, op in enumerate(program.ops):
        if isinstance(op, Gather):
            yield from (_moved(program, range(at, len(program.ops)), op.units[0], "slots", new) for new in slots)
        if isinstance(op, Reduce):
            yield from (_moved(program, range(at, -1, -1), op.units[0], "grad_slots", new) for new in slots)


def _moved(program: Program, span: range, unit: int, field: str, new: int) -> Program:
    """The ops of `span` with `unit` in slot `new`, up to the next gather (or reduction) of that unit."""
    ops = list(program.ops)
    for k in span:
        op = ops[k]
        kinds = (Gather, Forward, Backward) if field == "slots" else (Reduce, Backward)
        if not isinstance(op, kinds):
            continue
        visit = None if isinstance(op, Gather | Reduce) else program.trace.visits[op.visit]
        ids = op.units if visit is None else visit.units if field == "slots" else visit.trained
        if unit not in ids:
            continue
        if k != span.start and isinstance(op, Gather | Reduce):
            break
        old = getattr(op, field)
        ops[k] = op._replace(**{field: tuple(new if i == unit else slot for i, slot in zip(ids, old, strict=True))})
    return Program(program.trace, tuple(ops))


@pytest.mark.parametrize(("trace", "schedule"), CASES, ids=[" - ".join(case) for case in CASES])
def test_no_wrong_neighbour_is_accepted(trace: str, schedule: str) -> None:
    program = SCHEDULES[schedule](TRACES[trace])
    right = expected(program.trace)
    assert judge(program, right) == ("", True)
    verdicts = Counter[tuple[str, bool]]()
    for mutant in (*mutants(program), *relocated(program)):
        verdict = judge(mutant, right)
        assert verdict != ("", False), f"accepted, though wrong:\n{mutant.ops}"
        verdicts[verdict] += 1
    # both kinds were there: changes that do no harm and changes of every other sort
    assert verdicts["", True] and verdicts["order", False] and verdicts["weights", False] and verdicts["form", False]
    if program.count(Reduce):
        assert verdicts["reduce", False] and verdicts["once", False]
    # harmless changes that are refused: a read of a wrong slot whose kept graph is right, and empty ops
    assert {rule for rule, fine in verdicts if fine} <= {"", "weights", "form", "graph"}


@pytest.mark.parametrize("trace", ["three layers", "two microbatches", "tied", "one unit, two visits", "interleaved"])
def test_no_wrong_pair_of_changes_is_accepted(trace: str) -> None:
    rng = random.Random(0)
    seen = Counter[tuple[str, bool]]()
    program = zero3()(TRACES[trace])
    right = expected(program.trace)
    accepted = [mutant for mutant in (*mutants(program), *relocated(program)) if not judge(mutant, right)[0]]
    for once in rng.sample(accepted, 8):
        for twice in rng.sample([*mutants(once), *relocated(once)], 60):
            verdict = judge(twice, right)
            assert verdict != ("", False), f"accepted, though wrong:\n{twice.ops}"
            seen[verdict] += 1
    assert seen["", True] and sum(seen[rule, fine] for rule, fine in seen if rule) > 100


def test_every_rule_is_needed_by_some_wrong_program() -> None:
    rules = set()
    for trace in ("two microbatches", "interleaved"):
        program = zero3()(TRACES[trace])
        right = expected(program.trace)
        for mutant in (*mutants(program), *relocated(program)):
            rule, fine = judge(mutant, right)
            rules |= set() if fine else {rule}
    assert rules == {"form", "order", "weights", "graph", "gradient", "reduce", "once"}
