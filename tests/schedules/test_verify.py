"""Each rule of `verify` refuses what it is for, and says which op, slot and rule."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.schedules.traces import model
from yafsdp_fn.schedules import Backward, Compute, Forward, Gather, Op, Program, Reduce, Refused, verify, zero3

# op 0 gather embed, 1 gather layers a[0], 2 forward embed, 3 gather a[1], 4 forward a[0], ...
PROGRAM = zero3()(model(3))
Edit = Callable[[list[Op]], object]


def refusal(edit: Edit, program: Program = PROGRAM) -> Refused:
    """How verify refuses `program` after `edit` has changed its ops."""
    ops = list(program.ops)
    edit(ops)
    with pytest.raises(Refused) as caught:
        verify(Program(program.trace, tuple(ops)))
    return caught.value


def test_a_right_program_comes_back() -> None:
    assert verify(PROGRAM) is PROGRAM


def test_the_ops_that_the_cases_below_change() -> None:
    lines = [" ".join(line.split()) for line in str(PROGRAM).splitlines()[2:]]
    assert lines == [
        "0 gather embed -> slot 2",
        "1 gather a[0] -> slot 0",
        "2 forward embed in slot 2, keep graph",
        "3 gather a[1] -> slot 1",
        "4 forward a[0] in slot 0, keep graph",
        "5 gather a[2] -> slot 0",
        "6 forward a[1] in slot 1, keep graph",
        "7 gather head -> slot 3",
        "8 forward a[2] in slot 0, keep graph",
        "9 forward head in slot 3, keep graph",
        "10 backward head in slot 3 -> grad slot 3",
        "11 reduce head <- grad slot 3",
        "12 backward a[2] in slot 0 -> grad slot 0",
        "13 reduce a[2] <- grad slot 0",
        "14 gather a[0] -> slot 0",
        "15 backward a[1] in slot 1 -> grad slot 1",
        "16 reduce a[1] <- grad slot 1",
        "17 backward a[0] in slot 0 -> grad slot 0",
        "18 reduce a[0] <- grad slot 0",
        "19 backward embed in slot 2 -> grad slot 2",
        "20 reduce embed <- grad slot 2",
    ]


def drop(at: int) -> Edit:
    return lambda ops: ops.pop(at)


def put(at: int, op: Op) -> Edit:
    return lambda ops: ops.insert(at, op)


def replace(at: int, op: Op) -> Edit:
    return lambda ops: ops.__setitem__(at, op)


def swap(a: int, b: int) -> Edit:
    def edit(ops: list[Op]) -> None:
        ops[a], ops[b] = ops[b], ops[a]

    return edit


@pytest.mark.parametrize(
    ("edit", "op", "rule", "message"),
    [
        (
            drop(1),
            3,
            "weights",
            r"op 3 \(forward a\[0\] in slot 0, .*'weights': slot 0 was never gathered into; .*a\[0\]",
        ),
        (
            drop(5),
            7,
            "weights",
            r"slot 0 holds a\[0\], it must hold a\[2\]\n    against op 1 \(gather a\[0\] -> slot 0",
        ),
        (drop(14), 16, "weights", r"slot 0 holds a\[2\], it must hold a\[0\]\n    against op 5 \(gather a\[2\]"),
        (swap(0, 2), 0, "weights", r"slot 2 was never gathered into; it must hold embed"),
        (put(8, Gather((1,), (0,))), 9, "weights", r"holds a\[0\], it must hold a\[2\]\n    against op 8"),
        (drop(18), -1, "once", r"end of program: rule 'once': grad slot 0 still holds the gradient of a\[0\]\n.*op 17"),
        (
            drop(13),
            16,
            "gradient",
            r"grad slot 0 still holds the unreduced gradient of a\[2\]\n    against op 12 \(back",
        ),
        (put(19, Reduce((1,), (0,))), 19, "reduce", r"grad slot 0 holds no gradient of a\[0\]; it was reduced already"),
        (put(13, Reduce((1,), (0,))), 13, "reduce", r"holds the gradient of a\[2\], not of a\[0\]\n    against op 12"),
        (put(11, Reduce((0,), (9,))), 11, "reduce", r"grad slot 9 holds no gradient of embed$"),
        (
            swap(8, 9),
            8,
            "order",
            r"op 8 \(forward head in slot 3, keep graph\): rule 'order': the trace has forward of a\[2\]",
        ),
        (
            lambda ops: ops.__delitem__(slice(19, 21)),
            -1,
            "order",
            r"end of program: rule 'order': backward of embed is missing",
        ),
        (put(21, Forward(0, (2,), True)), 21, "order", "the trace has no more computes"),
        (put(0, Gather((7,), (0,))), 0, "form", "the trace has units 0 to 4"),
        (put(0, Gather((-1,), (0,))), 0, "form", "the trace has units 0 to 4"),
        (put(0, Forward(5, (0,), True)), 0, "form", "there are visits 0 to 4"),
        (put(0, Gather((0,), (0, 1))), 0, "form", r"1 units but 2 slots \(0, 1\)"),
        (put(0, Gather((0, 1), (3, 3))), 0, "form", r"slots \(3, 3\) name one slot twice"),
        (replace(10, Backward(4, (3,), ())), 10, "form", r"1 units but 0 slots"),
        (put(0, Compute("forward", 0, 0)), 0, "form", "not an op of a program"),
    ],
)
def test_refusals(edit: Edit, op: int, rule: str, message: str) -> None:
    refused = refusal(edit)
    assert (refused.op, refused.rule) == (op, rule)
    assert f"rule '{rule}'" in str(refused)
    assert re.search(message, str(refused)), str(refused)


def moved(ops: list[Op]) -> None:
    """a[0] is gathered for its backward into a slot of its own, though its graph was kept in slot 0."""
    ops[14], ops[17] = Gather((1,), (7,)), Backward(1, (7,), (0,))


def test_a_kept_graph_stays_in_its_slots() -> None:
    refused = refusal(moved)
    assert (refused.op, refused.rule) == (17, "graph")
    assert "kept in slots (0,), not (7,)\n    against op 4 (forward a[0] in slot 0, keep graph)" in str(refused)


def test_a_recomputed_graph_may_move() -> None:
    ops = list(PROGRAM.ops)
    ops[4] = Forward(1, (0,), False)
    moved(ops)
    verify(Program(PROGRAM.trace, tuple(ops)))


def test_a_missing_contribution_is_named() -> None:
    """A backward whose gradient goes nowhere else than a slot that is reduced once too few."""
    program = zero3()(model(2, 2))
    at = max(i for i, op in enumerate(program.ops) if isinstance(op, Reduce))
    refused = refusal(lambda ops: ops.pop(at), program)
    assert (refused.rule, refused.op) == ("once", -1) and "gradient of embed" in str(refused)
    assert "against op" in str(refused)


def test_the_mesh_and_costs_do_not_matter() -> None:
    trace = PROGRAM.trace._replace(mesh=(("replicate", 2), ("shard", 8)))
    verify(PROGRAM._replace(trace=trace))
