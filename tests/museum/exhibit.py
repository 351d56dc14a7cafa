"""What a bug of the museum is: where it was published, what happened there, how it is written here, what is said to it.

Refusal   a program or pipeline with the bug in it, which `verify` refuses before it runs; without the bug, it passes
Order     a race: no op names a wait, so that it cannot be forgotten; the one that it lacked, and what comes out
          without that one
Proof     what hung there is accepted here, and ends: streams are other ones
Agreement a run on one to four ranks, which gives what the plain loop gives
Message   a run on two ranks that differ, which raises on both, and names what differs
Outside   nothing in a program says it: what is seen here, and what is not
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from tests.harness.pool import Pools
from tests.proof.overlapped import account, reaches, right, waits_of, without
from tests.proof.reference import SHARDED
from tests.proof.test_orders import wrong
from yafsdp_fn.program.text import describe
from yafsdp_fn.proof.errors import _in_words
from yafsdp_fn.schedules import Program, Refused, verify


@dataclass(frozen=True)
class Bug:
    """url: its thread, or the text that describes it. there: what happened; here: how it is written here."""

    url: str
    there: str
    here: str
    test: ClassVar[str]

    @property
    def name(self) -> str:
        """`Megatron-LM#5222`, or of a file in a repository `llm-infra-verifier RB4b`."""
        thread = re.fullmatch(r"https://github\.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)", self.url)
        file = re.fullmatch(r"https://github\.com/[^/]+/([^/]+)/blob/\w+/(?:[^#]*/)?([^/#]+?)(?:#(.*))?", self.url)
        assert thread or file, self.url
        return f"{thread[1]}#{thread[2]}" if thread else f"{file[1]} {file[3] or file[2]}"

    def says(self) -> str:
        """The verdict: what is said to it here."""
        raise NotImplementedError


@dataclass(frozen=True)
class Refusal(Bug):
    """right: without the bug; wrong: makes it with the bug, or raises Refused; rule: the one that it breaks"""

    right: Program
    wrong: Callable[[], Program]
    rule: str
    test = "test_refused"

    def says(self) -> str:
        return f"`{self.refusal().splitlines()[0]}`"

    def refusal(self) -> str:
        with pytest.raises(Refused) as caught:
            verify(self.wrong())
        assert caught.value.rule == self.rule, caught.value
        return str(caught.value)

    def check(self) -> None:
        verify(self.right)
        self.refusal()
        assert right(self.right)
        try:
            broken = self.wrong()
        except Refused:  # rows of actions are refused before they are a pipeline
            return
        assert not right(broken), "verify refuses it, but it would have been right"


@dataclass(frozen=True)
class Order(Bug):
    """later, earlier: `(step, op)` of a program; the first must wait for the second."""

    right: Program
    later: tuple[int, int]
    earlier: tuple[int, int]
    test = "test_ordered"

    def says(self) -> str:
        (step, later), (before, earlier) = self.later, self.earlier
        return waits_for(self.right, later, earlier, " of the step before" * (step > before))

    def check(self) -> None:
        """The wait is there, nothing else stands in for it, and without it some order gives something else."""
        terms = account(verify(self.right), SHARDED)
        keys: dict[tuple[int, int], int] = {}
        for key, event in enumerate(terms.events):
            step, at = divmod(len(keys), len(self.right.ops))
            if event.op is self.right.ops[at]:
                keys[step, at] = key
        later = keys[self.later]
        earlier = keys[self.earlier]
        waits = waits_of(terms.events)
        assert earlier in waits[later], (self.says(), waits[later])
        assert not reaches(waits, terms.events, (later, earlier)), "another wait orders them, too"
        fewer = without(waits, (later, earlier))
        assert wrong(terms, fewer, range(100))
        assert not wrong(terms, waits, range(20))


@dataclass(frozen=True)
class StageOrder(Bug):
    """later, earlier: ops of one stage of a pipeline; the first must wait for the second."""

    right: Program
    stage: int
    later: int
    earlier: int
    test = "test_ordered"

    def says(self) -> str:
        return f"stage {self.stage}: {waits_for(self.right.by_stage[self.stage], self.later, self.earlier)}"

    def check(self) -> None:
        assert right(verify(self.right))
        terms = account(self.right, SHARDED)
        events = terms.events
        pair = tuple(self.right.by_stage[self.stage].ops[at] for at in (self.later, self.earlier))
        waits = waits_of(events)
        fewer = [
            [wait for wait in found if event.stage != self.stage or (event.op, events[wait].op) != pair]
            for event, found in zip(events, waits, strict=True)
        ]
        assert fewer != waits
        assert wrong(terms, fewer, range(30))
        assert not wrong(terms, waits, range(20))


def waits_for(program: Program, later: int, earlier: int, ago: str = "") -> str:
    buffer = _in_words(program, next(iter(shared(program, later, earlier))))
    texts = [describe(program.ops[at], program.trace) for at in (later, earlier)]
    return f"`op {later} ({texts[0]})` waits for `op {earlier} ({texts[1]})`{ago}, which uses {buffer}"


def shared(program: Program, later: int, earlier: int) -> list[tuple[Any, ...]]:
    """The buffers over which two ops are ordered: one of them writes what the other one uses."""
    (reads, writes), (read, written) = program.ops[later].uses(), program.ops[earlier].uses()
    return [buffer for buffer in [*reads, *writes] if buffer in written or (buffer in writes and buffer in read)]


@dataclass(frozen=True)
class Proof(Bug):
    """right: a pipeline that is accepted, as slow as sends can be"""

    right: Program
    why: str
    test = "test_proved"

    def says(self) -> str:
        return self.why

    def check(self) -> None:
        assert right(verify(self.right))


@dataclass(frozen=True)
class Agreement(Bug):
    """run: `run(mesh)` on every rank, which compares with the plain loop; worlds: numbers of ranks"""

    run: Callable[[Any], None]
    worlds: Sequence[int]
    test = "test_agrees"

    def says(self) -> str:
        ranks = " and ".join(map(str, self.worlds))
        return f"what the plain loop gives, on {ranks} rank{'s' * (self.worlds != (1,))}"

    def check(self, pools: Pools) -> None:
        for world in self.worlds:
            pools[world].run(self.run)


@dataclass(frozen=True)
class Message(Bug):
    """run: what rank 0 and rank 1 raise, as text; texts: what both say, of both sides"""

    run: Callable[[Any], str]
    texts: Sequence[str]
    test = "test_told"

    def says(self) -> str:
        return "; ".join(f"`{text}`" for text in self.texts)

    def check(self, pools: Pools) -> None:
        for found in pools[2].run(self.run):
            for text in self.texts:
                assert text in found, found


@dataclass(frozen=True)
class Outside(Bug):
    """shows: a check of what is said; says_: the verdict"""

    verdict: str
    shows: Callable[[], None]
    test = "test_outside"

    def says(self) -> str:
        return self.verdict
