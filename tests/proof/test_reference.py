"""The interpreter that judges programs tells right from wrong, each kind of mistake where it shows."""

from __future__ import annotations

import pytest

from tests.program.traces import unit
from tests.proof.listed import Edit, drop, move, put, replace
from tests.proof.overlapped import Execution, account, as_issued, right
from tests.proof.reference import ALIASED_WEIGHTS, MODES, SHARDED, Mode
from tests.proof.test_verify import WHOLE
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Forward,
    Gather,
    Norm,
    Program,
    Reduce,
    Trace,
    Update,
    Visit,
    chained_order,
    verify,
)

UNIT = [unit(0, "a")]
VISITS = (Visit(0, "a", (0,), ()), Visit(1, "a", (0,), (0,)))
LATE_USE = Program(
    Trace(tuple(UNIT), VISITS, chained_order(VISITS, 1), (("shard", 2),), 1, "after norm"),
    (
        Gather((0,), (0,)),
        *(Forward(0, (0,), True), Forward(1, (0,), True)),
        *(Backward(1, (0,), (0,)), Reduce((0,), (0,))),
        *(Backward(0, (0,), ()), Norm((0,)), Update((0,))),
    ),
)
"""Visit 0 trains nothing: the gradient is complete before the last use."""


def wrong_in(edit: Edit, program: Program) -> set[Mode]:
    """The modes in which the changed program gives another result."""
    return {mode for mode in MODES if not right(edit(program), modes=[mode])}


def last(program: Program) -> Program:
    """The backward of visit 0 is the last op."""
    ops = program.ops
    return program.with_ops((*ops[:5], *ops[6:], ops[5]))


def test_right_programs_are_right() -> None:
    for program in (WHOLE, verify(LATE_USE)):
        assert wrong_in(lambda program: program, program) == set()


@pytest.mark.parametrize(
    ("edit", "program", "modes"),
    [
        # slots are the shards: a gather that is missing does no harm; an update before the last use does everywhere
        (drop("gather a[2]"), WHOLE, {SHARDED}),
        (drop("gather a[0] ->"), WHOLE, {SHARDED}),  # carried over: wrong from the second step on
        (replace("gather a[0] ->", Gather((1,), (0,), "node")), WHOLE, {SHARDED}),
        (last, LATE_USE, set(MODES)),
        # gradient slots are the shards: nothing is reduced, so that a reduction that is missing does no harm
        (drop("reduce a[2]"), WHOLE, {SHARDED, ALIASED_WEIGHTS}),
        (put(Reduce((3,), (0,)), "all-reduce a[2]"), WHOLE, {SHARDED, ALIASED_WEIGHTS}),
        (replace("backward embed", Backward(0, (2,), (3,))), WHOLE, {SHARDED, ALIASED_WEIGHTS}),
        # what is done to gradient shards is done in every mode
        (drop("all-reduce a[2]"), WHOLE, set(MODES)),
        (put(AllReduce((3,)), "all-reduce a[2]"), WHOLE, set(MODES)),
        (replace("norm of", Norm((0, 1, 2, 3))), WHOLE, set(MODES)),
        (move("update embed", "norm of"), WHOLE, set(MODES)),
        (drop("update head"), WHOLE, set(MODES)),
        (put(Update((4,))), WHOLE, set(MODES)),
        (drop("backward embed", "reduce embed"), WHOLE, set(MODES)),  # the loss goes on, the program does not
    ],
)
def test_mistakes(edit: Edit, program: Program, modes: set[Mode]) -> None:
    assert wrong_in(edit, program) == modes


def test_what_a_slot_must_carry_over_shows_in_the_second_step() -> None:
    terms = account(drop("gather a[0] ->")(WHOLE), SHARDED)
    wrong = Execution(terms, as_issued(terms)).wrong()
    assert {terms.events[one.event].step for one in wrong} == {1}
    assert wrong[0].what == "it reads no a[0] of this step"
