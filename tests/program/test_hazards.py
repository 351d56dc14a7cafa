"""Hazards: who waits for whom. That the waits are enough, and all needed, is in tests/proof/test_orders.py."""

from __future__ import annotations

import pytest

from yafsdp_fn.program.ops import OPS, STREAMS
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Exchange,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Receive,
    Reduce,
    Scoreboard,
    Send,
    Stash,
    Update,
)

A = ("slot", 0, 0)
B = ("slot", 0, 1)


def test_readers_before_a_write_are_forgotten_after_it() -> None:
    board: Scoreboard[str] = Scoreboard()
    board.use("old reader", "compute", [A], [])
    board.use("writer", "gather", [], [A])
    board.use("reader", "reduce", [A], [])
    assert board.use("next writer", "replicate", [], [A]) == ["writer", "reader"]


def test_a_stream_runs_in_order_and_waits_for_nothing_of_its_own() -> None:
    board: Scoreboard[str] = Scoreboard()
    board.use("writer", "gather", [], [A])
    board.use("reader", "gather", [A], [])
    assert board.use("next writer", "gather", [A], [A]) == []
    assert board.use("other stream", "compute", [], [A]) == ["next writer"]


def test_clear() -> None:
    board: Scoreboard[str] = Scoreboard()
    board.use("writer", "gather", [], [A, B])
    board.use("reader", "compute", [A, B], [])
    board.clear()
    assert board.use("last", "compute", [A], [B]) == []


@pytest.mark.parametrize(
    ("op", "uses"),
    [
        (Gather((3, 4), (0, 1)), "shard 3, shard 4 -> slot set 0, slot set 1"),
        (Gather((3,), (0,), "node"), "secondary set 3 -> slot set 0"),
        (Stash((3, 4), (0, 1)), "slot set 0, slot set 1 -> secondary set 3, secondary set 4"),
        (Forward(9, (0, 1), True), "slot set 0, slot set 1 -> "),
        (Backward(9, (0, 1), (2,)), "slot set 0, slot set 1 -> grad slot set 2"),
        (Forward(9, (0,), False, carry_slot=5), "slot set 0 -> carry slot set 5"),
        (Backward(9, (0,), (2,), carry_slot=5), "slot set 0, carry slot set 5 -> grad slot set 2"),
        (Forward(9, (0,), True, early=(2,)), "slot set 0 -> grad slot set 2"),
        (Offload(9, 5), "carry slot set 5 -> host set 9"),
        (Fetch(9, 5), "host set 9 -> carry slot set 5"),
        (
            Forward(9, (0,), True, takes=(5, 6), gives=(7,)),
            "slot set 0, carry slot set 5, carry slot set 6 -> carry slot set 7",
        ),
        (
            Backward(9, (0,), (2,), takes=(5, 6), gives=(7,)),
            "slot set 0, carry slot set 5, carry slot set 6 -> grad slot set 2, carry slot set 7",
        ),
        (Backward(9, (0,), (), gives=(7,), half="inputs"), "slot set 0 -> carry slot set 7"),
        (Backward(9, (), (2,), half="weights"), " -> grad slot set 2"),
        (Send(3, 5), "carry slot set 5 -> "),
        (Receive(3, 5, 1, True), " -> carry slot set 5"),
        (Reduce((3,), (2,)), "grad slot set 2 -> grad shard 3, receive"),
        (AllReduce((3, 4)), " -> grad shard 3, grad shard 4, replicate"),
        (Norm((3, 4)), "grad shard 3, grad shard 4 -> norm"),
        (Exchange((3, 4), 0), " -> optimizer 3, optimizer 4"),
        (Update((3,)), "norm -> shard 3, optimizer 3, grad shard 3"),
    ],
)
def test_uses_of_every_op(op: Op, uses: str) -> None:
    """What it reads -> what it writes, in the buffers of a slot set."""
    found = (", ".join(" ".join(map(str, buffer)) for buffer in buffers) for buffers in op.uses("set"))
    assert " -> ".join(found) == uses


EVERY_OP = (
    *(Gather((0,), (0,)), Stash((0,), (0,)), Forward(0, (0,), True), Backward(0, (0,), (0,)), Reduce((0,), (0,))),
    *(AllReduce((0,)), Norm((0,)), Update((0,)), Exchange((0,), 0), Offload(0, 0), Fetch(0, 0)),
    *(Send(0, 0), Receive(0, 0)),
)


def test_every_op_has_a_stream() -> None:
    assert {type(op) for op in EVERY_OP} == set(OPS)
    assert {op.stream for op in EVERY_OP} == set(STREAMS)


def test_slots_belong_to_a_set_and_shards_to_the_state() -> None:
    """Two sessions, as of a step and of an evaluation: only what the state owns is shared."""
    board: Scoreboard[str] = Scoreboard()
    board.use("gather", "gather", *Gather((3,), (0,)).uses("set 1"))
    assert board.use("other gather", "gather", *Gather((3,), (0,)).uses("set 2")) == []
    assert board.use("update", "compute", *Update((3,)).uses()) == [
        "other gather"
    ]  # a stream's last reader stands for all
    assert board.use("next gather", "gather", *Gather((3,), (0,)).uses("set 1")) == ["update"]
