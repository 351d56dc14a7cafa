"""Hazards: who waits for whom. That the waits are enough, and all needed, is in test_orders.py."""

from __future__ import annotations

import pytest

from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Reduce,
    Scoreboard,
    Stash,
    Update,
    uses,
)
from yafsdp_fn.schedules.ops import OPS, STREAM

A, B = ("slot", 0, 0), ("slot", 0, 1)


def test_a_reader_waits_for_the_last_writer() -> None:
    board: Scoreboard[str] = Scoreboard()
    assert board.add("first writer", "gather", [], [A]) == []
    assert board.add("writer", "gather", [], [A]) == ["first writer"]
    assert board.add("reader", "compute", [A], []) == ["writer"]
    assert board.add("another reader", "compute", [A], []) == ["writer"]


def test_a_writer_waits_for_the_last_reader_of_each_stream() -> None:
    board: Scoreboard[str] = Scoreboard()
    for key, stream in [("r0", "compute"), ("r1", "compute"), ("r2", "reduce")]:
        assert board.add(key, stream, [A], []) == []
    assert board.add("writer", "gather", [], [A]) == ["r1", "r2"]
    assert board.add("next writer", "gather", [], [A]) == ["writer"]


def test_readers_before_a_write_are_forgotten_after_it() -> None:
    board: Scoreboard[str] = Scoreboard()
    board.add("old reader", "compute", [A], [])
    board.add("writer", "gather", [], [A])
    board.add("reader", "reduce", [A], [])
    assert board.add("next writer", "gather", [], [A]) == ["writer", "reader"]


def test_buffers_are_apart() -> None:
    board: Scoreboard[str] = Scoreboard()
    board.add("writer of A", "gather", [], [A])
    assert board.add("reader of B", "compute", [B], []) == []
    assert board.add("reader of both", "compute", [A, B], []) == ["writer of A"]
    assert board.add("writer of both", "gather", [], [A, B]) == ["writer of A", "reader of both", "reader of both"]


@pytest.mark.parametrize(("reads", "writes"), [([A], [A]), ([A, A], []), ([], [A, A]), ([A], [A, A])])
def test_no_use_waits_for_itself(reads: list[tuple[object, ...]], writes: list[tuple[object, ...]]) -> None:
    board: Scoreboard[str] = Scoreboard()
    assert board.add("own", "compute", reads, writes) == []
    assert board.add("next", "gather", [], [A]) == ["own"]


def test_forget_and_clear() -> None:
    board: Scoreboard[str] = Scoreboard()
    board.add("writer", "gather", [], [A, B])
    board.add("reader", "compute", [A, B], [])
    board.forget(A, ("never", "seen"))
    assert board.add("later", "gather", [], [A]) == []
    assert board.add("later", "gather", [], [B]) == ["writer", "reader"]
    board.clear()
    assert board.add("last", "compute", [A], [B]) == []


def test_uses_of_every_op() -> None:
    slot, grad, s = "slot", "grad slot", "set 7"
    shards = [("grad shard", 3), ("grad shard", 4)]
    assert uses(Gather((3, 4), (0, 1)), s) == ([("shard", 3), ("shard", 4)], [(slot, s, 0), (slot, s, 1)])
    assert uses(Gather((3,), (0,), "node"), s) == ([("secondary", s, 3)], [(slot, s, 0)])
    assert uses(Stash((3, 4), (0, 1)), s) == ([(slot, s, 0), (slot, s, 1)], [("secondary", s, 3), ("secondary", s, 4)])
    assert uses(Forward(9, (0, 1), True), s) == ([(slot, s, 0), (slot, s, 1)], [])
    assert uses(Backward(9, (0, 1), (2,)), s) == ([(slot, s, 0), (slot, s, 1)], [(grad, s, 2)])
    carry, host = ("carry slot", s, 5), ("host", s, 9)
    assert uses(Forward(9, (0,), False, 5), s) == ([(slot, s, 0)], [carry])
    assert uses(Backward(9, (0,), (2,), 5), s) == ([(slot, s, 0), carry], [(grad, s, 2)])
    assert uses(Offload(9, 5), s) == ([carry], [host])
    assert uses(Fetch(9, 5), s) == ([host], [carry])
    assert uses(Reduce((3,), (2,)), s) == ([(grad, s, 2)], [("grad shard", 3), ("receive",)])
    assert uses(AllReduce((3, 4)), s) == ([], [*shards, ("replicate",)])
    assert uses(Norm((3, 4)), s) == (shards, [("norm",)])
    assert uses(Update((3,)), s) == ([("norm",)], [("shard", 3), ("optimizer", 3), ("grad shard", 3)])


def test_every_op_has_a_stream() -> None:
    assert set(STREAM) == set(OPS.values())
    assert set(STREAM.values()) == {"gather", "compute", "reduce", "replicate", "offload"}


def test_slots_belong_to_a_set_and_shards_to_the_state() -> None:
    """Two sessions, as of a step and of an evaluation: only what the state owns is shared."""
    board: Scoreboard[str] = Scoreboard()
    board.add("gather", "gather", *uses(Gather((3,), (0,)), "set 1"))
    assert board.add("other gather", "gather", *uses(Gather((3,), (0,)), "set 2")) == []
    assert board.add("update", "compute", *uses(Update((3,)))) == [
        "other gather"
    ]  # a stream's last reader stands for all
    assert board.add("next gather", "gather", *uses(Gather((3,), (0,)), "set 1")) == ["update", "gather"]
