"""Hazards: who waits for whom, and that the waits are enough, and all needed, on streams that overlap."""

from __future__ import annotations

import pytest

from tests.schedules.reference import everything, expected, run_overlapped
from tests.schedules.traces import model, together, trace_of, unit
from yafsdp_fn.schedules import (
    Backward,
    Forward,
    Gather,
    Program,
    Reduce,
    Scoreboard,
    Update,
    remat,
    uses,
    verify,
    zero2,
    zero3,
)
from yafsdp_fn.schedules.scoreboard import STREAM

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
    assert uses(Gather((3, 4), (0, 1)), s) == ([("shard", 3), ("shard", 4)], [(slot, s, 0), (slot, s, 1)])
    assert uses(Forward(9, (0, 1), True), s) == ([(slot, s, 0), (slot, s, 1)], [])
    assert uses(Backward(9, (0, 1), (2,)), s) == ([(slot, s, 0), (slot, s, 1)], [(grad, s, 2)])
    assert uses(Reduce((3,), (2,)), s) == ([(grad, s, 2)], [("grad shard", 3), ("receive",)])
    assert uses(Update((3,)), s) == ([("grad shard", 3)], [("shard", 3), ("optimizer", 3)])


PROGRAMS = {
    "two slots": zero3()(model(4)),
    "on demand": zero3(prefetch=0)(model(3)),
    "far ahead": zero3(prefetch=3)(model(5)),
    "remat, microbatches": zero3(remat=remat.all)(model(3, 2)),
    "tied": zero3()(model(3, 2, tied=True)),
    "resident": zero3(resident=2)(model(4, stacks=2)),
    "everything gathered once": zero2()(model(3, 2)),
    "two stacks in one scan": zero3()(together(3, 2)),
    "scanned twice": zero3()(model(3, twice=True)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_no_interleaving_of_the_streams_changes_the_result(program: Program) -> None:
    right = expected(program.trace)
    for seed in range(40):
        assert run_overlapped(verify(program), seed) == right


@pytest.mark.parametrize("name", ["two slots", "remat, microbatches", "two stacks in one scan"])
def test_without_waits_some_interleaving_is_wrong(name: str) -> None:
    """The interpreter above can fail."""
    program = PROGRAMS[name]
    assert any(_wrong(program, seed, lambda number: False) for seed in range(10))


def _wrong(program: Program, seed: int, keep: object) -> bool:
    try:
        return run_overlapped(program, seed, keep_wait=keep) != expected(program.trace)
    except AssertionError:
        return True


@pytest.mark.parametrize("kind", ["slot", "shard", "grad slot", "grad shard", "receive"])
def test_each_kind_of_buffer_is_needed(kind: str) -> None:
    """If ops did not declare one kind, some interleaving would be wrong: each declaration guards against something.

    The receive buffer is used by one stream alone, whose order guards it already; it is declared all the same.
    """

    def fewer(op: object, slots: object = 0) -> tuple[list[object], list[object]]:
        reads, writes = uses(op, slots)
        return [b for b in reads if b[0] != kind], [b for b in writes if b[0] != kind]

    program = zero3()(model(4, 2))
    waits = _waits(program, fewer)
    full = _waits(program, uses)
    lost = {number for number, wait in enumerate(full) if wait not in waits}
    wrong = any(_wrong(program, seed, lambda number: number not in lost) for seed in range(60))
    assert wrong == (kind != "receive")


def _waits(program: Program, declared: object) -> list[tuple[int, int]]:
    board: Scoreboard[int] = Scoreboard()
    return [
        (key, wait)
        for key, op in enumerate(everything(program))
        for wait in board.add(key, STREAM[type(op)], *declared(op))
    ]


def test_a_program_that_reduces_one_unit_from_two_slots_does_not_deadlock() -> None:
    """One op writes one gradient shard twice: it must not wait for itself."""
    trace = trace_of([unit(0, "a")], [[0], [0]])
    ops = (
        Gather((0,), (0,)),
        Forward(0, (0,), True),
        Forward(1, (0,), True),
        Backward(1, (0,), (0,)),
        Backward(0, (0,), (1,)),
        Reduce((0, 0), (0, 1)),
    )
    program = Program(trace, ops)
    try:
        verify(program)
    except ValueError:
        return  # refused: it cannot deadlock
    for seed in range(10):
        assert run_overlapped(program, seed) == expected(trace)
