"""Bugs of pipelines: messages, carry slots, calls, and what stages must do together."""

from __future__ import annotations

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from tests.museum.edits import drop, move, on_stage, with_, without
from tests.museum.exhibit import Proof, Refusal
from tests.museum.sharded import DEEPSPEED, MEGATRON, TORCH, VERIFIER
from tests.schedules.traces import cut, model, on
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Norm,
    Op,
    Pipeline,
    Program,
    Receive,
    Reduce,
    Send,
    from_actions,
    gpipe,
    one_f_one_b,
    zero1,
    zero2,
    zero_bubble,
)

VISUALIZER = (
    f"{TORCH}/blob/f34fa1515024423a239ce26f33a8b65ea9252502/torch/distributed/pipelining/_schedule_visualizer.py"
)
THREE = one_f_one_b()(cut(model(5, 3), (0, 1, 2)))
TWO = one_f_one_b(zero1())(cut(model(4, 3), (0, 1)))
TIED = one_f_one_b(zero2(update=True))(cut(on(model(4, 2, tied=True), "ranks", "after norm"), (0, 1)))
HALVES = zero_bubble()(cut(model(4, 2), (0, 1)))
SKIP = gpipe(zero1())(cut(model(4, 1), (0, 1, 2), ((0, 2),)))
LOOPED = cut(model(4, 2), (0, 1, 0, 1))
DEEP = cut(model(6, 1), (0, 1, 0, 1, 0, 1, 0, 1))


def rows(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


def nth(program: Program, kind: type[Op], number: int) -> int:
    return [at for at, op in enumerate(program.ops) if isinstance(op, kind)][number]


def received_too_early() -> Pipeline:
    """A receive comes before the send of what its slot holds, as with one buffer fewer."""
    program = THREE.stages[1]
    sent = nth(program, Send, 1)  # the first gradient to stage 0 is between two of these
    sent = next(at for at, op in enumerate(program.ops) if isinstance(op, Send) and op.back)
    slot = program.ops[sent].carry_slot  # type: ignore[union-attr]
    at = next(at for at, op in enumerate(program.ops) if at > sent and isinstance(op, Receive) and op.back)
    receive = program.ops[at]
    assert isinstance(receive, Receive)
    reader = next(
        k
        for k, op in enumerate(program.ops)
        if isinstance(op, Backward) and op.microbatch == receive.microbatch and op.takes
    )
    return on_stage(THREE, 1, with_(at, carry_slot=slot), with_(reader, takes=(slot,)), move(at, sent))


def sent_too_late() -> Pipeline:
    """A gradient leaves after the backward of the next microbatch has made another one."""
    program = TWO.stages[1]
    first = next(at for at, op in enumerate(program.ops) if isinstance(op, Send) and op.back)
    after = range(first + 1, len(program.ops))
    following = next(at for at in after if isinstance(op := program.ops[at], Backward) and op.gives)
    return on_stage(TWO, 1, move(first, following))


def crossed() -> Pipeline:
    first = next(at for at, op in enumerate(TWO.stages[1].ops) if isinstance(op, Receive))
    second = nth(TWO.stages[1], Receive, 1)
    a, b = TWO.stages[1].ops[first], TWO.stages[1].ops[second]
    assert isinstance(a, Receive) and isinstance(b, Receive)
    swapped = with_(first, **b._asdict()), with_(second, **a._asdict())
    return on_stage(TWO, 1, *swapped)


def batched() -> Pipeline:
    """The last stage receives from the stage before it first, which is made of what the first stage sends last."""
    program = SKIP.stages[2]
    first, second = (nth(program, Receive, number) for number in (0, 1))
    first_sent, second_sent = (nth(SKIP.stages[0], Send, number) for number in (0, 1))
    mixed = on_stage(SKIP, 2, move(second, first))
    return on_stage(mixed, 0, move(second_sent, first_sent))


def without_weights() -> Pipeline:
    program = HALVES.stages[1]
    order = tuple(compute for compute in program.trace.order if compute.kind != "weights")
    ops = tuple(op for op in program.ops if not (isinstance(op, Backward) and op.half == "weights"))
    halved = Program(program.trace._replace(order=order), ops)
    return HALVES._replace(stages=(HALVES.stages[0], halved))


def over_stages(stage: int) -> int:
    ops = TIED.stages[stage].ops
    return next(at for at, op in enumerate(ops) if isinstance(op, AllReduce) and op.over == "stages")


def summed_in_parts() -> Pipeline:
    """Over stages first, and over the ranks of each of them afterwards."""
    first = next(at for at, op in enumerate(TIED.stages[0].ops) if isinstance(op, Reduce) and 0 in op.units)
    return on_stage(TIED, 0, move(over_stages(0), first))


def normed_alone() -> Pipeline:
    """The last stage takes the norm of what it has by itself, which is what a step without a norm of all does."""
    return on_stage(TIED, 1, drop(nth(TIED.stages[1], Norm, 0)))


def with_waits(*texts: str) -> Pipeline:
    return from_actions(rows(*texts))(LOOPED)


LOOP = (
    "0F0 0F1 0SEND_F0 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1 2SEND_F0 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 "
    "2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1 3B0 3SEND_B0 3B1 3SEND_B1 1RECV_B0 1B0 "
    "1SEND_B0 1RECV_B1 1B1 1SEND_B1",
)
CRISS = LOOP[1].replace("1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1", "1RECV_F1 1F1 3RECV_F0 3F0 1SEND_F1 3RECV_F1")
BOTH_SEND = (
    "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 "
    "2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 1RECV_B0 1B0 "
    "1SEND_B0 1RECV_B1 1B1 1SEND_B1",
)
FORWARD = (
    "0UNSHARD 0F0 2UNSHARD 2F0 4UNSHARD 4F0 0RESHARD 6UNSHARD 6F0 ",
    "1UNSHARD 3UNSHARD 5UNSHARD 7UNSHARD 1F0 3F0 5F0 7F0 7B0 5B0 3B0 1B0",
)
GATHERED = (FORWARD[0] + "6B0 6RESHARD 0UNSHARD 4B0 2B0 0B0", FORWARD[1])
NOT_AGAIN = (FORWARD[0] + "6B0 6RESHARD 4B0 2B0 0B0", FORWARD[1])
LATE = ("0F0 0UNSHARD 2UNSHARD 2F0 2B0 0B0", "1UNSHARD 3UNSHARD 1F0 3F0 3B0 1B0")
ON_TIME = ("0UNSHARD 0F0 2UNSHARD 2F0 2B0 0B0", "1UNSHARD 3UNSHARD 1F0 3F0 3B0 1B0")
ONE = cut(model(4, 1), (0, 1, 0, 1))

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
        f"{TORCH}/pull/127332",
        "Interleaved 1F1B: communication of two ranks crossed, and both waited.",
        "rows with two segments a stage; a send after the receive of what it leads to",
        with_waits(*LOOP),
        lambda: with_waits(LOOP[0], CRISS),
        "deadlock",
    ),
    Refusal(
        VISUALIZER,
        "The rows that torch 2.13's visualizer gives for 1F1B have a backward before its forward.",
        'rows of `get_schedule_ops("1F1B", 4, 8)`',
        one_f_one_b()(cut(model(6, 8), (0, 1, 2, 3))),
        lambda: from_actions(get_schedule_ops("1F1B", 4, 8))(cut(model(6, 8), (0, 1, 2, 3))),
        "calls",
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
        f"{TORCH}/issues/164756",
        "Under interleaved 1F1B, FSDP's gathers were not where the schedule wanted them.",
        "rows in which a segment's weights are gathered after its forward",
        from_actions(rows(*ON_TIME))(ONE),
        lambda: from_actions(rows(*LATE))(ONE),
        "weights",
    ),
    Refusal(
        f"{TORCH}/pull/165467",
        "With more than three segments a rank, weights must be gathered and let go several times; they were "
        "gathered once.",
        "rows with four segments a stage, of which three are there at a time; one is not gathered again",
        from_actions(rows(*GATHERED))(DEEP),
        lambda: from_actions(rows(*NOT_AGAIN))(DEEP),
        "weights",
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

PROVED = [
    Proof(
        f"{TORCH}/issues/172668",
        "Two ranks wait for each other's receive, each with a send before its own.",
        "rows with these sends and receives",
        with_waits(*BOTH_SEND),
        "accepted, and it ends: sends and receives are streams of their own, and a send holds up no receive",
    ),
]
