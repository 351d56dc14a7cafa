"""The carry slots of stages' lists, and the programs with them.

The lists are run in unit time, with messages that take none, where a send waits for its receive. A slot whose content
was sent is used again only by a call that begins later in that run: so the run stays one of the programs, and no slot
is the reason that they would not end. What arrives and what leaves are in different slots, first in, first out.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from yafsdp_fn.schedules.further_ops import Receive, Send
from yafsdp_fn.schedules.ops import Backward, Forward, Op, kind_of
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.split import Call, Parcel, Split
from yafsdp_fn.schedules.stages.messages import SPAN, Item, gives, takes

NEVER = float("inf")
Kind = tuple[bool, int]
"""Of a slot: whether what is in it leaves, and its bytes."""


def parcel_of(message: Send | Receive) -> Parcel:
    return Parcel(message.flow, message.microbatch, message.back)


class Times(NamedTuple):
    """begins: of each call, by stage; sent: parcel -> when it was. What never comes to it is not there."""

    begins: list[list[float]]
    sent: dict[Parcel, float]


def times(split: Split, lists: Sequence[Sequence[Item]]) -> Times:
    """A run of the stages' lists, with as many slots as there could be."""
    begins: list[list[float]] = [[] for _ in lists]
    sent: dict[Parcel, float] = {}
    made: dict[Parcel, float] = {}  # inside a stage
    at = [0] * len(lists)
    clock = [0.0] * len(lists)
    posted: list[tuple[deque[tuple[Parcel, float]], deque[tuple[Parcel, float]]]] = [(deque(), deque()) for _ in lists]
    free = [[0.0, 0.0] for _ in lists]  # when the streams of sends and receives are
    moved = True
    while moved:
        moved = False
        for stage, items in enumerate(lists):
            while at[stage] < len(items):
                item = items[at[stage]]
                if isinstance(item, Call):
                    needs = [made.get(parcel, sent.get(parcel)) for parcel in takes(split, item)]
                    come = [need for need in needs if need is not None]
                    if len(come) < len(needs):
                        break
                    begins[stage].append(max([clock[stage], *come]))
                    clock[stage] = begins[stage][-1] + SPAN[item.kind]
                    for parcel in gives(split, item):
                        if split.ends(parcel.flow, parcel.back) == (stage, stage):
                            made[parcel] = clock[stage]
                else:
                    posted[stage][isinstance(item, Receive)].append((parcel_of(item), clock[stage]))
                at[stage] += 1
                moved = True
        for stage, (sends, _) in enumerate(posted):
            while sends:
                parcel, since = sends[0]
                target = split.ends(parcel.flow, parcel.back)[1]
                receives = posted[target][1]
                if not receives or receives[0][0] != parcel:
                    break
                sent[parcel] = max(since, receives[0][1], free[stage][0], free[target][1])
                free[stage][0] = free[target][1] = sent[parcel]
                sends.popleft()
                receives.popleft()
                moved = True
    return Times(begins, sent)


class _Slots:
    """The slots of one stage's list. taken, given: of what its calls take and give; messages: before the first call and
    after each"""

    def __init__(self, split: Split, items: Sequence[Item], begins: Sequence[float], sent: dict[Parcel, float]) -> None:
        self.split, self.begins, self.sent = split, begins, sent
        self.count = 0
        self.free: dict[Kind, deque[int]] = {}
        self.leaving: list[tuple[int, Parcel, int]] = []  # sent after so many calls, from a slot
        self.held: dict[Parcel, int] = {}
        self.taken: dict[Parcel, int] = {}
        self.given: dict[Parcel, int] = {}
        self.messages: list[list[Op]] = [[]]
        for item in items:
            if isinstance(item, Call):
                self._call(item)
                continue
            parcel = parcel_of(item)
            if isinstance(item, Receive):
                self._fill(parcel, False)
            self.messages[-1].append(item._replace(carry_slot=self.held[parcel]))
            if isinstance(item, Send):
                self.leaving.append((len(self.messages), parcel, self.held.pop(parcel)))

    def _call(self, call: Call) -> None:
        number = len(self.messages)
        for parcel in takes(self.split, call):
            self.taken[parcel] = slot = self.held.pop(parcel)
            self.free[self._kind(parcel, False)].append(slot)
        now = self.begins[number - 1] if number <= len(self.begins) else -NEVER
        for left in list(self.leaving):
            # what the call before has made is under way while this one computes
            if left[0] < number and self.sent.get(left[1], NEVER) <= now:
                self.free[self._kind(left[1], True)].append(left[2])
                self.leaving.remove(left)
        for parcel in gives(self.split, call):
            source, target = self.split.ends(parcel.flow, parcel.back)
            self.given[parcel] = self._fill(parcel, source != target)
        self.messages.append([])

    def _kind(self, parcel: Parcel, leaves: bool) -> Kind:
        flow = self.split.flows[parcel.flow]
        return leaves, flow.grad_bytes if parcel.back else flow.nbytes

    def _fill(self, parcel: Parcel, leaves: bool) -> int:
        free = self.free.setdefault(self._kind(parcel, leaves), deque())
        if not free:
            free.append(self.count)
            self.count += 1
        self.held[parcel] = slot = free.popleft()
        return slot


def wired(programs: Sequence[Program], split: Split, lists: Sequence[Sequence[Item]]) -> tuple[Program, ...]:
    """Stages' programs with the messages of their lists, and the carry slots of what their computes take and give."""
    begins, sent = times(split, lists)
    parts = zip(programs, lists, begins, strict=True)
    return tuple(_wired(program, items, _Slots(split, items, when, sent)) for program, items, when in parts)


def _wired(program: Program, items: Sequence[Item], slots: _Slots) -> Program:
    split = program.trace.split
    assert split is not None
    ends = list(_ends(split, items))
    ops: list[Op] = list(slots.messages[0])
    done = calls = 0
    for op in program.ops:
        if not isinstance(op, Forward | Backward):
            ops.append(op)
            continue
        of = kind_of(op), op.visit, op.microbatch
        at = tuple(slots.taken[parcel] for parcel in split.takes(*of))
        to = tuple(slots.given[parcel] for parcel in split.gives(*of))
        ops.append(op._replace(takes=at, gives=to))
        done += 1
        if calls < len(ends) and done == ends[calls]:
            calls += 1
            ops += slots.messages[calls]
    return Program(program.trace, tuple(ops))


def _ends(split: Split, items: Sequence[Item]) -> Iterator[int]:
    """How many computes there are up to the end of each call."""
    total = 0
    for item in items:
        if isinstance(item, Call):
            first, end = split.segments[item.segment]
            total += end - first
            yield total
