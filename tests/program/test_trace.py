"""The order of computes of a trace. That gradients close once is seen in counts of collectives, by closed forms."""

from __future__ import annotations

import pytest

from tests.program.traces import model
from yafsdp_fn.schedules import Visit, chained_order


def test_frozen_units_close_nothing() -> None:
    assert chained_order((Visit(0, "a", (0, 1), (1,)),), 1)[-1].closes == (1,)


@pytest.mark.parametrize("field", ["closes", "order"])
def test_the_order_is_a_tuple_and_hashable(field: str) -> None:
    trace = model(2)
    assert hash(trace) == hash(model(2))
    assert trace == model(2)
    assert isinstance(trace.order if field == "order" else trace.order[0].closes, tuple)
