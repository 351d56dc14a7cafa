"""What runs by day, and what waits for the night: `make nightly` runs everything.

@pytest.mark.parametrize("case", by_day(CASES, "one", "other"))       # of single values
@pytest.mark.parametrize(("world", "axes"), [(1, "shard"), nightly(4, "nodes")])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*values: Any, **options: Any) -> Any:
    """A row of a parametrization that has a quick representative by day."""
    return pytest.param(*values, marks=pytest.mark.nightly, **options)


def by_day(cases: Iterable[Any], *daily: Any) -> list[Any]:
    """The cases, of which these run by day, too."""
    return [case if case in daily else nightly(case) for case in cases]
