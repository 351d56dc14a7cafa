"""Collectives that are waited for together are one op."""

from __future__ import annotations

from tests.program.traces import model, on, together
from yafsdp_fn.schedules import AllReduce, Gather, Program, Reduce, verify, zero3


def test_two_stacks_visited_together_travel_together_and_verify() -> None:
    for mesh in ("ranks", "replicas"):
        program = zero3()(on(together(4, 2), mesh))
        verify(program)
        alone = [op for op in program.ops if isinstance(op, Gather | Reduce | AllReduce) and len(op.units) == 1]
        assert not alone


def test_a_visit_to_one_unit_has_ops_of_one_unit() -> None:
    program = zero3()(model(4, 2))
    assert all(len(op.units) == 1 for op in program.ops if isinstance(op, Gather | Reduce))
    assert isinstance(program, Program)
