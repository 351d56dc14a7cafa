"""Bugs of pipelines: messages, carry slots, calls, and what stages must do together."""

from __future__ import annotations

from tests.museum.edits import drop, move, on_stage, with_, without
from tests.museum.exhibit import Refusal, StageOrder
from tests.museum.sharded import DEEPSPEED, MEGATRON, TORCH, VERIFIER
from tests.program.traces import cut, model, on
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Forward,
    Norm,
    Op,
    Program,
    Receive,
    Reduce,
    Send,
    gpipe,
    one_f_one_b,
    zero1,
    zero2,
    zero_bubble,
)

THREE = one_f_one_b()(cut(model(5, 3), (0, 1, 2)))
TWO = one_f_one_b(zero1())(cut(model(4, 3), (0, 1)))
TIED = one_f_one_b(zero2(update=True))(cut(on(model(4, 2, tied=True), "ranks", "after norm"), (0, 1)))
HALVES = zero_bubble()(cut(model(4, 2), (0, 1)))
ALL_FORWARD = gpipe()(cut(model(4, 4), (0, 1)))
SKIP = gpipe(zero1())(cut(model(4, 1), (0, 1, 2), ((0, 2),)))


def nth(program: Program, kind: type[Op], number: int) -> int:
    return [at for at, op in enumerate(program.ops) if isinstance(op, kind)][number]


def given_again(program: Program, sent: int) -> int:
    """The next forward that gives into the carry slot of a send."""
    slot = program.ops[sent].carry_slot
    return next(at for at, op in enumerate(program.ops) if at > sent and isinstance(op, Forward) and slot in op.gives)


def received_too_early() -> Program:
    """A receive comes before the send of what its slot holds, as with one buffer fewer."""
    program = THREE.by_stage[1]
    sent = nth(program, Send, 1)  # the first gradient to stage 0 is between two of these
    sent = next(at for at, op in enumerate(program.ops) if isinstance(op, Send) and op.back)
    slot = program.ops[sent].carry_slot
    at = next(at for at, op in enumerate(program.ops) if at > sent and isinstance(op, Receive) and op.back)
    receive = program.ops[at]
    assert isinstance(receive, Receive)
    reader = next(
        k
        for k, op in enumerate(program.ops)
        if isinstance(op, Backward) and op.microbatch == receive.microbatch and op.takes
    )
    return on_stage(THREE, 1, with_(at, carry_slot=slot), with_(reader, takes=(slot,)), move(at, sent))


def sent_too_late() -> Program:
    """A gradient leaves after the backward of the next microbatch has made another one."""
    program = TWO.by_stage[1]
    first = next(at for at, op in enumerate(program.ops) if isinstance(op, Send) and op.back)
    after = range(first + 1, len(program.ops))
    following = next(at for at in after if isinstance(op := program.ops[at], Backward) and op.gives)
    return on_stage(TWO, 1, move(first, following))


def crossed() -> Program:
    first = next(at for at, op in enumerate(TWO.stages[1]) if isinstance(op, Receive))
    second = nth(TWO.by_stage[1], Receive, 1)
    a = TWO.stages[1][first]
    b = TWO.stages[1][second]
    assert isinstance(a, Receive)
    assert isinstance(b, Receive)
    swapped = with_(first, **b._asdict()), with_(second, **a._asdict())
    return on_stage(TWO, 1, *swapped)


def batched() -> Program:
    """The last stage receives from the stage before it first, which is made of what the first stage sends last."""
    program = SKIP.by_stage[2]
    first, second = (nth(program, Receive, number) for number in (0, 1))
    first_sent, second_sent = (nth(SKIP.by_stage[0], Send, number) for number in (0, 1))
    mixed = on_stage(SKIP, 2, move(second, first))
    return on_stage(mixed, 0, move(second_sent, first_sent))


def without_weights() -> Program:
    ops = (op for op in HALVES.stages[1] if not (isinstance(op, Backward) and op.half == "weights"))
    return HALVES.with_ops(ops, 1)


def over_stages(stage: int) -> int:
    ops = TIED.stages[stage]
    return next(at for at, op in enumerate(ops) if isinstance(op, AllReduce) and op.over == "stages")


def summed_in_parts() -> Program:
    """Over stages first, and over the ranks of each of them afterwards."""
    first = next(at for at, op in enumerate(TIED.stages[0]) if isinstance(op, Reduce) and 0 in op.units)
    return on_stage(TIED, 0, move(over_stages(0), first))


def normed_alone() -> Program:
    """The last stage takes the norm of what it has by itself, which is what a step without a norm of all does."""
    return on_stage(TIED, 1, drop(nth(TIED.by_stage[1], Norm, 0)))


REFUSED = [
    Refusal(
        f"{DEEPSPEED}/issues/2800",
        "With as many buffers as its pipeline seemed to need, and not one more, a receive of an activation "
        "overwrote the "
        "gradient that "
        "was still to be sent.",
        "`one_f_one_b`; a receive into the carry slot of a gradient, before its send",
        THREE,
        received_too_early,
        "flow",
    ),
    Refusal(
        f"{TORCH}/pull/140981",
        "Gradients of inputs were kept in one place until they were sent: a send after the next backward sent "
        "that one's.",
        "a gradient is sent after the backward of the next microbatch gives into its slot",
        TWO,
        sent_too_late,
        "flow",
    ),
    Refusal(
        VERIFIER + "#RB2b",
        "A receive that no send belongs to.",
        "the last stage receives microbatch 1 where the first one sends microbatch 0",
        TWO,
        crossed,
        "match",
    ),
    Refusal(
        "https://github.com/pytorch/PiPPy/issues/969",
        "With a skip connection, a stage received from both stages before it in one batch, and hung.",
        "three stages; the first sends over the skip first, and the last wants what comes by the second stage first",
        SKIP,
        batched,
        "deadlock",
    ),
    Refusal(
        "https://github.com/deepspeedai/Megatron-DeepSpeed/issues/442",
        "Gradients of weights were put aside for a zero-bubble schedule, and without one nobody took them.",
        "`zero_bubble` without its second halves on one stage",
        HALVES,
        without_weights,
        "calls",
    ),
    Refusal(
        f"{TORCH}/issues/144530",
        "Zero-bubble schedules take gradients by another way than `backward`, on which DDP's hooks are not "
        "called: nothing "
        "was reduced.",
        "`zero_bubble` without its reductions on one stage",
        HALVES,
        lambda: on_stage(HALVES, 0, without(Reduce)),
        "once",
    ),
    Refusal(
        f"{MEGATRON}/issues/844",
        "Tied embeddings and a distributed optimizer: parts of the gradient were summed over stages that were "
        "not the same "
        "part, some reduced over ranks, some not.",
        "the sum over the two stages that share a unit, before its reduction on one of them",
        TIED,
        summed_in_parts,
        "shared",
    ),
    Refusal(
        "https://github.com/uw-syfi/piper/issues/13",
        "Tied embeddings on two stages became two, and their gradients were never summed.",
        "a unit that two stages share, without the sum over them on one",
        TIED,
        lambda: on_stage(TIED, 0, drop(over_stages(0))),
        "norm",
    ),
    Refusal(
        "https://github.com/pytorch/torchtitan/issues/596",
        "Gradients were clipped by the norm of a stage's own parameters.",
        "a step that clips; one stage updates without the norm of all",
        TIED,
        normed_alone,
        "update",
    ),
]

RACES = [
    StageOrder(
        f"{MEGATRON}/pull/4047",
        "The memory of an output was given away before its asynchronous send had read it: NaN on the next stage.",
        "a forward gives into the carry slot of one that is still being sent",
        ALL_FORWARD,
        0,
        given_again(ALL_FORWARD.by_stage[0], nth(ALL_FORWARD.by_stage[0], Send, 0)),
        nth(ALL_FORWARD.by_stage[0], Send, 0),
    ),
]
