"""z3, which may choose any order that the waits permit, agrees with `verify`, and has teeth of its own.

SCHEDULE_MUTANTS=all asks about 20,000 programs and 4,000 pipelines: `python -m tests.proof.compare_z3` prints what came
out.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("z3", reason="z3-solver, of the dev extra, is not installed")

from tests.program.traces import cut, model, on
from tests.proof.changed import a_pipeline
from tests.proof.compare_z3 import a_program, compare, different, report
from tests.proof.overlapped import account, reaches, waits_of, without
from tests.proof.reference import SHARDED
from tests.proof.z3_orders import bad_order, opinion
from tests.schedules.cases import EVERY, SMALL, program
from yafsdp_fn.schedules import (
    Backward,
    Gather,
    Op,
    Program,
    Receive,
    Reduce,
    Refused,
    Send,
    Update,
    one_f_one_b,
    verify,
    zero3,
)


@pytest.mark.nightly
@pytest.mark.timeout(0 if EVERY else 120)
@pytest.mark.parametrize(
    ("drawn", "number", "accepted", "wrong"),
    [(a_program, 20000, 2000, 2000), (a_pipeline, 4000, 1000, 500)]
    if EVERY
    else [(a_program, 12, 3, 3), (a_pipeline, 16, 3, 1)],
)
def test_verify_and_z3_agree(drawn: Any, number: int, accepted: int, wrong: int) -> None:
    """Of programs, and of pipelines, so many are accepted, and so many that are refused go wrong."""
    found = compare(number, different(drawn, 0))
    print("\n" + report(found))
    assert sum(number for (rule, _), number in found.said.items() if not rule) >= accepted
    assert sum(number for (_, says), number in found.said.items() if says == "goes wrong") >= wrong


def made(trace: str, schedule: str) -> Program:
    return verify(program(SMALL[trace], schedule))


def test_without_a_wait_z3_finds_the_order_that_goes_wrong() -> None:
    """Of the first step's waits, each that nothing else stands in for; the second step reads what it leaves."""
    terms = account(made("tied", "zero3, update after norm"), SHARDED)
    waits = waits_of(terms.events)
    assert bad_order(terms, waits) is None
    needed = [
        (at, wait)
        for at, found in enumerate(waits)
        for wait in found
        if terms.events[at].step == 0 and not reaches(waits, terms.events, (at, wait))
    ]
    assert len(needed) >= 4
    for pair in needed:
        assert bad_order(terms, without(waits, pair)) is not None, [terms.events[at] for at in pair]


def test_without_a_wait_for_a_message_z3_finds_it_too() -> None:
    """Of the first step's waits each that is of messages; the second step reads what it leaves."""
    pipeline = verify(one_f_one_b(zero3())(cut(on(model(0, 2), "ranks"), (0, 1))))
    joint = account(pipeline, SHARDED)
    waits = waits_of(joint.events)
    assert bad_order(joint, waits) is None
    needed = [
        (at, wait)
        for at, found in enumerate(waits)
        for wait in found
        if joint.events[at].step == 0
        and any(isinstance(joint.events[event].op, Send | Receive) for event in (at, wait))
    ]
    assert len(needed) == 10
    for pair in needed:
        found = bad_order(joint, without(waits, pair))
        assert found is not None
        assert found[0].what == "it takes something else than what is for it"
        assert found[1][0].startswith("stage ")


def test_an_order_is_told_in_words() -> None:
    terms = account(made("two units", "zero3"), SHARDED)
    found = bad_order(terms, [[] for _ in terms.events])
    assert found is not None
    wrong, order = found
    assert len(order) == len(terms.events)
    assert len(set(order)) > 10
    assert wrong.what.startswith(
        ("it reads no ", "the gradient of ", "it has no norm", "it updates weights of another")
    )


@pytest.mark.parametrize(
    ("trace", "schedule", "kind", "says"),
    [
        ("tied", "zero3", Gather, "it reads no "),
        ("tied", "zero2", Reduce, "there is no ('grad slot'"),
        ("two microbatches", "zero3", Reduce, "the gradient of "),
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
    assert bad is not None
    assert bad.order is not None
    assert "not there, or not once" in bad.why
