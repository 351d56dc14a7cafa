"""Neighbouring collectives that are waited for together are one op, and no op passes one that it must not pass."""

from __future__ import annotations

from tests.program.traces import model, on, together
from yafsdp_fn.schedules import AllReduce, Backward, Forward, Gather, Program, Reduce, Update, verify, zero3
from yafsdp_fn.schedules.build import merged


def test_gathers_from_different_sources_or_for_a_later_step_are_not() -> None:
    ops = (Gather((1,), (0,)), Gather((2,), (1,), "node"), Forward(0, (0, 1), True))
    assert merged(ops) == ops
    late = (Forward(0, (0, 1), True), Gather((1,), (0,)), Gather((2,), (1,)))
    assert merged(late) == late


def test_a_gather_does_not_pass_the_update_of_its_unit() -> None:
    ops = (Gather((1,), (0,)), Update((2,)), Gather((2,), (1,)), Forward(0, (0, 1), True))
    assert merged(ops) == ops


def test_a_sum_over_replicas_does_not_pass_its_reduction() -> None:
    ops = (Backward(0, (0,), (0,)), AllReduce((3,)), Reduce((1,), (0,)), AllReduce((1,)))
    assert merged(ops) == ops


def test_a_unit_is_reduced_twice_in_two_ops() -> None:
    ops = (Backward(0, (0,), (0,)), Reduce((1,), (0,)), Reduce((1,), (0,)))
    assert merged(ops) == ops


def test_two_stacks_visited_together_travel_together_and_verify() -> None:
    for mesh in ("ranks", "replicas"):
        program = zero3()(on(together(4, 2), mesh))
        verify(program)
        alone = [op for op in program.ops if isinstance(op, Gather | Reduce | AllReduce) and len(op.units) == 1]
        assert not alone


def test_a_visit_to_one_unit_is_as_before() -> None:
    program = zero3()(model(4, 2))
    assert merged(program.ops) == program.ops
    assert all(len(op.units) == 1 for op in program.ops if isinstance(op, Gather | Reduce))
    assert isinstance(program, Program)
