"""Bugs that others have published: what is said to each of them here. docs/museum.md shows it."""

from __future__ import annotations

import pytest

from tests.harness.pool import Pools
from tests.museum import outside, pipelined, races, rows, runs, sharded
from tests.museum.exhibit import Agreement, Bug, Message, Order, Outside, Proof, Refusal, StageOrder
from tests.museum.page import BUGS, PAGE, page


def name(bug: Bug) -> str:
    return bug.name


@pytest.mark.parametrize("bug", [*sharded.REFUSED, *pipelined.REFUSED, *rows.REFUSED], ids=name)
def test_refused(bug: Refusal) -> None:
    bug.check()


@pytest.mark.parametrize("bug", [*races.RACES, *pipelined.RACES], ids=name)
def test_ordered(bug: Order | StageOrder) -> None:
    bug.check()


@pytest.mark.parametrize("bug", rows.PROVED, ids=name)
def test_proved(bug: Proof) -> None:
    bug.check()


@pytest.mark.parametrize("bug", runs.AGREES, ids=name)
def test_agrees(pools: Pools, bug: Agreement) -> None:
    bug.check(pools)


@pytest.mark.parametrize("bug", runs.TOLD, ids=name)
def test_told(pools: Pools, bug: Message) -> None:
    bug.check(pools)


@pytest.mark.parametrize("bug", outside.OUTSIDE, ids=name)
def test_outside(bug: Outside) -> None:
    bug.shows()


def test_the_page_is_what_the_bugs_give() -> None:
    """`python -m tests.museum.page` writes it anew."""
    assert PAGE.read_text() == page()
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 24
