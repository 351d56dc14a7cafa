"""The rules of `verify`: what each refuses, by name, with the op and the reason."""

from __future__ import annotations

import re
from functools import partial

import pytest

import yafsdp_fn as ya
from tests.program.traces import cut, model, on, trace_of, unit
from tests.proof.listed import Edit, begin, check, drop, listed, move, put, refusal, replace
from tests.proof.overlapped import right
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Compute,
    Exchange,
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
    Trace,
    Update,
    verify,
)

# ---- The programs that most cases change. Numbers of units and visits: embed 0, layers a[0] 1 to a[2] 3, head 4.

PLAIN = listed(
    model(3),
    """
    gather embed -> slot 2
    gather a[0] -> slot 0
    forward embed in slot 2, keep graph
    gather a[1] -> slot 1
    forward a[0] in slot 0, keep graph
    gather a[2] -> slot 0
    forward a[1] in slot 1, keep graph
    gather head -> slot 3
    forward a[2] in slot 0, keep graph
    forward head in slot 3, keep graph, may begin grad slot 3
    backward head in slot 3 -> grad slot 3
    reduce head <- grad slot 3
    backward a[2] in slot 0 -> grad slot 0
    reduce a[2] <- grad slot 0
    gather a[0] -> slot 0
    backward a[1] in slot 1 -> grad slot 1
    reduce a[1] <- grad slot 1
    backward a[0] in slot 0 -> grad slot 0
    reduce a[0] <- grad slot 0
    backward embed in slot 2 -> grad slot 2
    reduce embed <- grad slot 2
    """,
)
"""Two slots that layers take in turn, and one of its own for each other unit; so for gradients."""

WHOLE = listed(
    on(model(3), "replicas and nodes", "after norm"),
    """
    stash a[0] <- slot 0
    forward embed in slot 2, keep graph
    gather a[1] -> slot 1
    forward a[0] in slot 0, keep graph
    gather a[2] -> slot 0
    forward a[1] in slot 1, keep graph
    gather head -> slot 3
    forward a[2] in slot 0, keep graph
    forward head in slot 3, keep graph, may begin grad slot 3
    backward head in slot 3 -> grad slot 3
    reduce head <- grad slot 3
    all-reduce head
    backward a[2] in slot 0 -> grad slot 0
    reduce a[2] <- grad slot 0
    all-reduce a[2]
    gather a[0] in node -> slot 0
    backward a[1] in slot 1 -> grad slot 1
    reduce a[1] <- grad slot 1
    all-reduce a[1]
    backward a[0] in slot 0 -> grad slot 0
    reduce a[0] <- grad slot 0
    all-reduce a[0]
    backward embed in slot 2 -> grad slot 2
    reduce embed <- grad slot 2
    all-reduce embed
    norm of 5 units
    update embed
    gather embed -> slot 2
    update a[0]
    gather a[0] -> slot 0
    update a[1]
    update a[2]
    update head
    """,
)
"""With what replicas, nodes and an optimizer add; the first slots are carried over to the next step."""

OFFLOADED = listed(
    model(3),
    """
    gather embed -> slot 2
    gather a[0] -> slot 0
    forward embed in slot 2, keep graph
    gather a[1] -> slot 1
    forward a[0] in slot 0, recompute, save in carry slot 0
    offload a[0] <- carry slot 0
    gather a[2] -> slot 0
    forward a[1] in slot 1, recompute, save in carry slot 0
    offload a[1] <- carry slot 0
    gather head -> slot 3
    forward a[2] in slot 0, recompute, save in carry slot 0
    forward head in slot 3, keep graph, may begin grad slot 3
    backward head in slot 3 -> grad slot 3
    reduce head <- grad slot 3
    backward a[2] in slot 0, carry slot 0 -> grad slot 0
    fetch a[1] -> carry slot 0
    reduce a[2] <- grad slot 0
    gather a[0] -> slot 0
    backward a[1] in slot 1, carry slot 0 -> grad slot 1
    fetch a[0] -> carry slot 0
    reduce a[1] <- grad slot 1
    backward a[0] in slot 0, carry slot 0 -> grad slot 0
    reduce a[0] <- grad slot 0
    backward embed in slot 2 -> grad slot 2
    reduce embed <- grad slot 2
    """,
)
"""As PLAIN, but layers recompute, and save in one carry slot; the last layer's carry stays there."""

STAGE = listed(
    cut(model(3, 2), (0, 1)),
    """
    gather embed -> slot 0
    gather a[0] -> slot 1
    forward embed (microbatch 0) in slot 0, keep graph
    forward a[0] (microbatch 0) in slot 1, keep graph, to carry slot 0
    send segment 0 -> 1 (microbatch 0) <- carry slot 0
    receive gradient 0 <- 1 (microbatch 0) -> carry slot 1
    forward embed (microbatch 1) in slot 0, keep graph
    forward a[0] (microbatch 1) in slot 1, keep graph, to carry slot 2
    send segment 0 -> 1 (microbatch 1) <- carry slot 2
    receive gradient 0 <- 1 (microbatch 1) -> carry slot 3
    backward a[0] (microbatch 0) in slot 1 -> grad slot 1, from carry slot 1
    backward embed (microbatch 0) in slot 0 -> grad slot 0
    backward a[0] (microbatch 1) in slot 1 -> grad slot 1, from carry slot 3
    reduce a[0] <- grad slot 1
    backward embed (microbatch 1) in slot 0 -> grad slot 0
    reduce embed <- grad slot 0
    """,
).by_stage[0]
"""Stage 0 of two, alone. The other stage could not keep up with it."""


def one(trace: Trace, *end: Op) -> Program:
    """A program of one unit and one visit: the step, and its end."""
    step = """
    gather a -> slot 0
    forward a in slot 0, keep graph
    backward a in slot 0 -> grad slot 0
    reduce a <- grad slot 0
    """
    program = listed(trace, step)
    return program.with_ops((*program.ops, *end))


ONE = trace_of([unit(0, "a")], [[0]])


@pytest.mark.parametrize("program", [PLAIN, WHOLE, OFFLOADED, STAGE, one(ONE)])
def test_a_right_program_comes_back(program: Program) -> None:
    assert verify(program) is program


OF_NO_UNITS = Gather((), ()), Stash((), ()), Reduce((), ()), AllReduce(()), Norm(()), Update(())


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Gather((7,), (0,)), "the trace has units 0 to 4"),
        (Gather((-1,), (0,)), "the trace has units 0 to 4"),
        (AllReduce((5,)), "the trace has units 0 to 4"),
        (Update((-1,)), "the trace has units 0 to 4"),
        (Forward(5, (0,), True), "there are visits 0 to 4"),
        (Gather((0,), (0, 1)), r"1 units but 2 slots \(0, 1\)"),
        (Stash((0, 1), (0,)), r"2 units but 1 slots \(0,\)"),
        (Gather((0, 1), (3, 3)), r"slots \(3, 3\) name one slot twice"),
        (Norm((1, 1)), r"units \(1, 1\) name one unit twice"),
        (Gather((0,), (2,), "rack"), "source 'rack': a gather reads from 'shard' or from 'node'"),
        (Compute("forward", 0, 0), "not an op of a program"),
        (Gather(0, 0), r"units 0: expected a tuple of ints, such as \(0,\)"),
        (Gather((0,), [0]), r"slots \[0\]: expected a tuple of ints"),
        (Reduce(("0",), (0,)), r"units \('0',\): expected a tuple of ints"),
        (Forward("embed", (0,), True), "visit 'embed': expected the number of a visit"),
        (Forward(0, (0,), 1), "keep 1: expected True or False"),
        (Forward(0, (0,), True, carry_slot=0), "a kept graph holds what it was given; a carry slot is for"),
        (Forward(0, (0,), False, carry_slot="0"), "carry_slot '0': expected the number of a carry slot"),
        (Fetch(0, None), "carry_slot None: expected the number of a carry slot"),
        (Offload(-1, 0), "there are visits 0 to 4"),
        (Gather((0,), (-1,)), r"slots \(-1,\): slots are numbered from 0"),
        (Backward(0, (0,), (-1,)), r"slots \(-1,\): slots are numbered from 0"),
        (Fetch(0, -1), "carry_slot -1: slots are numbered from 0"),
        (Forward(0, (0,), True, "0"), "microbatch '0': expected the number of a microbatch"),
        (Forward(0, (0,), True, early=(0, 1)), r"1 units but 2 slots \(0, 1\)"),
        *((op, "it names no unit; leave the op out") for op in OF_NO_UNITS),
    ],
)
def test_form(op: Op, message: str) -> None:
    check(begin(op)(PLAIN), 0, "form", message)


def test_the_form_of_a_backward() -> None:
    """It has a gradient slot for each unit that its visit trains."""
    check(replace("backward head", Backward(4, (3,), ()))(PLAIN), "backward head", "form", "1 units but 0 slots")


REFUSED: dict[str, tuple[Program, list[tuple[Edit, str | int, str]]]] = {
    "order": (
        PLAIN,
        [
            (
                move("forward head", "forward a[2]"),
                "forward head",
                r"op 8 \(forward head in slot 3, keep graph.*the trace has forward of a\[2\] here",
            ),
            (drop("backward embed", "reduce embed"), -1, "backward of embed is missing"),
            (put(Forward(0, (2,), True)), "forward embed, again", "the trace has no more computes"),
            (
                replace("forward a[2]", Forward(3, (0,), True, 1)),
                "forward a[2]",
                r"the trace has forward of a\[2\] here",
            ),
        ],
    ),
    "weights": (
        PLAIN,
        [
            (drop("gather head"), "forward head", "slot 3 holds no weights of this step; it must hold head"),
            (drop("gather embed"), "forward embed", "slot 2 holds no weights of this step; it must hold embed"),
            (
                drop("gather a[0] -> slot 0"),
                "forward a[0]",
                r"slot 0 holds no weights of this step; it must hold a\[0\]",
            ),
            (drop("gather a[2]"), "forward a[2]", r"slot 0 holds a\[0\], it must hold a\[2\]"),
            (drop("gather a[0], again"), "backward a[0]", r"slot 0 holds a\[2\], it must hold a\[0\]"),
            (
                drop("gather a[0] -> slot 0", "gather a[2]", "gather a[0], again"),
                "forward a[2]",
                r"slot 0 holds a\[0\], it must hold a\[2\] \(it was there when the step began\)",
            ),
            (put(Gather((1,), (0,)), "forward a[2]"), "forward a[2]", r"slot 0 holds a\[0\], it must hold a\[2\]"),
        ],
    ),
    "secondary": (
        WHOLE,
        [
            (drop("stash a[0]"), "gather a[0] in", r"nothing was stashed of a\[0\] in this step"),
            (
                replace("gather a[0] ->", Gather((1,), (0,), "node")),
                "gather a[0], again",
                r"secondary shard of a\[0\] is of the weights before its update",
            ),
            (
                put(Stash((1,), (0,)), "gather a[0] in"),
                "stash a[0], again",
                r"slot 0 holds a\[2\], and a\[0\] is stashed from it",
            ),
        ],
    ),
    "reduce": (
        PLAIN,
        [
            (
                put(Reduce((1,), (0,)), "backward embed"),
                "reduce a[0], again",
                r"grad slot 0 holds no gradient of a\[0\]; it was reduced already",
            ),
            (
                put(Reduce((1,), (0,)), "reduce a[2]"),
                "reduce a[0] <- grad slot 0",
                r"grad slot 0 holds the gradient of a\[2\], not of a\[0\]",
            ),
            (
                put(Reduce((0,), (9,)), "reduce head"),
                "reduce embed <- grad slot 9",
                "grad slot 9 holds no gradient of embed$",
            ),
        ],
    ),
    "replicas": (
        WHOLE,
        [
            (
                put(AllReduce((4,)), "backward a[2]"),
                "all-reduce head, again",
                "the gradient of head was summed over replicas already",
            ),
            (
                move("all-reduce head", "reduce head"),
                "all-reduce head",
                "the gradient of head from head in microbatch 0 is not reduced yet",
            ),
            (
                put(AllReduce((4,)), "reduce head"),
                "all-reduce head",
                "the gradient of head from head in microbatch 0 is not reduced yet",
            ),
        ],
    ),
    "early": (
        PLAIN,
        [
            (
                replace("forward head", Forward(4, (3,), False, early=(3,))),
                "forward head",
                "it recomputes, and its backward would not know",
            ),
            (
                replace("forward a[2]", Forward(3, (0,), True, early=(0,))),
                "forward a[2]",
                "its own backward is not the next compute",
            ),
            (
                replace("forward head", Forward(4, (3,), True, early=(2,))),
                "forward head",
                r"its backward writes to grad slots \(3,\), not \(2,\)",
            ),
        ],
    ),
    "norm": (
        WHOLE,
        [
            (
                replace("norm of", Norm((0, 1, 2, 3))),
                "norm of",
                "must be of all trainable units: head is trainable, and missing",
            ),
            (put(Norm((0, 1, 2, 3, 4)), "update embed"), "norm of, again", "the norm was taken already"),
            (move("norm of", "all-reduce embed"), "norm of", "the gradient of embed is not summed over replicas yet"),
            (move("norm of", "backward embed"), "norm of", "the norm comes before the last compute"),
        ],
    ),
    "update": (
        WHOLE,
        [
            (drop("update head"), -1, "head is never updated, other units are"),
            (put(Update((4,))), "update head, again", "head was updated already"),
            (drop("norm of"), "update embed", "embed is updated before the norm of the whole gradient is known"),
            (
                move("update embed", "backward a[1]"),
                "update embed",
                "embed is updated before the norm of the whole gradient is known",
            ),
        ],
    ),
    "offload": (
        OFFLOADED,
        [
            (drop("offload a[0]"), "forward a[1]", r"carry slot 0 still holds what a\[0\] has saved"),
            (
                put(Offload(2, 0), "offload a[0]"),
                "offload a[1] <- carry slot 0",
                r"carry slot 0 holds what a\[0\] has saved, it must hold what a\[1\] has saved",
            ),
            (
                put(Offload(1, 0), "gather a[2]"),
                "offload a[0], again",
                r"carry slot 0 holds nothing, it must hold what a\[0\] has saved",
            ),
            (drop("offload a[1]"), "forward a[2]", r"carry slot 0 still holds what a\[1\] has saved"),
            (drop("fetch a[1]"), "backward a[1]", r"carry slot 0 holds nothing, it must hold what a\[1\] has saved"),
            (put(Fetch(1, 0), "fetch a[1]"), "fetch a[1]", r"carry slot 0 still holds what a\[0\] has saved"),
            (
                replace("fetch a[1]", Fetch(1, 0)),
                "backward a[1]",
                r"carry slot 0 holds what a\[0\] has saved, it must hold what a\[1\] has saved",
            ),
            (
                put(Fetch(1, 1), "reduce a[1]"),
                "fetch a[0] -> carry slot 1",
                r"nothing that a\[0\] has saved is on the host",
            ),
            (begin(Fetch(1, 0)), "fetch a[0] -> carry slot 0", r"nothing that a\[0\] has saved is on the host"),
            (
                replace("backward a[0]", Backward(1, (0,), (0,))),
                "backward a[0]",
                r"a\[0\] has saved its carry in a carry slot",
            ),
            (
                replace("forward embed", Forward(0, (2,), False, carry_slot=3)),
                "backward embed",
                "embed has saved its carry in a carry slot",
            ),
            (
                replace("forward a[0]", Forward(1, (0,), False)),
                "offload a[0]",
                r"carry slot 0 holds nothing, it must hold what a\[0\] has saved",
            ),
            (
                replace("backward head", Backward(4, (3,), (3,), carry_slot=1)),
                "backward head",
                "the forward of head has saved no carry",
            ),
        ],
    ),
    "flow": (
        STAGE,
        [
            (drop("send segment 0 -> 1 (microbatch 0)"), -1, r"nothing takes segment 0 -> 1 \(microbatch 0\)"),
            (
                drop("receive gradient 0 <- 1 (microbatch 0)"),
                "backward a[0] (microbatch 0)",
                r"carry slot 1 holds nothing, it must hold gradient 0 <- 1 \(microbatch 0\)",
            ),
            (
                put(Send(0, 0), "send segment 0 -> 1 (microbatch 0)"),
                "send segment 0 -> 1 (microbatch 0), again",
                r"carry slot 0 holds nothing, it must hold segment 0 -> 1 \(microbatch 0\)",
            ),
            (
                replace("send segment 0 -> 1 (microbatch 0)", Send(0, 0, 1)),
                "send segment 0 -> 1 (microbatch 1) <- carry slot 0",
                r"carry slot 0 holds segment 0 -> 1 \(microbatch 0\), it must hold .*\(microbatch 1\)",
            ),
            (
                replace("receive gradient 0 <- 1 (microbatch 1)", Receive(0, 1, 1, True)),
                "receive gradient 0 <- 1 (microbatch 1)",
                r"carry slot 1 still holds gradient 0 <- 1 \(microbatch 0\)",
            ),
            (
                replace("receive gradient 0 <- 1 (microbatch 0)", Receive(0, 1, 1, True)),
                "backward a[0] (microbatch 0)",
                r"carry slot 1 holds .*\(microbatch 1\), it must hold .*\(microbatch 0\)",
            ),
            (
                put(Receive(0, 5), "send segment 0 -> 1 (microbatch 0)"),
                "receive segment",
                "that goes from stage 0 to stage 1; this is stage 0",
            ),
            (
                put(Send(0, 0, 0, True), "send segment 0 -> 1 (microbatch 0)"),
                "send gradient",
                "that goes from stage 1 to stage 0; this is stage 0",
            ),
            (
                replace("forward a[0] (microbatch 0)", Forward(1, (1,), True)),
                "forward a[0] (microbatch 0)",
                r"it gives segment 0 -> 1 .*: expected 1 carry slots, got \(\)",
            ),
            (
                replace("forward embed (microbatch 0)", Forward(0, (0,), True, takes=(0,))),
                "forward embed (microbatch 0)",
                r"it takes nothing: expected 0 carry slots, got \(0,\)",
            ),
        ],
    ),
}
"""By the rule that refuses it: of a program, edits, the op that is refused then, and why."""


@pytest.mark.parametrize(
    ("rule", "number"), [(rule, number) for rule, (_, rows) in REFUSED.items() for number in range(len(rows))]
)
def test_refused(rule: str, number: int) -> None:
    program, rows = REFUSED[rule]
    edit, at, message = rows[number]
    check(edit(program), at, rule, message)


@pytest.mark.parametrize(
    ("edit", "held"),
    [
        (drop("gather a[0] ->"), r"a\[0\] of this step"),
        (move("gather a[0] ->", "update a[0]"), r"a\[0\] of this step"),  # gathered before its update
        (put(Gather((3,), (0,))), r"a\[2\]"),
    ],
)
def test_carry(edit: Edit, held: str) -> None:
    message = rf"read before anything is gathered into it, .* the next step's a\[0\]; it will hold {held}"
    check(edit(WHOLE), 0, "carry", message)


def moved(program: Program) -> Program:
    """a[0] is gathered for its backward into a slot of its own, though its graph was kept in slot 0."""
    gathered = replace("gather a[0], again", Gather((1,), (7,)))(program)
    return replace("backward a[0]", Backward(1, (7,), (0,)))(gathered)


def test_graph() -> None:
    refused = check(moved(PLAIN), "backward a[0]", "graph", r"the graph was kept in slots \(0,\), not \(7,\)")
    assert re.search(r"forward a\[0\] in slot 0, keep graph +<- against this", str(refused))
    verify(moved(replace("forward a[0]", Forward(1, (0,), False))(PLAIN)))  # a recomputed graph may move


def test_a_backward_without_a_forward() -> None:
    trace = ONE._replace(order=ONE.order[1:])
    check(drop("forward a")(one(trace)), "backward a", "graph", "no forward of a before it")


def test_gradient() -> None:
    message = r"grad slot 0 still holds the unreduced gradient of a\[2\]"
    check(drop("reduce a[2]")(PLAIN), "backward a[0]", "gradient", message)


TWICE = """
    gather a -> slot 0
    forward a (microbatch 0) in slot 0, keep graph
    backward a (microbatch 0) in slot 0 -> grad slot 0
    reduce a <- grad slot 0
    forward a (microbatch 1) in slot 0, keep graph
    backward a (microbatch 1) in slot 0 -> grad slot 0
    reduce a <- grad slot 0
"""
"""Of two microbatches."""


def test_once() -> None:
    check(drop("reduce a[0]")(PLAIN), -1, "once", r"grad slot 0 still holds the gradient of a\[0\]")
    program = verify(listed(trace_of([unit(0, "a")], [[0]], 2), TWICE))
    check(drop("reduce a, again")(program), -1, "once", "grad slot 0 still holds the gradient of a")


def test_ordered() -> None:
    """On a deterministic mesh a unit is reduced once in a microbatch, with all that its visits have added."""
    trace = trace_of([unit(0, "a"), unit(1, "b")], [[0], [1, 0]], 2)._replace(ordered=True)
    program = listed(
        trace,
        """
        gather a -> slot 0
        gather b -> slot 1
        forward a (microbatch 0) in slot 0, keep graph
        forward b+a (microbatch 0) in slots 1, 0, keep graph
        backward b+a (microbatch 0) in slots 1, 0 -> grad slots 1, 0
        backward a (microbatch 0) in slot 0 -> grad slot 0
        reduce b, a <- grad slots 1, 0
        forward a (microbatch 1) in slot 0, keep graph
        forward b+a (microbatch 1) in slots 1, 0, keep graph
        backward b+a (microbatch 1) in slots 1, 0 -> grad slots 1, 0
        backward a (microbatch 1) in slot 0 -> grad slot 0
        reduce b, a <- grad slots 1, 0
        """,
    )
    verify(program)
    message = r"gradients of b from microbatches \[0, 1\] are added before they are reduced"
    refused = check(drop("reduce b, a")(program), "reduce b, a", "ordered", message)
    assert "uses of grad slot 1:" in str(refused)
    assert re.search(r"\n    read +op \d+ +reduce b, a .*<- refused", str(refused))
    apart = put(Reduce((0,), (0,)), "backward a (microbatch 0)")(program)
    check(apart, "reduce a", "ordered", "what a adds to the gradient of a is reduced apart from it")


def test_ordered_microbatches() -> None:
    """On a deterministic mesh they are reduced in their order."""
    trace = trace_of([unit(0, "a")], [[0]], 2)
    both = [(Forward(0, (0,), True, m), Backward(0, (0,), (m,), m)) for m in range(2)]
    ops = (Gather((0,), (0,)), *both[0], *both[1], Reduce((0,), (1,)), Reduce((0,), (0,)))
    verify(Program(trace, ops))
    program = Program(trace._replace(ordered=True), ops)
    check(program, "reduce a, again", "ordered", "a later microbatch's gradient of a was reduced before")


def test_replicas_that_are_missing() -> None:
    check(one(on(ONE, "replicas")), -1, "replicas", "the gradient of a is never summed over replicas")
    frozen = on(trace_of([unit(0, "a", trainable=False)], [[0]]), "replicas")
    program = Program(frozen, (Gather((0,), (0,)), Forward(0, (0,), True), Backward(0, (0,), ())))
    check(begin(AllReduce((0,)))(verify(program)), 0, "replicas", "nothing trains a")


@pytest.mark.parametrize(
    "program",
    [
        put(AllReduce((0,)))(PLAIN),
        begin(AllReduce((4,)))(WHOLE),
        put(Stash((3,), (0,)), "reduce a[2]")(WHOLE),
    ],
)
def test_what_is_of_no_use_does_no_harm(program: Program) -> None:
    """A sum over one replica; one that the first gradient overwrites; a stash that nothing gathers."""
    assert right(verify(program))


def test_a_part_of_a_gradient_that_comes_after_the_sum_over_replicas() -> None:
    program = listed(on(trace_of([unit(0, "a")], [[0]], 2), "replicas"), TWICE)
    verify(put(AllReduce((0,)))(program))
    early = put(AllReduce((0,)), "forward a (microbatch 1)")(program)
    check(early, "all-reduce a", "replicas", "the gradient of a from a in microbatch 1 is not reduced yet")


def test_a_gradient_is_not_begun_where_another_waits() -> None:
    program = drop("reduce a")(listed(trace_of([unit(0, "a")], [[0]], 2), TWICE))
    second = "forward a (microbatch 1)"
    begun = replace(second, Forward(0, (0,), True, 1, early=(0,)))(verify(program))
    check(begun, second, "early", "grad slot 0 still holds the unreduced gradient of a")


def test_norm_that_nothing_reads() -> None:
    check(one(on(ONE, "ranks", "after norm"), Norm((0,))), "norm of", "norm", "the program has no updates")


def test_norm_of_a_step_without_optimizer() -> None:
    check(one(ONE, Norm((0,))), "norm of", "norm", "this step has no optimizer")


def test_update_without_an_optimizer() -> None:
    check(put(Update((0,)))(PLAIN), "update embed", "update", "this step has no optimizer")


def test_update_of_a_frozen_unit() -> None:
    units = [unit(0, "a"), unit(1, "b", trainable=False)]
    trace = on(trace_of(units, [[0]]), "ranks", "after norm")
    program = one(trace, Norm((0,)), Update((0,)))
    check(put(Update((1,)))(verify(program)), "update b", "update", "b is frozen")


def test_update_that_does_not_end() -> None:
    trace = on(ONE, "ranks", "after norm", parts=3)
    turns = (Update((0,)), Exchange((0,), 0), Update((0,), 1), Exchange((0,), 1))
    verify(one(trace, Norm((0,)), *turns, Update((0,), 2)))
    check(one(trace, Norm((0,)), *turns), -1, "update", "the update of a does not end: it has 3 parts")


def test_offload_without_a_backward() -> None:
    trace = trace_of([unit(0, "a")], [[0]], backward=False)
    program = listed(trace, "gather a -> slot 0\nforward a in slot 0, recompute, save in carry slot 0")
    refused = check(program, -1, "offload", "no backward reads what a has saved")
    assert "uses of carry slot 0:" in str(refused)


def test_offload_of_a_carry_that_is_still_on_the_host() -> None:
    program = replace("backward a[1]", Backward(2, (1,), (1,)))(drop("fetch a[1]")(OFFLOADED))
    refused = check(program, "backward a[1]", "offload", "has saved its carry in a carry slot")
    assert "uses of host memory of a[1]:" in str(refused)
    assert re.search(r"\n    write +op \d+ +offload a\[1\] ", str(refused))


def test_a_carry_may_come_back_into_another_carry_slot_and_go_again() -> None:
    program = replace("fetch a[0]", Fetch(1, 7))(OFFLOADED)
    program = verify(replace("backward a[0]", Backward(1, (0,), (0,), carry_slot=7))(program))
    again = put(Fetch(1, 7), "forward head")(program)
    verify(put(Offload(1, 7), "forward head")(again))


def test_nothing_is_updated_by_an_update_of_no_unit() -> None:
    """Else no separate step would follow, and parameters would never change."""
    assert refusal(one(on(ONE, "ranks", "after norm"), Update(()))).rule in ("update", "form")


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
    check(begin(op)(STAGE), 0, "form", message)


def test_no_carry_is_saved_on_a_stage() -> None:
    """Several microbatches of a visit are under way, and an offload does not say of which it is."""
    start = "forward embed (microbatch 0)"
    saves = replace(start, Forward(0, (0,), False, carry_slot=7))(STAGE)
    check(saves, start, "offload", "carries are known by their visit, and a stage has several microbatches")


def test_a_step_that_is_cut_needs_a_program_for_each_stage() -> None:
    with pytest.raises(Refused, match=r"rule 'stages': the step is cut into 2 stages, .*one_f_one_b"):
        verify(Program(cut(model(3, 2), (0, 1)), STAGE.ops))


def test_a_schedule_in_place_of_its_program_is_told_to_be_called() -> None:
    planned = ya.planner.Plan.of
    for takes in (ya.verify, *(partial(call, cluster="local") for call in (ya.planner.simulate, planned))):
        with pytest.raises(TypeError, match=r"expected a Program, got function: schedule\(trace\)"):
            takes(lambda trace: trace)


def test_a_path_in_place_of_a_programs_text_is_named() -> None:
    with pytest.raises(ValueError, match="expected the text that to_json returned, no path"):
        ya.Program.from_json("program.json")
