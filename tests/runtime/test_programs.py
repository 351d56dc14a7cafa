"""The programs of a step function: made from a recorded call, kept by layout, ranks, precision and microbatches."""

from __future__ import annotations

from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.oracle import noting
from tests.harness.small import batch, loss, model, one_rank
from yafsdp_fn.schedules import Trace

TX = ya.optim.sgd(0.1)


def state(count: int = 3) -> ya.ShardedState:
    return ya.init(model(count), TX, mesh=one_rank())


def test_a_schedule_is_asked_once_for_each_kind_of_state() -> None:
    traces: list[Trace] = []
    schedule = noting(ya.schedules.zero3(), traces)
    step = ya.train_step(loss, TX, schedule=schedule)
    one = state()
    two = state()
    other = state(4)
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
    assert len(traces) == 1
    assert {compute.kind for compute in traces[0].order} == {"forward"}


def test_a_failed_first_step_teaches_nothing() -> None:
    def moody(p: Any, b: Any) -> ya.Mean:
        if b["fail"]:
            raise KeyError("planned")
        return loss(p, b)

    step = ya.train_step(moody, TX)
    made = state()
    with pytest.raises(KeyError):
        step(made, batch() | {"fail": True})
    with pytest.raises(RuntimeError, match="no step of this function has run"):
        step.program(made)
    made, _ = step(made, batch() | {"fail": False})
    assert step.program(made).ops
