"""Every small change of a right program is refused by `verify`, or leaves it right: nothing wrong is accepted.

Of what is refused, a part would have been right; how large it is is printed (pytest -s) and bounded.

SCHEDULE_MUTANTS=all tries every trace with every schedule, and many more pairs of changes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.harness.marks import nightly
from tests.proof.mutants import mutants, relocated
from tests.proof.overlapped import right
from tests.proof.verdicts import RULES, Verdicts, harmless, judged, refusal
from tests.schedules.cases import EVERY, LARGER, SCHEDULES, SMALL, program
from yafsdp_fn.schedules import Program


def neighbours(program: Program) -> Iterator[Program]:
    return itertools.chain(mutants(program), relocated(program))


@pytest.mark.parametrize(("first", "each"), [(0, 16), nightly(0, 8), nightly(4, 8)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_wrong_neighbour_of_a_small_program_is_accepted(schedule: str, first: int, each: int) -> None:
    """Those that differ in one op from programs of up to three visits: one of so many; SCHEDULE_MUTANTS=all: all."""
    verdicts = Verdicts()
    for trace in SMALL.values():
        start = program(trace, schedule)
        assert judged(start, Verdicts())
        for number, mutant in enumerate(itertools.islice(neighbours(start), first, None, 1 if EVERY else each)):
            # of those that are refused, some are enough to estimate how many would have been right
            if EVERY or number % 2 == 0 or not refusal(mutant):
                judged(mutant, verdicts)
    assert verdicts["", True] > 12
    assert all(verdicts[rule, False] for rule in ("form", "order", "weights", "reduce", "secondary"))
    # a copy too many to the host, or from it, would do no harm, and is refused
    assert harmless(verdicts) < (0.25 if "offload" in schedule else 0.15)


@pytest.mark.nightly  # by day `test_rules.py` has a program that each rule refuses
def test_every_rule_refuses_something_wrong() -> None:
    rules = set()
    for schedule in ("zero3", "hsdp", "zero3, update after norm", "zero3, offload"):
        for trace in ("tied", "two microbatches"):
            for mutant in neighbours(program(SMALL[trace], schedule)):
                rule = refusal(mutant)
                if rule not in rules and not right(mutant):
                    rules.add(rule)
                    if rules == RULES:
                        return
    assert rules == RULES


CASES = [
    (trace, schedule)
    for (i, trace), (j, schedule) in itertools.product(enumerate(LARGER), enumerate(SCHEDULES))
    if EVERY or (i + j) % 16 == 0
]
SAMPLE = [case if at % 6 == 0 else nightly(*case) for at, case in enumerate(CASES)]


@pytest.mark.nightly
@pytest.mark.parametrize(("trace", "schedule"), SAMPLE, ids=[" - ".join(case) for case in CASES])
def test_no_wrong_neighbour_of_a_larger_program_is_accepted(trace: str, schedule: str) -> None:
    start = program(LARGER[trace], schedule)
    assert judged(start, Verdicts())
    verdicts = Verdicts()
    for number, mutant in enumerate(neighbours(start)):
        if (EVERY or number % 4 == 0) and not refusal(mutant):
            judged(mutant, verdicts)
    assert verdicts["", True] > 15


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, 2])
def test_no_wrong_pair_of_changes_is_accepted(first: int) -> None:
    """Changes of changed programs that are still right: some, of every fourth small program; SCHEDULE_MUTANTS=all: of
    all."""
    rng = random.Random(first)
    verdicts = Verdicts()
    for trace, schedule in list(itertools.product(SMALL.values(), SCHEDULES))[first :: 1 if EVERY else 4]:
        start = program(trace, schedule)
        once = [mutant for mutant in neighbours(start) if not refusal(mutant)]
        for mutant in rng.sample(once, min(len(once), 40 if EVERY else 1)):
            again = list(neighbours(mutant))
            for twice in again if EVERY else rng.sample(again, min(len(again), 30)):
                if not refusal(twice):
                    judged(twice, verdicts)
    assert verdicts["", True] > 150


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pair_of_changes_of_the_smallest_program(schedule: str) -> None:
    """One visit of one unit, whatever two changes do to it, also where the first alone is wrong; by default every
    eighth pair."""
    verdicts = Verdicts()
    tried = 0
    for trace in SMALL if EVERY else ("one unit",):
        seen = set()
        for once in neighbours(program(SMALL[trace], schedule)):
            if once.ops in seen or refusal(once) == "form":
                continue
            seen.add(once.ops)
            for twice in itertools.islice(neighbours(once), 0 if EVERY else tried % 8, None, 1 if EVERY else 8):
                tried += 1
                if not refusal(twice) and twice.ops not in seen:
                    seen.add(twice.ops)
                    judged(twice, verdicts)
    print(f"\ntried: {tried} pairs of changes; {verdicts['', True]} different programs accepted, all right")
    assert verdicts["", True] > 15
