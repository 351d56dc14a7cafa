"""What runs by day, and what waits for the night: `make nightly` runs everything.

@pytest.mark.parametrize("case", by_day(CASES, "one", "other"))       # of single values
@pytest.mark.parametrize(("world", "axes"), [(1, "shard"), nightly(4, "nodes")])
@pytest.mark.sampled                                # of a crossing, cases by day in which each value appears
@pytest.mark.sampled("world", "axes")               # and each pair of values of these
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import pytest


def nightly(*values: Any, **options: Any) -> Any:
    """A row of a parametrization that has a quick representative by day."""
    return pytest.param(*values, marks=pytest.mark.nightly, **options)


def by_day(cases: Iterable[Any], *daily: Any) -> list[Any]:
    """The cases, of which these run by day, too."""
    return [case if case in daily else nightly(case) for case in cases]


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked `sampled` that wait for the night."""
    crossings: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and hasattr(item, "callspec"):
            crossings.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for cases in crossings.values() for item in set(cases) - set(_sample(cases))}


def _sample(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Takes the case that shows most of what no case has shown yet, the first of equals, until all is shown.

    Of cases that show as many values, it is the one with more pairs of values that no case has: a sample is spread.
    """
    mark = cases[0].get_closest_marker("sampled")
    assert mark is not None
    values = {case: _values(case) for case in cases}
    pairs = {case: set(itertools.combinations(sorted(values[case], key=str), 2)) for case in cases}
    asked = {
        case: {*values[case], *(pair for pair in pairs[case] if {pair[0][0], pair[1][0]} <= {*mark.args})}
        for case in cases
    }
    missing, unpaired = set().union(*asked.values()), set().union(*pairs.values())
    sample = []
    while missing:
        best = max(cases, key=lambda case: (len(asked[case] & missing), len(pairs[case] & unpaired)))
        sample.append(best)
        missing, unpaired = missing - asked[best], unpaired - pairs[best]
    return sample


def _values(case: Any) -> set[tuple[str, Hashable]]:
    """Pairs of a parameter and its value."""
    found = case.callspec.params.items()
    return {(name, value if isinstance(value, Hashable) else repr(value)) for name, value in found}
