"""Which visits recompute: layers of stacks, never an embedding or a head."""

from __future__ import annotations

from typing import Any

import pytest

from tests.program.traces import model, together
from yafsdp_fn.schedules import Backward, Fetch, Forward, Offload, Trace, remat, zero2, zero3

TRACE = model(5, 2)  # visits: embed 0, layers 1 to 5, head 6


@pytest.mark.parametrize(
    ("policy", "visits"),
    [
        (remat.none, set()),
        (remat.all, {1, 2, 3, 4, 5}),
        (remat.first(0), set()),
        (remat.first(2), {1, 2}),
        (remat.first(99), {1, 2, 3, 4, 5}),
        (remat.every(1), {1, 2, 3, 4, 5}),
        (remat.every(2), {1, 3, 5}),
        (remat.every(9), {1}),
    ],
)
def test_policies(policy: remat.Remat, visits: set[int]) -> None:
    assert policy(TRACE) == visits
    for factory in (zero3, zero2):
        forwards = [op for op in factory(remat=policy)(TRACE).ops if isinstance(op, Forward)]
        assert len(forwards) == 14  # in every microbatch alike
        assert {op.visit for op in forwards if not op.keep} == visits


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("none", remat.none),
        ("all", remat.all),
        ("offload", remat.offload()),
        ("first:0", remat.first(0)),
        ("first:2", remat.first(2)),
        ("every:2", remat.every(2)),
    ],
)
@pytest.mark.parametrize("factory", [zero2, zero3])
def test_a_name_is_its_policy(factory: Any, name: str, policy: remat.Remat) -> None:
    assert factory(remat=name)(TRACE) == factory(remat=policy)(TRACE)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        *[
            (n, f"remat={n!r}: expected none, all, offload, first:N or")
            for n in ("first", "first:x", "first:-1", "first:²", "1")
        ],
        ("every:0", r"remat.every\(0\): expected k >= 1"),
        (remat.first, "remat=first: that makes policies; call it"),
        (remat.offload, "remat=offload: that makes policies; call it"),
        (2, "remat=2: expected a policy"),
        (None, "remat=None: expected a policy"),
    ],
)
@pytest.mark.parametrize("factory", [zero2, zero3])
def test_anything_else_is_refused_before_a_trace_is_there(factory: Any, given: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        factory(remat=given)


def test_layers_of_all_stacks_count_in_forward_order() -> None:
    assert remat.first(3)(model(2, stacks=2)) == {1, 2, 3}
    assert remat.all(together(2)) == {0, 1}


def offloaded(policy: remat.Remat, trace: Trace = TRACE) -> tuple[list[tuple[str, int, int]], set[int | None]]:
    """The copies of the first microbatch, and the carry slots of all computes."""
    ops = zero3(remat=policy)(trace).ops
    copies = [(type(op).__name__, op.visit, op.carry_slot) for op in ops if isinstance(op, Offload | Fetch)]
    slots = {op.carry_slot for op in ops if isinstance(op, Forward | Backward)}
    return copies[: len(copies) // trace.microbatches], slots


def test_all_but_the_last_visits_are_offloaded_and_fetched_in_reverse() -> None:
    """Layers are visits 1 to 5."""
    there = [("Offload", v, (v - 1) % 2) for v in (1, 2, 3)]
    back = [("Fetch", v, (v - 1) % 2) for v in (3, 2, 1)]
    assert offloaded(remat.offload()) == (there + back, {None, 0, 1})
    assert offloaded(remat.offload(ahead=3)) == ([("Offload", 1, 0), ("Fetch", 1, 0)], {None, 0, 1, 2, 3})
    assert offloaded(remat.offload(ahead=0))[1] == {None, 0}
    one = [("Offload", 1, 0), ("Offload", 3, 0), ("Fetch", 3, 0), ("Fetch", 1, 0)]
    assert offloaded(remat.offload(remat.every(2), recompute=remat.all, ahead=0)) == (one, {None, 0})


def test_what_is_offloaded_recomputes_and_others_may() -> None:
    assert remat.offload()(TRACE) == {1, 2, 3, 4, 5}
    assert remat.offload(remat.first(2))(TRACE) == {1, 2}
    assert remat.offload(remat.first(2), recompute=remat.every(2))(TRACE) == {1, 2, 3, 5}


def test_a_fetch_is_issued_as_many_visits_ahead_as_it_says() -> None:
    for ahead in (0, 1, 2):
        ops = zero3(remat=remat.offload(ahead=ahead))(model(6)).ops
        for at, op in enumerate(ops):
            if isinstance(op, Fetch):
                later = [o.visit for o in ops[at:] if isinstance(o, Backward)]
                assert later.index(op.visit) == ahead


def test_nothing_is_offloaded_where_slots_hold_all_or_nothing_is_differentiated() -> None:
    assert offloaded(remat.offload(ahead=4)) == ([], {None})
    assert offloaded(remat.offload(remat.none)) == ([], {None})
    assert offloaded(remat.offload(), model(5, backward=False)) == ([], {None})


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"remat.first\(-1\)"):
        remat.first(-1)
    with pytest.raises(ValueError, match=r"remat.every\(0\)"):
        remat.every(0)
    with pytest.raises(ValueError, match=r"remat.offload\(ahead=-1\): expected an integer >= 0"):
        remat.offload(ahead=-1)
    with pytest.raises(TypeError, match=r"remat.offload\(3\): expected a policy"):
        remat.offload(3)
    with pytest.raises(TypeError, match=r"remat.offload\(recompute=.*: expected a policy"):
        remat.offload(recompute=remat.offload())
