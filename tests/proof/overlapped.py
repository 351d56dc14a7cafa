"""An adversarial interpreter: streams that overlap, in a random order that the waits permit.

An op is not atomic here: from its beginning to its end it reads, and what it writes has no content that is known. Where
two ops write one buffer at a time, or one writes while another reads, what is found is of no use.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.proof.reference import (
    MODES,
    Account,
    Added,
    Constant,
    Event,
    Found,
    If,
    Mode,
    Moment,
    ProgramAccount,
    Stops,
    Summed,
    Term,
    Wrong,
)
from tests.proof.stages_reference import PipelineAccount
from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.schedules import Program, Scoreboard

Waits = Sequence[Sequence[int]]


def account(program: Program, mode: Mode) -> Account:
    """What the ops of `program` do; raises Stops, LookupError or ValueError where an engine would stop."""
    return PipelineAccount(program, mode) if len(program.stages) > 1 else ProgramAccount(program, mode)


# ---- Waits.


def waits_of(events: Sequence[Event]) -> list[list[int]]:
    """What each event must wait for, as the scoreboard of its stage says."""
    boards = defaultdict[int, Scoreboard[int]](Scoreboard)
    return [boards[e.stage].use(at, e.stream, e.reads, e.writes) for at, e in enumerate(events)]


def without(waits: Waits, pair: tuple[int, int]) -> list[list[int]]:
    """The waits but one: `(later, earlier)`."""
    return [[wait for wait in found if (key, wait) != pair] for key, found in enumerate(waits)]


def reaches(waits: Waits, events: Sequence[Event], pair: tuple[int, int]) -> bool:
    """Whether the later event of a wait follows the earlier one anyway, by other waits and by the order of streams."""
    later, earlier = pair
    last: dict[str, int] = {}
    before: list[list[int]] = []
    for found, event in zip(without(waits, pair)[: later + 1], events, strict=False):
        if event.stream in last:
            found.append(last[event.stream])
        last[event.stream] = len(before)
        before.append(found)
    seen = set()
    todo = [later]
    while todo:
        new = [key for key in before[todo.pop()] if key not in seen and key >= earlier]
        seen.update(new)
        todo += new
    return earlier in seen


# ---- Orders.


def constraints(terms: Account, waits: Waits, blocking: bool = False) -> list[tuple[Moment, Moment]]:
    """What must come before what. blocking: stages wait for each other as much as engines ever do, where hosts wait
    for their devices and a send for its receive"""
    order: list[tuple[Moment, Moment]] = []
    last: dict[tuple[int, str], int] = {}
    of_stage = defaultdict[int, list[int]](list)
    for at, event in enumerate(terms.events):
        stream = event.stage, event.stream
        before = [*waits[at], *([last[stream]] if stream in last else [])]
        if at in terms.ends:
            before = of_stage[event.stage]
        order.append((("begins", at), ("ends", at)))
        order += [(("ends", other), ("begins", at)) for other in before]
        last[stream] = at
        of_stage[event.stage].append(at)
    order += terms.met
    if blocking and isinstance(terms, PipelineAccount):
        order += terms.blocking
    return order


class Order(NamedTuple):
    """When each event begins and ends."""

    begins: dict[int, int]
    ends: dict[int, int]


def drawn(terms: Account, order: Iterable[tuple[Moment, Moment]], rng: random.Random) -> Order | None:
    """One of the orders that there are, of streams of different speed; None if there is none."""
    missing = defaultdict[Moment, int](int)
    later = defaultdict[Moment, list[Moment]](list)
    for one, other in order:
        missing[other] += 1
        later[one].append(other)
    speed = {(event.stage, event.stream): rng.choice((1, 20, 400)) for event in terms.events}
    speeds = [speed[event.stage, event.stream] for event in terms.events]
    ready: list[Moment] = [("begins", at) for at in range(len(terms.events)) if not missing["begins", at]]
    found = Order({}, {})
    for now in range(2 * len(terms.events)):
        if not ready:
            return None
        (place,) = rng.choices(range(len(ready)), [speeds[at] for _, at in ready])
        what, at = moment = ready.pop(place)
        (found.begins if what == "begins" else found.ends)[at] = now
        for other in later[moment]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return found


def as_issued(terms: Account) -> Order:
    """One event after the other."""
    numbers = range(len(terms.events))
    return Order({at: 2 * at for at in numbers}, {at: 2 * at + 1 for at in numbers})


# ---- What comes out.


class Execution:
    """What every event finds in an order."""

    def __init__(self, terms: Account, order: Order) -> None:
        self.terms, self.order = terms, order
        self.values: dict[int, int] = {}  # of `terms.found`, by number
        self.raw = terms.gradient(*range(len(terms.bits))).value  # all that is not summed over replicas
        writers = defaultdict[tuple[int, Buffer], list[tuple[int, Term]]](list)
        for at, buffer, term in terms.left:
            writers[terms.events[at].stage, buffer].append((at, term))
        # what is left follows from what was found by an event that has begun earlier
        for number in sorted(range(len(terms.found)), key=lambda number: order.begins[terms.found[number][0]]):
            at, buffer = terms.found[number]
            others = [(other, term) for other, term in writers[terms.events[at].stage, buffer] if other != at]
            self.values[number] = self.evaluate(self._found(at, buffer, others))

    def _found(self, at: int, buffer: Buffer, writers: list[tuple[int, Term]]) -> Term:
        """What the last has left that began to write before this one ends."""
        begins, ends = self.order
        begun = [(begins[other], ends[other], term) for other, term in writers if begins[other] < ends[at]]
        if not begun:
            return self.terms.beginning(buffer)
        begin, end, term = max(begun, key=lambda written: written[0])
        torn = begins[at] < end or any(one < begin < other for one, other, _ in begun)
        return self.terms.unknown(buffer) if torn else term

    def evaluate(self, term: Term) -> int:
        match term:
            case Constant(value):
                return value
            case Found(number):
                return self.values[number]
            case Added(one, other):
                added, to = self.evaluate(one), self.evaluate(other)
                return added | to | (self.terms.spoilt.value if added & to else 0)
            case Summed(gradient):
                value = self.evaluate(gradient)
                if self.terms.trace.replicas == 1:
                    return value
                return value << len(self.terms.bits) if value & ~self.raw == 0 else self.terms.spoilt.value
            case If(held, among, right, wrong):
                fits = self.evaluate(held) in [one.value for one in among]
                return self.evaluate(right if fits else wrong)

    def wrong(self) -> list[Wrong]:
        return [wrong for wrong in self.terms.wrong if self.evaluate(wrong.term) != wrong.value.value]


def goes_wrong(terms: Account, waits: Waits, rng: random.Random, blocking: bool = False) -> bool:
    """Whether anything is wrong in a random order, or there is no order."""
    order = drawn(terms, constraints(terms, waits, blocking), rng)
    return order is None or bool(Execution(terms, order).wrong())


def right(program: Program, seed: int = 0, modes: Sequence[Mode] = MODES) -> bool:
    """Whether a program computes what it must in all of `modes`: in the order in which its ops are issued; stages
    in a random one, where they wait for each other as much as they ever do, and where not."""
    for mode in modes:
        try:
            terms = account(program, mode)
        except (Stops, LookupError, ValueError):
            return False
        if isinstance(terms, PipelineAccount):
            waits = waits_of(terms.events)
            if any(goes_wrong(terms, waits, random.Random(seed), blocking) for blocking in (True, False)):
                return False
        elif Execution(terms, as_issued(terms)).wrong():
            return False
    return True
