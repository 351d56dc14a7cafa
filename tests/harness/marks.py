"""What runs by day, and what waits for the night: `make nightly` runs everything.

@pytest.mark.parametrize("case", by_day(CASES, "one", "other"))       # of single values
@pytest.mark.parametrize("case", by_name(NAMED, "one", "other"))      # of which these run by night alone
@pytest.mark.parametrize(("world", "axes"), [(1, "shard"), nightly(4, "nodes")])
@pytest.mark.sampled    # of a crossing, by day some cases in which each value of each parameter appears
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def nightly(*values: Any, **options: Any) -> Any:
    """A row of a parametrization that has a quick representative by day."""
    return pytest.param(*values, marks=pytest.mark.nightly, **options)


def by_day(cases: Iterable[Any], *daily: Any) -> list[Any]:
    """The cases, of which these run by day, too."""
    cases = [*cases]
    assert all(case in cases for case in daily), f"{daily}: expected some of {cases}"
    return [case if case in daily else nightly(case) for case in cases]


def by_name(cases: Mapping[str, Any], *waiting: str) -> list[Any]:
    """The cases under their names, of which those that wait run nightly."""
    assert cases.keys() >= {*waiting}, f"{waiting}: expected some of {[*cases]}"
    return [nightly(case, id=name) if name in waiting else pytest.param(case, id=name) for name, case in cases.items()]


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked `sampled` that wait for the night."""
    crossings: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            crossings.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for cases in crossings.values() for item in set(cases) - set(_sample(cases))}


def _sample(cases: list[Any]) -> list[Any]:
    """Takes the case that shows most values that no case has shown yet, until all are shown; of equals the one that
    shows most pairs of values, which spreads the sample, and of equals the first."""
    values = {case: [(name, str(value)) for name, value in case.callspec.params.items()] for case in cases}
    pairs = {case: set(itertools.combinations(values[case], 2)) for case in cases}
    missing, unpaired = set().union(*values.values()), set().union(*pairs.values())
    sample = []
    while missing:
        best = max(cases, key=lambda case: (len(missing.intersection(values[case])), len(pairs[case] & unpaired)))
        sample.append(best)
        missing = missing.difference(values[best])
        unpaired = unpaired - pairs[best]
    return sample
