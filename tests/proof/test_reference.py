"""The interpreter that judges programs tells right from wrong, each kind of mistake where it shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.program.traces import unit
from tests.proof.reference import ALIASED, ALIASED_WEIGHTS, MODES, SHARDED, Mode, run
from tests.proof.symbols import STEPS, expected
from tests.proof.test_verify import WHOLE, drop, move, put, replace
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Forward,
    Gather,
    Norm,
    Op,
    Program,
    Reduce,
    Trace,
    Update,
    Visit,
    chained_order,
    verify,
)

Edit = Callable[[list[Op]], object]


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
    ops = list(program.ops)
    edit(ops)
    changed = program.with_ops(tuple(ops))
    return {mode for mode in MODES if run(changed, mode) != expected(program)}


def test_right_programs_are_right() -> None:
    for program in (WHOLE, verify(LATE_USE)):
        assert wrong_in(lambda ops: None, program) == set()


@pytest.mark.parametrize(
    ("edit", "program", "modes"),
    [
        # slots are the shards: a gather that is missing does no harm; an update before the last use does everywhere
        (drop(4), WHOLE, {SHARDED}),
        (drop(29), WHOLE, {SHARDED}),  # carried over: wrong from the second step on
        (replace(29, Gather((1,), (0,), "node")), WHOLE, {SHARDED}),
        (lambda ops: ops.append(ops.pop(5)), LATE_USE, set(MODES)),
        # gradient slots are the shards: nothing is reduced, so that a reduction that is missing does no harm
        (drop(13), WHOLE, {SHARDED, ALIASED_WEIGHTS}),
        (put(14, Reduce((3,), (0,))), WHOLE, {SHARDED, ALIASED_WEIGHTS}),
        (replace(22, Backward(0, (2,), (3,))), WHOLE, {SHARDED, ALIASED_WEIGHTS}),
        # what is done to gradient shards is done in every mode
        (drop(14), WHOLE, set(MODES)),
        (put(14, AllReduce((3,))), WHOLE, set(MODES)),
        (replace(25, Norm((0, 1, 2, 3))), WHOLE, set(MODES)),
        (move(25, 26), WHOLE, set(MODES)),
        (drop(32), WHOLE, set(MODES)),
        (put(33, Update((4,))), WHOLE, set(MODES)),
        (drop(22, 23), WHOLE, set(MODES)),  # the loss goes on, the program does not
    ],
)
def test_mistakes(edit: Edit, program: Program, modes: set[Mode]) -> None:
    assert wrong_in(edit, program) == modes


def test_what_a_slot_must_carry_over_shows_in_the_second_step() -> None:
    program = WHOLE.with_ops(tuple(op for index, op in enumerate(WHOLE.ops) if index != 29))
    result, want = run(program), expected(program)
    assert result is not None
    wrong = {key[1] for key, value in want.items() if key[0] == "forward" and result[key] != value}
    assert wrong == set(range(1, STEPS))


def test_every_contribution_counts_once_per_replica() -> None:
    _, gradient, norm = expected(WHOLE)["update", 0, 3]
    assert list(gradient.values()) == [WHOLE.trace.replicas] == [3]
    assert norm[3] == frozenset(gradient.items()) and set(norm) == {0, 1, 2, 3, 4}
    assert ALIASED in MODES
