"""Streams that overlap: in every order that the waits permit, an accepted program gives the exact result."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from tests.harness.marks import nightly
from tests.proof.overlapped import reaches, run_overlapped, waits_of, without
from tests.proof.reference import ALIASED, MODES, SHARDED, Issued, Mode, issued
from tests.proof.symbols import expected
from tests.schedules.cases import LARGER, SCHEDULES, SMALL, program
from yafsdp_fn.schedules import Program, verify

ORDERS = 60
"""Random orders of each program that a nightly run tries."""
TRACES = SMALL | LARGER


def host(made: Program, mode: Mode = SHARDED) -> list[Issued]:
    ops = issued(made, mode)
    assert ops is not None
    return ops


@pytest.mark.parametrize("seeds", [range(4), nightly(range(4, ORDERS))])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_order_changes_the_result(schedule: str, seeds: range) -> None:
    """Every trace with every schedule, by turns, each in random orders; slots may be the shards themselves."""
    prepared = []
    for trace, mode in itertools.product(TRACES.values(), MODES):
        made = verify(program(trace, schedule))
        ops = host(made, mode)
        prepared.append((made.trace, ops, waits_of(ops), expected(made)))
    for seed in seeds:
        for trace, ops, waits, right in prepared[seed % 4 :: 4]:
            assert run_overlapped(trace, ops, waits, random.Random(seed)) == right


# ---- that the interpreter has teeth


def wrong(made: Program, ops: Sequence[Issued], waits: Sequence[Sequence[int]], seeds: range) -> bool:
    right = expected(made)
    return any(run_overlapped(made.trace, ops, waits, random.Random(seed)) != right for seed in seeds)


TEETH = ["zero3", "zero3, update after norm", "hsdp, update after norm", "hpz, update after norm"]


@pytest.mark.parametrize("schedule", TEETH)
def test_a_wait_that_is_dropped_changes_a_result(schedule: str) -> None:
    """Of the waits that nothing else stands in for, in the second step: without it some order is wrong."""
    made = program(LARGER["three layers"], schedule)
    ops = host(made)
    waits = waits_of(ops)
    second = range(len(ops) // 3, 2 * len(ops) // 3)
    needed = [
        (key, wait) for key in second for wait in dict.fromkeys(waits[key]) if not reaches(waits, ops, (key, wait))
    ]
    assert len(needed) >= 10
    caught = [wrong(made, ops, without(waits, pair), range(60)) for pair in needed]
    print(f"\n{schedule}: {sum(caught)} of {len(needed)} needed waits change a result when they are dropped")
    assert all(caught)


KINDS = ["slot", "shard", "grad slot", "grad shard", "secondary", "receive", "replicate", "norm", "optimizer"]
GUARDED = {"secondary", "receive", "replicate", "norm", "optimizer"}
"""Only one stream uses these, whose order guards them already; they are declared all the same."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_buffer_that_streams_share_is_needed(kind: str) -> None:
    """If ops did not declare one kind, some order would be wrong: each declaration guards against something."""
    made = program(LARGER["three layers"], "hpz, update after norm")
    ops = host(made)
    fewer = [op._replace(reads=_others(op.reads, kind), writes=_others(op.writes, kind)) for op in ops]
    assert fewer != ops
    assert wrong(made, ops, waits_of(fewer), range(80)) == (kind not in GUARDED)


def _others(buffers: list[tuple[object, ...]], kind: str) -> list[tuple[object, ...]]:
    return [buffer for buffer in buffers if buffer[0] != kind]


def test_where_slots_are_the_shards_replicas_still_overlap() -> None:
    """ddp: all-reduces on a stream of their own, beside backwards that write gradient shards."""
    made = program(LARGER["three layers"], "ddp, update after norm")
    ops = host(made, ALIASED)
    assert {op.stream for op in ops} == {"compute", "replicate"}
    assert not wrong(made, ops, waits_of(ops), range(20))
    assert wrong(made, ops, [[] for _ in ops], range(20))


def test_a_stream_in_order_and_waits_for_earlier_ops_cannot_deadlock() -> None:
    """Every wait of every program points to an op that was issued before."""
    for trace, schedule in itertools.product(TRACES.values(), SCHEDULES):
        for mode in MODES:
            waits = waits_of(host(program(trace, schedule), mode))
            assert all(wait < key for key, found in enumerate(waits) for wait in found)
