"""The programs of a step function: made from a recorded call, kept by layout, ranks, precision and microbatches."""

from __future__ import annotations

from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.oracle import noting
from tests.harness.small import batch, loss, model, one_rank
from yafsdp_fn.runtime.programs import Programs
from yafsdp_fn.schedules import Trace

TX = ya.optim.sgd(0.1)


def state(count: int = 3) -> ya.ShardedState:
    return ya.init(model(count), TX, mesh=one_rank())


def test_a_schedule_is_asked_once_for_each_kind_of_state() -> None:
    traces: list[Trace] = []
    schedule = noting(ya.schedules.zero3(), traces)
    step = ya.train_step(loss, TX, schedule=schedule)
    one, two, other = state(), state(), state(4)
    for number in range(3):
        one, _ = step(one, batch(number))
        two, _ = step(two, batch(number))
        other, _ = step(other, batch(number))
    assert [len(trace.units) for trace in traces] == [5, 6]
    assert step.program(one) is step.program(two) is not step.program(other)


def test_an_evaluation_has_programs_of_its_own() -> None:
    traces: list[Trace] = []
    schedule = noting(ya.schedules.zero3(), traces)
    evaluate = ya.eval_step(loss, schedule=schedule)
    made = state()
    for _ in range(3):
        evaluate(made, batch())
    assert len(traces) == 1 and {compute.kind for compute in traces[0].order} == {"forward"}


def test_a_failed_first_step_teaches_nothing() -> None:
    def moody(p: Any, b: Any) -> ya.Mean:
        if b["fail"]:
            raise KeyError("planned")
        return loss(p, b)

    step, made = ya.train_step(moody, TX), state()
    with pytest.raises(KeyError):
        step(made, batch() | {"fail": True})
    with pytest.raises(RuntimeError, match="no step of this function has run"):
        step.program(made)
    made, _ = step(made, batch() | {"fail": False})
    assert step.program(made).ops


@pytest.mark.parametrize("name", ["zero3", "zero2"])
def test_a_factory_that_was_not_called_is_named(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"schedule={name}: that is the factory; call it: schedule=ya.schedules.{name}\(\)"
    ):
        Programs(getattr(ya.schedules, name))


def test_a_schedule_may_be_any_function_of_the_trace() -> None:
    """One that gathers each unit right before each use, into a slot of its own, and reduces right after."""
    from yafsdp_fn.schedules import Backward, Forward, Gather, Op, Reduce

    def simple(trace: Trace) -> ya.Program:
        ops: list[Op] = []
        for kind, visit, _, _ in trace.order:
            units, trained = trace.visits[visit].units, trace.visits[visit].trained
            ops.append(Gather(units, units))
            if kind == "forward":
                ops.append(Forward(visit, units, keep=visit % 2 == 0))
            else:
                ops += [Backward(visit, units, trained), Reduce(trained, trained)]
        return ya.Program(trace, tuple(ops))

    step, plain_step = ya.train_step(loss, TX, schedule=simple), ya.train_step(loss, TX)
    made, twin = state(), state()
    for number in range(3):
        made, got = step(made, batch(number))
        twin, want = plain_step(twin, batch(number))
        assert got["loss"] == want["loss"]
