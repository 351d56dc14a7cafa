"""Programs with one mistake: a step refuses them before it runs."""

from __future__ import annotations

import pytest

import yafsdp_fn as ya
from tests.harness.failing import TX, Fault, batch, bits, loss, loss_with, same, state
from yafsdp_fn.schedules import Program


def lowered() -> Program:
    return ya.train_step(loss, TX).lower(state(), batch())


def without(program: Program, index: int) -> Program:
    return program.with_ops(program.ops[:index] + program.ops[index + 1 :])


def test_a_step_refuses_a_wrong_program_before_anything_runs() -> None:
    program, fault, now = lowered(), Fault(), state()
    for index in range(len(program.ops)):
        wrong = without(program, index)
        for verb in (
            lambda wrong=wrong: ya.train_step(loss_with(fault), TX, schedule=wrong)(now, batch()),
            lambda wrong=wrong: ya.value_and_grad(loss_with(fault), schedule=wrong)(now.params, batch()),
            lambda wrong=wrong: ya.train_step(loss_with(fault), TX, schedule=wrong).lower(now, batch()),
            lambda wrong=wrong: ya.train_step(loss_with(fault), TX, schedule=lambda trace: wrong)(now, batch()),
        )[: 4 if index == 0 else 1]:
            with pytest.raises(ya.errors.Refused, match="rule"):
                verb()
    assert fault.events[:1] in ([], ["forward embed"])
    assert same(bits(now), bits(state()))
    fault.arm(None)
    with pytest.raises(ya.errors.Refused):
        ya.train_step(loss_with(fault), TX, schedule=wrong)(now, batch())
    assert not fault.events
    ya.train_step(loss_with(fault), TX, schedule=program)(now, batch())


def test_a_schedule_that_builds_a_wrong_program_costs_no_step() -> None:
    """The first step has run when the schedule is asked; nothing was committed."""
    program = lowered()
    now = state()
    wrong = program.with_ops(program.ops[1:])
    step = ya.train_step(loss, TX, schedule=lambda trace: wrong)
    for _ in range(2):
        with pytest.raises(ya.errors.Refused, match=r"slot \d holds no weights of this step; it must hold embed"):
            step(now, batch())
    assert same(bits(now), bits(state()))
    ya.train_step(loss, TX)(now, batch())


def test_text_of_a_program_with_an_unknown_op() -> None:
    text = lowered().to_json().replace('"gather"', '"scatter"', 1)
    with pytest.raises(ValueError, match=r"not a program in JSON.*scatter"):
        Program.from_json(text)
