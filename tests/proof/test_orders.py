"""Streams that overlap: in every order that the waits permit, an accepted program gives the exact result."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.harness.marks import nightly
from tests.proof.overlapped import Waits, account, goes_wrong, reaches, waits_of, without
from tests.proof.reference import ALIASED, MODES, SHARDED, Account
from tests.schedules.cases import LARGER, SCHEDULES, SMALL, program
from yafsdp_fn.schedules import verify

ORDERS = 60
"""Random orders of each program that a nightly run tries."""
TRACES = SMALL | LARGER


@pytest.mark.parametrize("seeds", [range(4), nightly(range(4, ORDERS))])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_order_changes_the_result(schedule: str, seeds: range) -> None:
    """Every trace with every schedule, by turns, each in random orders; slots may be the shards themselves."""
    prepared = []
    for trace, mode in itertools.product(TRACES.values(), MODES):
        terms = account(verify(program(trace, schedule)), mode)
        prepared.append((terms, waits_of(terms.events)))
    for seed in seeds:
        for terms, waits in prepared[seed % 4 :: 4]:
            assert not goes_wrong(terms, waits, random.Random(seed))


# ---- that the interpreter has teeth


def wrong(terms: Account, waits: Waits, seeds: range) -> bool:
    return any(goes_wrong(terms, waits, random.Random(seed)) for seed in seeds)


TEETH = ["zero3", "zero3, update after norm", "hsdp, update after norm", "hpz, update after norm"]


@pytest.mark.parametrize("schedule", TEETH)
def test_a_wait_that_is_dropped_changes_a_result(schedule: str) -> None:
    """Of the waits that nothing else stands in for, in the second step: without it some order is wrong."""
    terms = account(program(LARGER["three layers"], schedule), SHARDED)
    events = terms.events
    waits = waits_of(events)
    second = [at for at, event in enumerate(events) if event.step == 1 and at not in terms.ends]
    needed = [
        (key, wait) for key in second for wait in dict.fromkeys(waits[key]) if not reaches(waits, events, (key, wait))
    ]
    assert len(needed) >= 10
    caught = [wrong(terms, without(waits, pair), range(60)) for pair in needed]
    print(f"\n{schedule}: {sum(caught)} of {len(needed)} needed waits change a result when they are dropped")
    assert all(caught)


KINDS = ["slot", "shard", "grad slot", "grad shard", "secondary", "receive", "replicate", "norm", "optimizer"]
GUARDED = {"secondary", "receive", "replicate", "norm", "optimizer"}
"""Only one stream uses these, whose order guards them already; they are declared all the same."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_buffer_that_streams_share_is_needed(kind: str) -> None:
    """If ops did not declare one kind, some order would be wrong: each declaration guards against something."""
    terms = account(program(LARGER["three layers"], "hpz, update after norm"), SHARDED)
    fewer = [one._replace(reads=_others(one.reads, kind), writes=_others(one.writes, kind)) for one in terms.events]
    assert fewer != terms.events
    assert wrong(terms, waits_of(fewer), range(80)) == (kind not in GUARDED)


def _others(buffers: list[Any], kind: str) -> list[Any]:
    return [buffer for buffer in buffers if buffer[0] != kind]


def test_where_slots_are_the_shards_replicas_still_overlap() -> None:
    """ddp: all-reduces on a stream of their own, beside backwards that write gradient shards."""
    terms = account(program(LARGER["three layers"], "ddp, update after norm"), ALIASED)
    assert {event.stream for event in terms.events} == {"compute", "replicate"}
    assert not wrong(terms, waits_of(terms.events), range(20))
    assert wrong(terms, [[] for _ in terms.events], range(20))


def test_a_stream_in_order_and_waits_for_earlier_ops_cannot_deadlock() -> None:
    """Every wait of every program points to an op that was issued before."""
    for trace, schedule in itertools.product(TRACES.values(), SCHEDULES):
        for mode in MODES:
            waits = waits_of(account(program(trace, schedule), mode).events)
            assert all(wait < key for key, found in enumerate(waits) for wait in found)
