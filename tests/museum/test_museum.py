"""Bugs that others have published: what is said to each of them here. docs/museum.md shows it."""

from __future__ import annotations

import pytest

from tests.museum import sharded
from tests.museum.exhibit import Bug, Refusal
from tests.museum.page import BUGS, PAGE, page


def name(bug: Bug) -> str:
    return bug.name


@pytest.mark.parametrize("bug", sharded.REFUSED, ids=name)
def test_refused(bug: Refusal) -> None:
    bug.check()


def test_the_page_is_what_the_bugs_give() -> None:
    """`python -m tests.museum.page` writes it anew."""
    assert PAGE.read_text() == page()
    assert len({bug.name for bug in BUGS}) == len(BUGS)
