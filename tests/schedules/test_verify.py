"""The rules of `verify`: what each refuses, by name, with the op and the reason."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import yafsdp_fn as ya
from tests.schedules.cases import SMALL, program
from tests.schedules.reference import right
from tests.schedules.traces import cut, model, on, trace_of, unit
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Compute,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Program,
    Receive,
    Reduce,
    Refused,
    Send,
    Stash,
    Update,
    from_actions,
    hpz,
    remat,
    verify,
    zero1,
    zero3,
)

PLAIN = zero3()(model(3))
WHOLE = hpz(3, update=True)(on(model(3), "replicas and nodes", "after norm"))
UPDATED = program(model(3), "zero3, update after norm")
OFFLOADED = zero3(remat=remat.offload(ahead=0))(model(3))
Edit = Callable[[list[Op]], object]


OF_NO_UNITS = Gather((), ()), Stash((), ()), Reduce((), ()), AllReduce(()), Norm(()), Update(())


def refusal(edit: Edit, program: Program = PLAIN) -> Refused:
    """How verify refuses `program` after `edit` has changed its ops."""
    ops = list(verify(program).ops)
    edit(ops)
    with pytest.raises(Refused) as caught:
        verify(Program(program.trace, tuple(ops)))
    return caught.value


def lines(program: Program) -> list[str]:
    return [" ".join(line.split()) for line in str(program).splitlines() if re.match(r" *\d", line)]


def test_a_right_program_comes_back() -> None:
    assert verify(PLAIN) is PLAIN and verify(WHOLE) is WHOLE and verify(UPDATED) is UPDATED


def test_the_ops_that_the_cases_below_change() -> None:
    assert lines(PLAIN) == [
        "0 gather embed -> slot 2",
        "1 gather a[0] -> slot 0",
        "2 forward embed in slot 2, keep graph",
        "3 gather a[1] -> slot 1",
        "4 forward a[0] in slot 0, keep graph",
        "5 gather a[2] -> slot 0",
        "6 forward a[1] in slot 1, keep graph",
        "7 gather head -> slot 3",
        "8 forward a[2] in slot 0, keep graph",
        "9 forward head in slot 3, keep graph, may begin grad slot 3",
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
    assert lines(WHOLE) == [
        "0 stash a[0] <- slot 0",
        "1 forward embed in slot 2, keep graph",
        "2 gather a[1] -> slot 1",
        "3 forward a[0] in slot 0, keep graph",
        "4 gather a[2] -> slot 0",
        "5 forward a[1] in slot 1, keep graph",
        "6 gather head -> slot 3",
        "7 forward a[2] in slot 0, keep graph",
        "8 forward head in slot 3, keep graph, may begin grad slot 3",
        "9 backward head in slot 3 -> grad slot 3",
        "10 reduce head <- grad slot 3",
        "11 all-reduce head",
        "12 backward a[2] in slot 0 -> grad slot 0",
        "13 reduce a[2] <- grad slot 0",
        "14 all-reduce a[2]",
        "15 gather a[0] in node -> slot 0",
        "16 backward a[1] in slot 1 -> grad slot 1",
        "17 reduce a[1] <- grad slot 1",
        "18 all-reduce a[1]",
        "19 backward a[0] in slot 0 -> grad slot 0",
        "20 reduce a[0] <- grad slot 0",
        "21 all-reduce a[0]",
        "22 backward embed in slot 2 -> grad slot 2",
        "23 reduce embed <- grad slot 2",
        "24 all-reduce embed",
        "25 norm of 5 units",
        "26 update embed",
        "27 gather embed -> slot 2",
        "28 update a[0]",
        "29 gather a[0] -> slot 0",
        "30 update a[1]",
        "31 update a[2]",
        "32 update head",
    ]


def drop(*at: int) -> Edit:
    def edit(ops: list[Op]) -> None:
        ops[:] = [op for index, op in enumerate(ops) if index not in at]

    return edit


def put(at: int, op: Op) -> Edit:
    return lambda ops: ops.insert(at, op)


def replace(at: int, op: Op) -> Edit:
    return lambda ops: ops.__setitem__(at, op)


def move(at: int, to: int) -> Edit:
    return lambda ops: ops.insert(to, ops.pop(at))


def check(refused: Refused, op: int, rule: str, message: str) -> None:
    assert (refused.op, refused.rule) == (op, rule), refused
    first = str(refused).splitlines()[0]
    assert first.startswith("end of program: " if op < 0 else f"op {op} ("), first
    assert f"rule '{rule}': " in first and re.search(message, first), first


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (put(0, Gather((7,), (0,))), 0, "the trace has units 0 to 4"),
        (put(0, Gather((-1,), (0,))), 0, "the trace has units 0 to 4"),
        (put(0, AllReduce((5,))), 0, "the trace has units 0 to 4"),
        (put(0, Update((-1,))), 0, "the trace has units 0 to 4"),
        (put(0, Forward(5, (0,), True)), 0, "there are visits 0 to 4"),
        (put(0, Gather((0,), (0, 1))), 0, r"1 units but 2 slots \(0, 1\)"),
        (put(0, Stash((0, 1), (0,))), 0, r"2 units but 1 slots \(0,\)"),
        (put(0, Gather((0, 1), (3, 3))), 0, r"slots \(3, 3\) name one slot twice"),
        (put(0, Norm((1, 1))), 0, r"units \(1, 1\) name one unit twice"),
        (put(0, Gather((0,), (2,), "rack")), 0, "source 'rack': a gather reads from 'shard' or from 'node'"),
        (replace(10, Backward(4, (3,), ())), 10, "1 units but 0 slots"),
        (put(0, Compute("forward", 0, 0)), 0, "not an op of a program"),
        (put(0, Gather(0, 0)), 0, r"units 0: expected a tuple of ints, such as \(0,\)"),
        (put(0, Gather((0,), [0])), 0, r"slots \[0\]: expected a tuple of ints"),
        (put(0, Reduce(("0",), (0,))), 0, r"units \('0',\): expected a tuple of ints"),
        (put(0, Forward("embed", (0,), True)), 0, "visit 'embed': expected the number of a visit"),
        (put(0, Forward(0, (0,), 1)), 0, "keep 1: expected True or False"),
        (put(0, Forward(0, (0,), True, carry_slot=0)), 0, "a kept graph holds what it was given; a carry slot is for"),
        (put(0, Forward(0, (0,), False, carry_slot="0")), 0, "carry_slot '0': expected the number of a carry slot"),
        (put(0, Fetch(0, None)), 0, "carry_slot None: expected the number of a carry slot"),
        (put(0, Offload(-1, 0)), 0, "there are visits 0 to 4"),
        (put(0, Gather((0,), (-1,))), 0, r"slots \(-1,\): slots are numbered from 0"),
        (put(0, Backward(0, (0,), (-1,))), 0, r"slots \(-1,\): slots are numbered from 0"),
        (put(0, Fetch(0, -1)), 0, "carry_slot -1: slots are numbered from 0"),
        (put(0, Forward(0, (0,), True, "0")), 0, "microbatch '0': expected the number of a microbatch"),
        (put(0, Forward(0, (0,), True, early=(0, 1))), 0, r"1 units but 2 slots \(0, 1\)"),
        *((put(0, op), 0, "it names no unit; leave the op out") for op in OF_NO_UNITS),
    ],
)
def test_form(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit), op, "form", message)


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (move(8, 9), 8, r"op 8 \(forward head in slot 3, keep graph.*the trace has forward of a\[2\] here"),
        (drop(19, 20), -1, "backward of embed is missing"),
        (put(21, Forward(0, (2,), True)), 21, "the trace has no more computes"),
        (replace(8, Forward(3, (0,), True, 1)), 8, r"the trace has forward of a\[2\] here"),
    ],
)
def test_order(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit), op, "order", message)


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (drop(7), 8, "slot 3 holds no weights of this step; it must hold head"),
        (drop(0), 1, "slot 2 holds no weights of this step; it must hold embed"),
        (drop(1), 3, r"slot 0 holds no weights of this step; it must hold a\[0\]"),
        (drop(5), 7, r"slot 0 holds a\[0\], it must hold a\[2\]"),
        (drop(14), 16, r"slot 0 holds a\[2\], it must hold a\[0\]"),
        (drop(1, 5, 14), 6, r"slot 0 holds a\[0\], it must hold a\[2\] \(it was there when the step began\)"),
        (put(8, Gather((1,), (0,))), 9, r"slot 0 holds a\[0\], it must hold a\[2\]"),
    ],
)
def test_weights(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit), op, "weights", message)


@pytest.mark.parametrize(
    ("edit", "held"),
    [
        (drop(29), r"a\[0\] of this step"),
        (move(29, 28), r"a\[0\] of this step"),  # gathered before its update
        (put(33, Gather((3,), (0,))), r"a\[2\]"),
    ],
)
def test_carry(edit: Edit, held: str) -> None:
    message = rf"read before anything is gathered into it, .* the next step's a\[0\]; it will hold {held}"
    check(refusal(edit, WHOLE), 0, "carry", message)


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (drop(0), 14, r"nothing was stashed of a\[0\] in this step"),
        (replace(29, Gather((1,), (0,), "node")), 29, r"secondary shard of a\[0\] is of the weights before its update"),
        (put(15, Stash((1,), (0,))), 16, r"what was stashed of a\[0\] is from a slot that held a\[2\]"),
    ],
)
def test_secondary(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit, WHOLE), op, "secondary", message)


def moved(ops: list[Op]) -> None:
    """a[0] is gathered for its backward into a slot of its own, though its graph was kept in slot 0."""
    ops[14], ops[17] = Gather((1,), (7,)), Backward(1, (7,), (0,))


def test_graph() -> None:
    check(refusal(moved), 17, "graph", r"the graph was kept in slots \(0,\), not \(7,\)")
    ops = list(PLAIN.ops)
    ops[4] = Forward(1, (0,), False)  # a recomputed graph may move
    moved(ops)
    verify(Program(PLAIN.trace, tuple(ops)))


def test_a_backward_without_a_forward() -> None:
    trace = PLAIN.trace._replace(order=PLAIN.trace.order[1:])
    with pytest.raises(Refused, match=r"rule 'graph': no forward of embed before it"):
        verify(zero3()(trace))


def test_gradient() -> None:
    check(refusal(drop(13)), 16, "gradient", r"grad slot 0 still holds the unreduced gradient of a\[2\]")


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (put(19, Reduce((1,), (0,))), 19, r"grad slot 0 holds no gradient of a\[0\]; it was reduced already"),
        (put(13, Reduce((1,), (0,))), 13, r"grad slot 0 holds the gradient of a\[2\], not of a\[0\]"),
        (put(11, Reduce((0,), (9,))), 11, "grad slot 9 holds no gradient of embed$"),
    ],
)
def test_reduce(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit), op, "reduce", message)


def test_once() -> None:
    check(refusal(drop(18)), -1, "once", r"grad slot 0 still holds the gradient of a\[0\]")
    # of two microbatches the last reduction of all: its gradient stays behind
    program = zero3()(model(2, 2))
    last = max(index for index, op in enumerate(program.ops) if isinstance(op, Reduce))
    check(refusal(drop(last), program), -1, "once", "grad slot 2 still holds the gradient of embed")


def test_ordered() -> None:
    """On a deterministic mesh a unit is reduced once in a microbatch, with all that its visits have added."""
    trace = trace_of([unit(0, "a")], [[0], [0]], 2)._replace(ordered=True)
    program = verify(zero3()(trace))
    assert program.count(Reduce) == 2
    with pytest.raises(
        Refused, match=r"gradients of a from microbatches \[0, 1\] are added before they are reduced"
    ) as caught:
        verify(zero1()(trace))
    assert caught.value.rule == "ordered" and "uses of grad slot 0:" in str(caught.value)
    assert re.search(r"\n    read +op \d+ +reduce a .*<- refused", str(caught.value))
    between = next(index for index, op in enumerate(program.ops) if isinstance(op, Backward)) + 1
    apart = refusal(put(between, Reduce((0,), (0,))), program)
    check(apart, between, "ordered", "what a adds to the gradient of a is reduced apart from it")
    both = [(Forward(0, (0,), True, m), Backward(0, (0,), (m,), m)) for m in range(2)]
    ops = (Gather((0,), (0,)), *both[0], *both[1], Reduce((0,), (1,)), Reduce((0,), (0,)))
    once = trace_of([unit(0, "a")], [[0]], 2)
    verify(Program(once, ops))
    with pytest.raises(Refused, match="a later microbatch's gradient of a was reduced before") as caught:
        verify(Program(once._replace(ordered=True), ops))
    assert (caught.value.rule, caught.value.op) == ("ordered", 6)


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (put(12, AllReduce((4,))), 12, "the gradient of head was summed over replicas already"),
        (move(11, 10), 10, "the gradient of head from head in microbatch 0 is not reduced yet"),
        (put(10, AllReduce((4,))), 10, "the gradient of head from head in microbatch 0 is not reduced yet"),
    ],
)
def test_replicas(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit, WHOLE), op, "replicas", message)


def test_replicas_that_are_missing() -> None:
    program = zero3()(on(model(3), "replicas"))
    last = max(index for index, op in enumerate(program.ops) if isinstance(op, AllReduce))
    check(refusal(drop(last), program), -1, "replicas", "the gradient of embed is never summed over replicas")
    frozen = zero3()(on(model(2, stacks=2, frozen=True), "replicas"))
    check(refusal(put(0, AllReduce((1,))), frozen), 0, "replicas", r"nothing trains a\[0\]")


def test_what_is_of_no_use_does_no_harm() -> None:
    """A sum over one replica; one that the first gradient overwrites; a stash that nothing gathers, if it has room."""
    for edit, start in (
        (put(21, AllReduce((0,))), PLAIN),
        (put(0, AllReduce((4,))), WHOLE),
        (put(17, Stash((1,), (0,))), WHOLE),
    ):
        ops = list(start.ops)
        edit(ops)
        assert right(verify(start.with_ops(tuple(ops))))
    small = on(trace_of([unit(0, "a"), unit(1, "b")], [[0], [1]]), "nodes")
    units = (small.units[0], small.units[1]._replace(gather_bytes=4000))
    made = zero3(resident=2)(small._replace(units=units))
    at = made.ops.index(Forward(0, (0,), True))
    refused = refusal(put(at, Stash((1,), (0,))), made)
    check(refused, at, "secondary", "slot 0 has 48 bytes, b is of 4000")


def test_a_part_of_a_gradient_that_comes_after_the_sum_over_replicas() -> None:
    trace = on(trace_of([unit(0, "a")], [[0]], 2), "replicas")
    both = [(Forward(0, (0,), True, m), Backward(0, (0,), (0,), m), Reduce((0,), (0,))) for m in range(2)]
    ops = (Gather((0,), (0,)), *both[0], *both[1], AllReduce((0,)))
    verify(Program(trace, ops))
    early = refusal(move(7, 4), Program(trace, ops))
    check(early, 4, "replicas", "the gradient of a from a in microbatch 1 is not reduced yet")


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (replace(9, Forward(4, (3,), False, early=(3,))), 9, "it recomputes, and its backward would not know"),
        (replace(8, Forward(3, (0,), True, early=(0,))), 8, "its own backward is not the next compute"),
        (replace(9, Forward(4, (3,), True, early=(2,))), 9, r"its backward writes to grad slots \(3,\), not \(2,\)"),
    ],
)
def test_early(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit), op, "early", message)


def test_a_gradient_is_not_begun_where_another_waits() -> None:
    program = zero3(defer=True)(model(1, 2))
    (at,) = [i for i, op in enumerate(program.ops) if isinstance(op, Forward) and op.visit == 2 and op.microbatch == 1]
    assert not program.ops[at].early
    slot = program.ops[at + 1].grad_slots
    begun = replace(at, program.ops[at]._replace(early=slot))
    check(refusal(begun, program), at, "early", f"grad slot {slot[0]} still holds the unreduced gradient of head")


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (replace(25, Norm((0, 1, 2, 3))), 25, "must be of all trainable units: head is trainable, and missing"),
        (put(26, Norm((0, 1, 2, 3, 4))), 26, "the norm was taken already"),
        (move(25, 24), 24, "the gradient of embed is not summed over replicas yet"),
        (move(25, 22), 22, "the norm comes before the last compute"),
    ],
)
def test_norm(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit, WHOLE), op, "norm", message)


def test_norm_that_nothing_reads() -> None:
    program = zero3()(on(model(3), "replicas", "after norm"))
    check(refusal(put(26, Norm((0, 1, 2, 3, 4))), program), 26, "norm", "the program has no updates")


def test_norm_of_a_step_without_optimizer() -> None:
    check(refusal(put(21, Norm((0, 1, 2, 3, 4)))), 21, "norm", "this step has no optimizer")


@pytest.mark.parametrize(
    ("edit", "op", "message", "program"),
    [
        (drop(32), -1, "head is never updated, other units are", WHOLE),
        (put(33, Update((4,))), 33, "head was updated already", WHOLE),
        (drop(25), 25, "embed is updated before the norm of the whole gradient is known", WHOLE),
        (move(26, 16), 16, "embed is updated before the norm of the whole gradient is known", WHOLE),
        (put(21, Update((0,))), 21, "this step has no optimizer", PLAIN),
    ],
)
def test_update(edit: Edit, op: int, message: str, program: Program) -> None:
    check(refusal(edit, program), op, "update", message)


def test_update_of_a_frozen_unit() -> None:
    frozen = program(model(2, stacks=2, frozen=True), "zero3, update after norm")
    check(refusal(put(len(frozen.ops), Update((1,))), frozen), len(frozen.ops), "update", r"a\[0\] is frozen")


def test_update_that_does_not_end() -> None:
    parts = program(SMALL["one unit"], "zero3, update in parts")
    last = max(at for at, op in enumerate(parts.ops) if isinstance(op, Update))
    check(refusal(drop(last), parts), -1, "update", r"the update of a does not end: it has 3 parts")


def test_the_offloads_that_the_cases_below_change() -> None:
    """The rest is as in PLAIN; the last layer's carry stays in the carry slot."""
    assert [line for line in lines(OFFLOADED) if "carry slot" in line] == [
        "4 forward a[0] in slot 0, recompute, save in carry slot 0",
        "5 offload a[0] <- carry slot 0",
        "7 forward a[1] in slot 1, recompute, save in carry slot 0",
        "8 offload a[1] <- carry slot 0",
        "10 forward a[2] in slot 0, recompute, save in carry slot 0",
        "14 backward a[2] in slot 0, carry slot 0 -> grad slot 0",
        "15 fetch a[1] -> carry slot 0",
        "18 backward a[1] in slot 1, carry slot 0 -> grad slot 1",
        "19 fetch a[0] -> carry slot 0",
        "21 backward a[0] in slot 0, carry slot 0 -> grad slot 0",
    ]


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (drop(5), 6, r"carry slot 0 still holds what a\[0\] has saved"),
        (put(5, Offload(2, 0)), 5, r"carry slot 0 holds what a\[0\] has saved, it must hold what a\[1\] has saved"),
        (put(6, Offload(1, 0)), 6, r"carry slot 0 holds nothing, it must hold what a\[0\] has saved"),
        (drop(8), 9, r"carry slot 0 still holds what a\[1\] has saved"),
        (drop(15), 17, r"carry slot 0 holds nothing, it must hold what a\[1\] has saved"),
        (put(15, Fetch(1, 0)), 16, r"carry slot 0 still holds what a\[0\] has saved"),
        (replace(15, Fetch(1, 0)), 18, r"carry slot 0 holds what a\[0\] has saved, it must hold what a\[1\] has saved"),
        (put(20, Fetch(1, 1)), 20, r"nothing that a\[0\] has saved is on the host"),
        (put(0, Fetch(1, 0)), 0, r"nothing that a\[0\] has saved is on the host"),
        (replace(21, Backward(1, (0,), (0,))), 21, r"a\[0\] has saved its carry in a carry slot"),
        (replace(2, Forward(0, (2,), False, carry_slot=3)), 23, "embed has saved its carry in a carry slot"),
        (replace(4, Forward(1, (0,), False)), 5, r"carry slot 0 holds nothing, it must hold what a\[0\] has saved"),
        (replace(12, Backward(4, (3,), (3,), carry_slot=1)), 12, "the forward of head has saved no carry"),
    ],
)
def test_offload(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit, OFFLOADED), op, "offload", message)


def test_offload_without_a_backward() -> None:
    program = zero3()(model(1, backward=False))
    saves = [op._replace(keep=False, carry_slot=0) if op == Forward(1, (0,), True) else op for op in program.ops]
    assert saves != list(program.ops)
    refused = refusal(lambda ops: ops.__setitem__(slice(None), saves), program)
    check(refused, -1, "offload", r"no backward reads .* a\[0\]")
    assert "uses of carry slot 0:" in str(refused)


def test_offload_of_a_carry_that_is_still_on_the_host() -> None:
    fetch = next(op for op in OFFLOADED.ops if isinstance(op, Fetch))
    late = next(op for op in OFFLOADED.ops if isinstance(op, Backward) and op.visit == fetch.visit)
    ops = [op._replace(carry_slot=None) if op is late else op for op in OFFLOADED.ops if op is not fetch]
    refused = refusal(lambda edited: edited.__setitem__(slice(None), ops), OFFLOADED)
    name = OFFLOADED.trace.visits[fetch.visit].name
    check(refused, ops.index(late._replace(carry_slot=None)), "offload", "has saved its carry in a carry slot")
    assert f"uses of host memory of {name}:" in str(refused)
    assert re.search(rf"\n    write +op \d+ +offload {re.escape(name)} ", str(refused))


def test_a_carry_may_come_back_into_another_carry_slot_and_go_again() -> None:
    ops = list(OFFLOADED.ops)
    ops[19], ops[21] = Fetch(1, 7), Backward(1, (0,), (0,), carry_slot=7)
    verify(Program(OFFLOADED.trace, tuple(ops)))
    ops[11:11] = [Fetch(1, 7), Offload(1, 7)]
    verify(Program(OFFLOADED.trace, tuple(ops)))


def test_nothing_is_updated_by_an_update_of_no_unit() -> None:
    """Else no separate step would follow, and parameters would never change."""
    program = zero3()(on(model(1), "ranks", "after norm"))
    assert refusal(put(len(program.ops), Update(())), program).rule in ("update", "form")


LISTED = ["0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"]
STAGE = from_actions([row.split() for row in LISTED], zero1())(cut(model(3, 2), (0, 1))).parts[0]
"""Alone: the other stage could not keep up with it."""


def test_the_messages_that_the_cases_below_change() -> None:
    assert [line for line in lines(STAGE) if "carry slot" in line] == [
        "3 forward a[0] (microbatch 0) in slot 1, keep graph, to carry slot 0",
        "4 send segment 0 -> 1 (microbatch 0) <- carry slot 0",
        "5 receive gradient 0 <- 1 (microbatch 0) -> carry slot 1",
        "7 forward a[0] (microbatch 1) in slot 1, keep graph, to carry slot 2",
        "8 send segment 0 -> 1 (microbatch 1) <- carry slot 2",
        "9 receive gradient 0 <- 1 (microbatch 1) -> carry slot 3",
        "10 backward a[0] (microbatch 0) in slot 1 -> grad slot 1, from carry slot 1",
        "12 backward a[0] (microbatch 1) in slot 1 -> grad slot 1, from carry slot 3",
    ]


@pytest.mark.parametrize(
    ("edit", "op", "message"),
    [
        (drop(4), -1, r"nothing takes segment 0 -> 1 \(microbatch 0\)"),
        (drop(5), 9, r"carry slot 1 holds nothing, it must hold gradient 0 <- 1 \(microbatch 0\)"),
        (put(4, Send(0, 0)), 5, r"carry slot 0 holds nothing, it must hold segment 0 -> 1 \(microbatch 0\)"),
        (
            replace(4, Send(0, 0, 1)),
            4,
            r"carry slot 0 holds segment 0 -> 1 \(microbatch 0\), it must hold .*\(microbatch 1\)",
        ),
        (replace(9, Receive(0, 1, 1, True)), 9, r"carry slot 1 still holds gradient 0 <- 1 \(microbatch 0\)"),
        (
            replace(5, Receive(0, 1, 1, True)),
            10,
            r"carry slot 1 holds .*\(microbatch 1\), it must hold .*\(microbatch 0\)",
        ),
        (put(4, Receive(0, 5)), 4, "that goes from stage 0 to stage 1; this is stage 0"),
        (put(4, Send(0, 0, 0, True)), 4, "that goes from stage 1 to stage 0; this is stage 0"),
        (replace(3, Forward(1, (1,), True)), 3, r"it gives segment 0 -> 1 .*: expected 1 carry slots, got \(\)"),
        (replace(2, Forward(0, (0,), True, takes=(0,))), 2, r"it takes nothing: expected 0 carry slots, got \(0,\)"),
    ],
)
def test_flow(edit: Edit, op: int, message: str) -> None:
    check(refusal(edit, STAGE), op, "flow", message)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Send(3, 0), "there are flows 0 to 0"),
        (Receive(0, None), "carry_slot None: expected the number of a carry slot"),
        (Send(0, 0, 0, 1), "back 1: expected True or False"),
        (Backward(1, (1,), (1,), half="inputs"), r"0 units but 1 slots \(1,\)"),
        (Backward(1, (1,), (1,), half="weights"), r"0 units but 1 slots \(1,\)"),
        (Backward(1, (), (1,), half="some"), "half 'some': expected 'both', 'inputs' or 'weights'"),
        (Forward(1, (1,), True, gives=(0, 0)), r"gives \(0, 0\): expected different carry slots, numbered from 0"),
        (AllReduce((0,), "all"), "over 'all': gradients are summed over 'replicas' or over 'stages'"),
    ],
)
def test_the_form_of_what_stages_do(op: Op, message: str) -> None:
    check(refusal(put(0, op), STAGE), 0, "form", message)


def test_no_carry_is_saved_on_a_stage() -> None:
    """Several microbatches of a visit are under way, and an offload does not say of which it is."""
    saves = replace(2, Forward(0, (0,), False, carry_slot=7))
    check(refusal(saves, STAGE), 2, "offload", "carries are known by their visit, and a stage has several microbatches")


def test_a_step_that_is_cut_needs_a_program_for_each_stage() -> None:
    with pytest.raises(Refused, match=r"rule 'part': the step is cut into 2 stages, .*one_f_one_b"):
        verify(zero1()(cut(model(3, 2), (0, 1))))


def test_a_schedule_in_place_of_its_program_is_told_to_be_called() -> None:
    for takes in (ya.verify, lambda program: ya.planner.simulate(program, "local")):
        with pytest.raises(TypeError, match=r"expected a Program, got function: schedule\(trace\)"):
            takes(lambda trace: trace)


def test_a_path_in_place_of_a_programs_text_is_named() -> None:
    with pytest.raises(ValueError, match="expected the text that to_json returned, no path"):
        ya.Program.from_json("program.json")
