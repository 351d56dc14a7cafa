"""The order of computes: depth-first over microbatches, backward in reverse, gradients closed exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program.traces import model
from yafsdp_fn.schedules import Visit, chained_order


def test_frozen_units_close_nothing() -> None:
    assert chained_order((Visit(0, "a", (0, 1), (1,)),), 1)[-1].closes == (1,)


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
