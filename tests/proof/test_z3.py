"""z3, which may choose any order that the waits permit, agrees with `verify`, and has teeth of its own.

SCHEDULE_MUTANTS=all asks about 20,000 programs: `python -m tests.proof.compare_z3` prints what came out.
"""

from __future__ import annotations

import pytest

pytest.importorskip("z3", reason="z3-solver, of the dev extra, is not installed")

from tests.proof.compare_z3 import compare, programs, report
from tests.proof.reference import SHARDED
from tests.proof.smt import SmtProgram
from tests.proof.z3_orders import bad_order, opinion, waits_of
from tests.schedules.cases import EVERY, SMALL, program
from yafsdp_fn.schedules import Backward, Gather, Op, Program, Reduce, Refused, Update, verify


@pytest.mark.nightly
@pytest.mark.timeout(0 if EVERY else 120)
def test_verify_and_z3_agree() -> None:
    found = compare(20000 if EVERY else 12, programs(0))
    print("\n" + report(found))
    assert sum(number for (rule, _), number in found.said.items() if not rule) >= (2000 if EVERY else 3)
    assert sum(number for (_, says), number in found.said.items() if says == "goes wrong") >= (2000 if EVERY else 3)


def made(trace: str, schedule: str) -> Program:
    return verify(program(SMALL[trace], schedule))


def test_without_a_wait_z3_finds_the_order_that_goes_wrong() -> None:
    """Of the first step's waits, each that nothing else stands in for; the second step reads what it leaves."""
    terms = SmtProgram(made("tied", "zero3, update after norm"), SHARDED)
    waits = waits_of(terms)
    assert bad_order(terms, waits) is None
    needed = [
        (at, wait)
        for at, found in enumerate(waits)
        for wait in found
        if terms.events[at].step == 0 and not implied(terms, waits, at, wait)
    ]
    assert len(needed) >= 4
    for at, wait in needed:
        found = bad_order(terms, [[w for w in all_ if (k, w) != (at, wait)] for k, all_ in enumerate(waits)])
        assert found is not None, (terms.events[at], terms.events[wait])


def implied(terms: SmtProgram, waits: list[list[int]], later: int, earlier: int) -> bool:
    """Whether `later` follows `earlier` also by other waits, and by the order of streams."""
    reached = {earlier}
    for at in range(earlier + 1, later + 1):
        before = {wait for wait in waits[at] if (at, wait) != (later, earlier)}
        before |= {k for k in range(at) if terms.events[k].stream == terms.events[at].stream}
        if before & reached:
            reached.add(at)
    return later in reached


def test_an_order_is_told_in_words() -> None:
    terms = SmtProgram(made("two units", "zero3"), SHARDED)
    found = bad_order(terms, [[] for _ in terms.events])
    assert found is not None
    wrong, order = found
    assert len(order) == len(terms.events) and len(set(order)) > 10
    assert wrong.what.startswith(
        ("it reads no ", "the gradient of ", "it has no norm", "it updates weights of another")
    )


@pytest.mark.parametrize(
    ("trace", "schedule", "kind", "says"),
    [
        ("tied", "zero3", Gather, "it reads no "),
        ("two units", "zero3", Reduce, "the gradient of "),
        ("one unit", "zero3", Backward, "the loss goes on"),
        ("one unit", "zero3, update after norm", Update, "no optimizer"),
        ("a unit that is never visited", "zero3, update after norm", Update, "is not updated once a step"),
    ],
)
def test_what_lacks_an_op_goes_wrong(trace: str, schedule: str, kind: type[Op], says: str) -> None:
    whole = made(trace, schedule)
    at = max(at for at, op in enumerate(whole.ops) if isinstance(op, kind))
    bad = opinion(whole.with_ops((*whole.ops[:at], *whole.ops[at + 1 :])))
    assert bad is not None and says in bad.why, bad


def test_a_gradient_that_is_reduced_twice_is_named() -> None:
    whole = made("two units", "zero3")
    at = next(at for at, op in enumerate(whole.ops) if isinstance(op, Reduce))
    twice = whole.with_ops((*whole.ops[: at + 1], whole.ops[at], *whole.ops[at + 1 :]))
    with pytest.raises(Refused, match="rule 'reduce'"):
        verify(twice)
    bad = opinion(twice)
    assert bad is not None and bad.order is not None and "not there, or not once" in bad.why
