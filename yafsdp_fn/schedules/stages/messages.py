"""Who sends what when: rows of calls, and the programs of stages, with their sends, receives and carry slots.

    stage 0   forward 0 | send 0 ...                               a send follows the call that has made it
    stage 1   receive 0 ... | (the call before) | forward 0        a receive is there a call ahead, to overlap

Calls are run in unit time, and that gives all messages one order, by the time at which they are made. Sends and
receives of every stage are in that order, and before a receive there are only calls that begin earlier than it could
arrive. So a message waits for earlier ones alone, and all arrive, also where a send waits for its receive. Carry slots
keep to this: what arrives and what leaves are in different ones.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from yafsdp_fn.schedules.ops import Backward, Forward, Op, Receive, Send, kind_of
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.refused import Refused
from yafsdp_fn.schedules.split import Call, Parcel, Split
from yafsdp_fn.schedules.stages.sound_calls import in_words

Item = Call | Send | Receive
"""Of a stage's list: calls, and messages between them, in carry slots that are not known yet."""

SPAN = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Units of time that a call takes."""


def takes(split: Split, call: Call) -> list[Parcel]:
    """What a call takes of other segments."""
    first, end = split.segments[call.segment]
    parcels = split.takes(call.kind, first if call.kind == "forward" else end - 1)
    return [parcel._replace(microbatch=call.microbatch) for parcel in parcels]


def gives(split: Split, call: Call) -> list[Parcel]:
    """What it gives to others."""
    first, end = split.segments[call.segment]
    parcels = split.gives(call.kind, end - 1 if call.kind == "forward" else first)
    return [parcel._replace(microbatch=call.microbatch) for parcel in parcels]


class _Timed(NamedTuple):
    """begins: of each call, by stage; made: parcel -> when it is made, and its number among all that are"""

    begins: list[list[int]]
    made: dict[Parcel, tuple[int, int, int]]


def with_messages(split: Split, rows: Sequence[Sequence[Call]]) -> list[list[Item]]:
    """`rows`, which must be sound, with the messages of each stage. Raises Refused, rule `deadlock`, where calls wait
    for each other."""
    begins, made = _run(split, rows)
    out: list[list[Item]] = []
    for stage, row in enumerate(rows):
        arriving = [(made[parcel], at, parcel) for at, call in enumerate(row) for parcel in takes(split, call)]
        arriving = sorted(one for one in arriving if split.ends(one[2].flow, one[2].back)[0] != stage)
        before: dict[int, list[Parcel]] = {}
        place = len(row)
        for when, at, parcel in reversed(arriving):  # in order: none after one that is made later
            place = min(place, max(0, at - 1), bisect_left(begins[stage], when[0]))
            before.setdefault(place, []).insert(0, parcel)
        items: list[Item] = []
        for at, call in enumerate(row):
            items += [Receive(p.flow, 0, p.microbatch, p.back) for p in before.get(at, ())]
            items.append(call)
            sent = [p for p in gives(split, call) if split.ends(p.flow, p.back)[1] != stage]
            items += [Send(p.flow, 0, p.microbatch, p.back) for p in sent]
        out.append(items)
    return out


def _run(split: Split, rows: Sequence[Sequence[Call]]) -> _Timed:
    """Each call begins when the one before it is over, and when there is all that it takes."""
    begins: list[list[int]] = [[] for _ in rows]
    free = [0] * len(rows)
    made: dict[Parcel, tuple[int, int, int]] = {}
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            for call in row[len(begins[stage]) :]:
                needs = takes(split, call)
                if any(parcel not in made for parcel in needs):
                    break
                begins[stage].append(max([free[stage], *(made[parcel][0] for parcel in needs)]))
                free[stage] = begins[stage][-1] + SPAN[call.kind]
                for number, parcel in enumerate(gives(split, call)):
                    made[parcel] = (free[stage], stage, number)
                moved = True
    stuck = [stage for stage, row in enumerate(rows) if len(begins[stage]) < len(row)]
    if stuck:
        lines = ["rule 'deadlock': calls wait for each other"]
        for stage in stuck:
            call = rows[stage][len(begins[stage])]
            parcel = next(parcel for parcel in takes(split, call) if parcel not in made)
            source = split.ends(parcel.flow, parcel.back)[0]
            lines.append(f"    stage {stage} waits at {in_words(call)} for stage {source}")
        raise Refused("deadlock", -1, "\n".join(lines), stuck[0])
    return _Timed(begins, made)


class _Slots:
    """Carry slots for what is in a stage's list, first in, first out: a slot is empty for as long as can be."""

    def __init__(self, split: Split, items: Sequence[Item]) -> None:
        self.split = split
        self.count = 0
        self.free: dict[tuple[bool, int], deque[int]] = {}  # (whether what is in them leaves, bytes) -> slots
        self.resting: list[tuple[int, tuple[bool, int], int]] = []  # (calls so far, kind, slot)
        self.held: dict[Parcel, int] = {}
        self.taken: dict[Parcel, int] = {}
        self.given: dict[Parcel, int] = {}
        self.messages: list[list[Op]] = [[]]  # before the first call, and after each
        for item in items:
            if isinstance(item, Call):
                self._call(item)
            elif isinstance(item, Receive):
                slot = self._fill(Parcel(item.flow, item.microbatch, item.back), False)
                self.messages[-1].append(item._replace(carry_slot=slot))
            else:
                parcel = Parcel(item.flow, item.microbatch, item.back)
                slot = self.held.pop(parcel)
                # the next call would wait for this send, if it were to use the slot
                self.resting.append((len(self.messages), self._kind(parcel, True), slot))
                self.messages[-1].append(item._replace(carry_slot=slot))

    def _call(self, call: Call) -> None:
        for parcel in takes(self.split, call):
            self.taken[parcel] = slot = self.held.pop(parcel)
            self.free[self._kind(parcel, False)].append(slot)
        for number, kind, slot in self.resting:
            if number < len(self.messages):
                self.free[kind].append(slot)
        self.resting = [rest for rest in self.resting if rest[0] == len(self.messages)]
        for parcel in gives(self.split, call):
            source, target = self.split.ends(parcel.flow, parcel.back)
            self.given[parcel] = self._fill(parcel, source != target)
        self.messages.append([])

    def _kind(self, parcel: Parcel, leaves: bool) -> tuple[bool, int]:
        flow = self.split.flows[parcel.flow]
        return leaves, flow.grad_bytes if parcel.back else flow.nbytes

    def _fill(self, parcel: Parcel, leaves: bool) -> int:
        free = self.free.setdefault(self._kind(parcel, leaves), deque())
        if not free:
            free.append(self.count)
            self.count += 1
        self.held[parcel] = free.popleft()
        return self.held[parcel]


def wired(program: Program, items: Sequence[Item]) -> Program:
    """A stage's program with the messages of its list, and the carry slots of what its computes take and give."""
    split = program.trace.split
    assert split is not None
    slots = _Slots(split, items)
    ends = list(_ends(split, items))
    ops: list[Op] = list(slots.messages[0])
    done = calls = 0
    for op in program.ops:
        if not isinstance(op, Forward | Backward):
            ops.append(op)
            continue
        kind = kind_of(op)
        took = [p._replace(microbatch=op.microbatch) for p in split.takes(kind, op.visit)]
        gave = [p._replace(microbatch=op.microbatch) for p in split.gives(kind, op.visit)]
        at, to = tuple(slots.taken[p] for p in took), tuple(slots.given[p] for p in gave)
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
