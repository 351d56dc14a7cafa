"""Programs with one mistake: `verify` names the op, the slot and the rule, and a step refuses them before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.failing import TX, Fault, batch, bits, loss, loss_with, same, state
from yafsdp_fn.schedules import Backward, Forward, Gather, Op, Program, Reduce

SCHEDULES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero3, recomputed": {"schedule": ya.schedules.zero3(remat="all")},
    "zero3, two microbatches": {"microbatches": 2},
    "zero2": {"schedule": ya.schedules.zero2()},
}

Mutation = Callable[[list[Op]], list[Op]]


def lowered(which: str = "zero3") -> Program:
    return ya.train_step(loss, TX, **SCHEDULES[which]).lower(state(), batch())


def mutated(program: Program, mutation: Mutation) -> Program:
    return program.with_ops(tuple(mutation(list(program.ops))))


def without(program: Program, index: int) -> Program:
    return program.with_ops(program.ops[:index] + program.ops[index + 1 :])


def doubled(program: Program, index: int) -> Program:
    return program.with_ops(program.ops[: index + 1] + program.ops[index:])


def numbers(program: Program, kind: type[Any]) -> list[int]:
    return [index for index, op in enumerate(program.ops) if isinstance(op, kind)]


def refusal(program: Program, rule: str | tuple[str, ...]) -> str:
    """The text of the refusal, which must be of `rule` and name it."""
    with pytest.raises(ya.errors.Refused) as caught:
        ya.verify(program)
    assert caught.value.rule in ((rule,) if isinstance(rule, str) else rule), caught.value
    assert f"rule {caught.value.rule!r}" in str(caught.value)
    return str(caught.value)


def against(text: str) -> tuple[int, str]:
    """The op that a refusal marks as the other one."""
    found = re.search(r"op (\d+) +(.*\S) +<- against this", text)
    assert found is not None, text
    return int(found[1]), found[2]


@pytest.mark.parametrize("which", SCHEDULES)
def test_a_missing_gather(which: str) -> None:
    """Each in turn: the visit that would read the slot is named, and what the slot holds instead."""
    program = ya.verify(lowered(which))
    for index in numbers(program, Gather):
        gone = program.ops[index]
        text = refusal(without(program, index), "weights")
        unit, slot = program.trace.units[gone.units[0]].name, gone.slots[0]
        assert re.search(rf"op \d+ \((forward|backward) {re.escape(unit)}.* in slot {slot}", text), text
        assert f"it must hold {unit}" in text
        assert f"slot {slot} holds " in text


@pytest.mark.parametrize("which", ["zero3", "zero3, recomputed", "zero3, two microbatches"])
def test_a_gather_into_a_slot_that_is_still_to_be_read(which: str) -> None:
    """Each gather that takes a slot from another unit, moved up past the last visit that reads the slot."""
    program, found = lowered(which), 0
    for index in numbers(program, Gather):
        op = program.ops[index]
        readers = [k for k in numbers(program, Forward | Backward) if k < index and op.slots[0] in program.ops[k].slots]
        if not readers:
            continue
        found += 1
        text = refusal(mutated(program, lambda ops, a=readers[-1], b=index: moved(ops, b, a)), "weights")
        new = program.trace.units[op.units[0]].name
        assert f"slot {op.slots[0]} holds {new}, it must hold " in text
        assert against(text) == (readers[-1], f"gather {new} -> slot {op.slots[0]}")
    assert found >= 2


def moved(ops: list[Op], source: int, target: int) -> list[Op]:
    rest = ops[:source] + ops[source + 1 :]
    return [*rest[:target], ops[source], *rest[target:]]


@pytest.mark.parametrize("which", SCHEDULES)
def test_a_gradient_that_is_never_reduced(which: str) -> None:
    """Its slot is in the way of the next gradient, or is still full at the end."""
    program = lowered(which)
    rules = set()
    for index in numbers(program, Reduce):
        gone = program.ops[index]
        less = without(program, index)
        unit, slot = program.trace.units[gone.units[0]].name, gone.grad_slots[0]
        if program.trace.microbatches > 1 and any(
            isinstance(op, Reduce) and gone.units[0] in op.units for op in less.ops[index:]
        ):
            continue  # it may wait for the next microbatch's: the backward adds to what the slot holds
        text = refusal(less, ("gradient", "once"))
        rules.add("gradient" if "'gradient'" in text else "once")
        assert re.search(rf"grad slot {slot} still holds the (unreduced )?gradient of {re.escape(unit)}", text), text
        assert against(text)[0] == index - 1 and against(text)[1].startswith(f"backward {unit}")
    assert rules == {"gradient", "once"}


@pytest.mark.parametrize("which", SCHEDULES)
def test_a_gradient_that_is_reduced_twice(which: str) -> None:
    program = lowered(which)
    for index in numbers(program, Reduce):
        op = program.ops[index]
        text = refusal(doubled(program, index), "reduce")
        unit, slot = program.trace.units[op.units[0]].name, op.grad_slots[0]
        assert f"op {index + 1} (reduce {unit} <- grad slot {slot})" in text
        assert f"grad slot {slot} holds no gradient of {unit}; it was reduced already" in text
        assert against(text) == (index, f"reduce {unit} <- grad slot {slot}")


def test_a_gradient_slot_that_is_overwritten() -> None:
    """A backward into the slot of a gradient that waits for its reduction; a reduction from the wrong slot."""
    program = lowered()
    backwards = numbers(program, Backward)
    first, second = program.ops[backwards[0]], program.ops[backwards[1]]
    reduction = next(k for k in numbers(program, Reduce) if k > backwards[0])
    # the head's reduction, moved behind the next backward, which now uses the head's slot
    late = moved(list(program.ops), reduction, backwards[1])
    at = late.index(second)
    late[at] = second._replace(grad_slots=first.grad_slots)
    text = refusal(program.with_ops(tuple(late)), "gradient")
    slot = first.grad_slots[0]
    assert f"op {at} (backward layers[2]" in text and f"-> grad slot {slot})" in text
    assert f"grad slot {slot} still holds the unreduced gradient of head" in text
    assert against(text)[1].startswith("backward head")
    wrong = list(program.ops)
    wrong[reduction] = Reduce((2,), first.grad_slots)
    text = refusal(program.with_ops(tuple(wrong)), "reduce")
    assert f"grad slot {slot} holds the gradient of head, not of layers[0]" in text


def test_a_kept_graph_whose_backward_runs_in_another_slot() -> None:
    """Saved weights are views of the forward's slot. Where the visit recomputes, another slot is fine."""
    for which, refused in (("zero3", True), ("zero3, recomputed", False)):
        program = lowered(which)
        index = next(k for k in numbers(program, Backward) if program.ops[k].visit == 2)
        op = program.ops[index]
        elsewhere = [Gather((3,), (77,)), op._replace(slots=(77,))]
        other = mutated(program, lambda ops, k=index, new=elsewhere: ops[:k] + new + ops[k + 1 :])
        if not refused:
            ya.verify(other)
            continue
        text = refusal(other, "graph")
        assert f"op {index + 1} (backward layers[1] in slot 77" in text
        assert f"the graph was kept in slots {op.slots}, not (77,)" in text
        assert re.fullmatch(r"forward layers\[1\] in slot \d, keep graph", against(text)[1])


def replaced(kind: type[Any], **fields: Any) -> Mutation:
    """The first op of a kind with other fields."""

    def mutation(ops: list[Op]) -> list[Op]:
        index = next(k for k, op in enumerate(ops) if isinstance(op, kind))
        return [*ops[:index], ops[index]._replace(**fields), *ops[index + 1 :]]

    return mutation


FORM: dict[str, tuple[Mutation, str]] = {
    "an unknown unit": (replaced(Gather, units=(99,)), r"op 0 .*the trace has units 0 to 4"),
    "a negative unit": (replaced(Reduce, units=(-1,)), r"op \d+ .*the trace has units 0 to 4"),
    "an unknown visit": (replaced(Forward, visit=5), r"op \d+ .*there are visits 0 to 4"),
    "a slot too many": (replaced(Gather, slots=(2, 3)), r"op 0 \(gather embed.*\): .*1 units? but 2 slots"),
    "no slot": (replaced(Forward, slots=()), r"op \d+ \(forward embed.*\): .*1 units? but 0 slots"),
    "no gradient slot": (replaced(Backward, grad_slots=()), r"op \d+ \(backward head.*\): .*1 units? but 0 slots"),
    "one slot twice": (replaced(Gather, units=(0, 1), slots=(2, 2)), r"op 0 .*slots \(2, 2\) name one slot twice"),
    "no op": (lambda ops: [*ops, "gather embed"], r"op \d+ \('gather embed'\).*not an op"),
    "an unknown source": (replaced(Gather, source="disk"), r"op 0 .*source 'disk'"),
    "an update of nobody": (lambda ops: [*ops, ya.schedules.Update((99,))], r"op \d+ .*the trace has units 0 to 4"),
}


@pytest.mark.parametrize("mistake", FORM)
def test_ops_that_are_malformed(mistake: str) -> None:
    mutation, text = FORM[mistake]
    found = refusal(mutated(lowered(), mutation), "form")
    assert re.search(text, found), found


def test_computes_in_another_order() -> None:
    program = lowered()
    computes = numbers(program, Forward | Backward)
    for index in computes:
        # without its backward, a gradient is missed first by its reduction
        text = refusal(without(program, index), ("order", "reduce", "early"))
        assert re.search(r"(op \d+ \(.*\)|end of program): rule '(order|reduce|early)': ", text)
        assert re.search("the trace has |is missing|holds no gradient of |its own backward is not the next", text)
        text = refusal(doubled(program, index), ("order", "early"))
        assert re.search(rf"op {index + 1}\b", text)
    first, second = computes[1], computes[2]
    text = refusal(mutated(program, lambda ops: moved(ops, second, first)), "order")
    assert f"op {first} (forward layers[1]" in text and "the trace has forward of layers[0] here" in text


@pytest.mark.parametrize("which", SCHEDULES)
def test_any_op_that_is_left_out(which: str) -> None:
    program = lowered(which)
    for index in range(len(program.ops)):
        if program.trace.microbatches > 1 and isinstance(program.ops[index], Reduce):
            continue
        with pytest.raises(ya.errors.Refused):
            ya.verify(without(program, index))


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
    assert fault.events[:1] in ([], ["forward embed"]) and same(bits(now), bits(state()))
    fault.arm(None)
    with pytest.raises(ya.errors.Refused):
        ya.train_step(loss_with(fault), TX, schedule=wrong)(now, batch())
    assert not fault.events
    with pytest.raises(ValueError, match=r"the program does not fit: microbatches: it has 1, here it is 2"):
        ya.train_step(loss_with(fault), TX, schedule=program, microbatches=2)(now, batch())
    other = ya.init({"embed": ya.Param((3, 5))}, TX)
    with pytest.raises(ValueError, match=r"it is of other units: it has .* where there is "):
        ya.train_step(loss_with(fault), TX, schedule=program)(other, batch())
    assert not fault.events
    ya.train_step(loss_with(fault), TX, schedule=program)(now, batch())


def test_a_schedule_that_builds_a_wrong_program_costs_no_step() -> None:
    """The first step has run when the schedule is asked; nothing was committed."""
    program, now = lowered(), state()
    wrong = program.with_ops(program.ops[1:])
    step = ya.train_step(loss, TX, schedule=lambda trace: wrong)
    for _ in range(2):
        with pytest.raises(ya.errors.Refused, match=r"slot \d holds no weights of this step; it must hold embed"):
            step(now, batch())
    assert same(bits(now), bits(state()))
    ya.train_step(loss, TX)(now, batch())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"trace": {}, "ops": []}', "gather embed -> slot 2"])
def test_text_that_is_no_program(text: str) -> None:
    with pytest.raises(ValueError, match="not a program in JSON"):
        Program.from_json(text)


def test_text_of_a_program_with_an_unknown_op() -> None:
    text = lowered().to_json().replace('"gather"', '"scatter"', 1)
    with pytest.raises(ValueError, match=r"not a program in JSON.*scatter"):
        Program.from_json(text)
