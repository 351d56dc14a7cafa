"""Bugs of pipelines that are rows of actions, as torch.distributed.pipelining has them."""

from __future__ import annotations

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from tests.museum.exhibit import Proof, Refusal
from tests.museum.sharded import TORCH
from tests.program.traces import cut, model
from yafsdp_fn.schedules import Program, from_actions, one_f_one_b

VISUALIZER = (
    f"{TORCH}/blob/f34fa1515024423a239ce26f33a8b65ea9252502/torch/distributed/pipelining/_schedule_visualizer.py"
)
LOOPED = cut(model(4, 2), (0, 1, 0, 1))
DEEP = cut(model(6, 1), (0, 1, 0, 1, 0, 1, 0, 1))


def rows(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


def with_waits(*texts: str) -> Program:
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
