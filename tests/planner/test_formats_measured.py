"""On a slow link a step in int8 is faster, by what is predicted. For root, who may make such a link."""

from __future__ import annotations

import json
import os

import pytest

from tests.planner.test_written_measured import ran_throttled

MBIT = 1000


@pytest.mark.nightly
def test_on_a_slow_link_int8_is_faster_as_predicted() -> None:
    printed = ran_throttled("tests.planner.slow_link", MBIT)
    predicted, measured = json.loads(printed.splitlines()[-1])
    print(f"\nload {os.getloadavg()[0]:.1f}; predicted {predicted}, measured {measured}")
    assert measured["both"] < measured["gathers"] < measured["whole"]
    ratios = [seconds["gathers"] / seconds["whole"] for seconds in (predicted, measured)]
    assert abs(ratios[1] / ratios[0] - 1) < 0.1
    # a thread that encodes gradients waits for those of its core
    assert predicted["both"] < measured["both"]
