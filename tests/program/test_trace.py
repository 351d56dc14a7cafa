"""The order of computes: depth-first over microbatches, backward in reverse, gradients closed exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program.traces import model
from yafsdp_fn.schedules import Compute, Visit, chained_order


def test_two_visits_two_microbatches() -> None:
    visits = (Visit(0, "a", (0,), (0,)), Visit(1, "b", (1, 0), (1, 0)))
    # unit 0 is used by both visits: its gradient is complete after the backward of the first
    assert chained_order(visits, 2) == (
        *(Compute("forward", 0, 0), Compute("forward", 1, 0)),
        *(Compute("backward", 1, 0, (1,)), Compute("backward", 0, 0, (0,))),
        *(Compute("forward", 0, 1), Compute("forward", 1, 1)),
        *(Compute("backward", 1, 1, (1,)), Compute("backward", 0, 1, (0,))),
    )


def test_frozen_units_close_nothing() -> None:
    assert chained_order((Visit(0, "a", (0, 1), (1,)),), 1)[-1].closes == (1,)


def test_forward_only() -> None:
    assert {compute.kind for compute in model(2, backward=False).order} == {"forward"}


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_each_gradient_closes_once_a_microbatch_after_its_last_backward(uses: list[list[int]], parts: int) -> None:
    visits = [Visit(k, "", tuple(units), tuple(units)) for k, units in enumerate(uses)]
    order = chained_order(visits, parts)
    for part in range(parts):
        computes = [compute for compute in order if compute.microbatch == part]
        assert [c.visit for c in computes] == [*range(len(visits)), *reversed(range(len(visits)))]
        for unit in range(5):
            at = [i for i, c in enumerate(computes) if c.kind == "backward" and unit in visits[c.visit].trained]
            closing = [i for i, c in enumerate(computes) if unit in c.closes]
            assert closing == at[-1:]


@pytest.mark.parametrize("field", ["closes", "order"])
def test_the_order_is_a_tuple_and_hashable(field: str) -> None:
    trace = model(2)
    assert hash(trace) == hash(model(2))
    assert trace == model(2)
    assert isinstance(trace.order if field == "order" else trace.order[0].closes, tuple)
