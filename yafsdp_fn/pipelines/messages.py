"""Messages between stages, and the carry slots that they fill."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from yafsdp_fn.program.events import StageEvent, play
from yafsdp_fn.program.ops import ComputeOp, MessageOp, Op, Receive, Send, kind_of
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import Call, CallRows, Message, Split
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.stages import calls_of, in_words

# ---- Puts sends and receives between the calls of stages, in an order in which all of them arrive.
#
#     stage 0   forward 0 | send 0 ...                               a send follows the call that has made it
#     stage 1   receive 0 ... | (the call before) | forward 0        a receive overlaps the call in which it comes
#
# Calls are run in unit time, which gives all calls and messages one order: calls by their ends, messages by the time at
# which they are made. Every stage has its calls, sends and receives in that order: so all ends even where each waits
# for the one before it, as it does where the host synchronises the device. Nothing may wait for what its
# stage does later. Which carry slots messages are in is decided by `_slots_of`, below.

Item = Call | MessageOp
"""An item of a stage's list: calls, and messages between them, in carry slots that are not known yet."""

SPAN = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Units of time that a call takes, where nothing else is known."""


class Pace(NamedTuple):
    """The time that calls take, and a message between two stages."""

    call: Callable[[Call], float]
    message: float = 0.0


UNIT = Pace(lambda call: SPAN[call.kind])
"""The pace of `SPAN`, where messages take none."""


# ---- a run of the lists, for its times


class PlayedTimes(NamedTuple):
    """A run of stages' lists, without calls and messages that never come.

    begins: of each call, by stage; sent: message -> when it was sent
    made: message -> when its call was over, the stage, and its number among what that call gives
    """

    begins: list[list[float]]
    sent: dict[Message, float]
    made: dict[Message, tuple[float, int, int]]


def times(split: Split, lists: Sequence[Sequence[Item]], pace: Pace) -> PlayedTimes:
    """Runs lists with any number of carry slots: a call begins when the one before it has ended, and all messages that
    it takes are there.

    A message from another stage arrives by its send and receive, which wait for each other and take no time. In lists
    of calls alone it is there as soon as it is made, or as long after that as `pace` says.
    """
    listed = [(stage, item) for stage, items in enumerate(lists) for item in items]
    # the call or the receive that a message comes with, and its send
    comes: dict[Message, int] = {}
    sends: dict[Message, int] = {}
    for number, (_, item) in enumerate(listed):
        if isinstance(item, Send):
            sends[item.message] = number
        elif isinstance(item, Receive):
            comes[item.message] = number
        else:
            for message in split.given_by(item):
                comes.setdefault(message, number)
    # messages that take time by themselves
    travels: list[StageEvent] = []
    if pace.message and not sends:
        for message, source in comes.items():
            if split.crosses(message):
                comes[message] = len(listed) + len(travels)
                travels.append(StageEvent(-1, f"{message}", [source], (("latency", pace.message),)))
    # an event for each item
    before: dict[int, list[int]] = {}  # stage -> its last call
    events: list[StageEvent] = []
    for number, (stage, item) in enumerate(listed):
        if isinstance(item, Call):
            waits = [comes[message] for message in split.taken_by(item)]
            events.append(StageEvent(stage, "compute", waits, (("compute", pace.call(item)),)))
            before[stage] = [number]
        else:
            other = comes if isinstance(item, Send) else sends
            events.append(StageEvent(stage, item.stream, before.get(stage, ()), partner=other[item.message]))
    # their times
    found = PlayedTimes([[] for _ in lists], {}, {})
    for (stage, item), time in zip(listed, play(events + travels), strict=False):
        if time is not None and isinstance(item, Call):
            found.begins[stage].append(time.start)
            found.made.update((message, (time.end, stage, at)) for at, message in enumerate(split.given_by(item)))
        elif time is not None and isinstance(item, Send):
            found.sent[item.message] = time.start
    return found


# ---- lists with messages


def with_messages(split: Split, rows: CallRows, pace: Pace = UNIT) -> list[list[Item]]:
    """Returns `rows`, which must be sound, with the messages of each stage, in the order in which they are made at this
    pace. Raises Refused, rule `deadlock`, where calls wait for each other."""
    played = times(split, rows, pace)
    _all_begin(split, rows, played)
    out: list[list[Item]] = []
    for stage, row in enumerate(rows):
        # calls by their ends, a receive by when its message is made; what stages do at one time is in their order
        timed: list[tuple[tuple[float, int, int, int], Item]] = []
        for at, (call, begin) in enumerate(zip(row, played.begins[stage], strict=True)):
            end = begin + pace.call(call)
            timed.append(((end, stage, at, 0), call))
            for number, message in enumerate(split.given_by(call), 1):
                if split.crosses(message):
                    timed.append(((end, stage, at, number), Send(message.flow, 0, message.microbatch, message.back)))
            for message in split.taken_by(call):
                if split.crosses(message):
                    receive = Receive(message.flow, 0, message.microbatch, message.back)
                    timed.append(((*played.made[message], 0), receive))
        out.append([item for _, item in sorted(timed, key=itemgetter(0))])
    return out


def _all_begin(split: Split, rows: CallRows, played: PlayedTimes) -> None:
    """Raises Refused where calls have never begun, since they wait for each other."""
    stuck = [stage for stage, row in enumerate(rows) if len(played.begins[stage]) < len(row)]
    if stuck:
        lines = ["rule 'deadlock': calls wait for each other"]
        for stage in stuck:
            call = rows[stage][len(played.begins[stage])]
            message = next(message for message in split.taken_by(call) if message not in played.made)
            source = split.ends(message.flow, message.back)[0]
            lines.append(f"    stage {stage} waits at {in_words(call)} for stage {source}")
        raise Refused("deadlock", -1, "\n".join(lines), stuck[0])


# ---- Assigns carry slots to what stages take and give, and puts messages into their programs.
#
# The lists are run in unit time, with messages that take none, where a send waits for its receive. A slot whose
# content was sent is used again only by a call that begins later in that run: so the run stays one of the programs,
# and no slot is the reason that they would not end. What arrives and what leaves are in different slots, first in,
# first out.

NEVER = float("inf")
Kind = tuple[bool, int]
"""A kind of slot: whether its contents leave the stage, and its bytes."""


def _slots_of(
    split: Split, items: Sequence[Item], begins: Sequence[float], sent: dict[Message, float]
) -> dict[Message, int]:
    """Returns the carry slots of the messages in one stage's list: each is put into the one of its kind that is free
    for longest, or into a new one."""
    found: dict[Message, int] = {}
    free: defaultdict[Kind, deque[int]] = defaultdict(deque)
    leaving: list[tuple[int, Message]] = []  # sent after so many calls
    calls = 0
    for item in items:
        if isinstance(item, Send):
            leaving.append((calls, item.message))
            continue
        if isinstance(item, Receive):
            filled = [(False, item.message)]
        else:
            # what it takes has left its slot at once
            for message in split.taken_by(item):
                free[False, split.bytes_of(message)].append(found[message])
            # what was sent has left its slot when the send is over
            now = begins[calls] if calls < len(begins) else -NEVER
            for left in list(leaving):
                # what the call before has made is under way while this one computes
                after, message = left
                if after < calls and sent.get(message, NEVER) <= now:
                    free[True, split.bytes_of(message)].append(found[message])
                    leaving.remove(left)
            filled = [(split.crosses(message), message) for message in split.given_by(item)]
            calls += 1
        for leaves, message in filled:
            slots = free[leaves, split.bytes_of(message)]
            if not slots:
                slots.append(len({*found.values()}))
            found[message] = slots.popleft()
    return found


def wired(
    programs: Sequence[Program], lists: Sequence[Sequence[Item]], *, together: bool, pace: Pace = UNIT
) -> list[tuple[Op, ...]]:
    """Returns the ops of stages, with the messages of their lists, and carry slots for what computes take and give.

    together: all messages between two calls follow the first call directly, since a list may send and receive at the
        same time; else receives come as late as possible, after the gathers for the second call: communication begins
        in the order in which it is issued, and weights should not wait for a message
    """
    split = programs[0].trace.cut
    begins, sent, _ = times(split, lists, pace)
    out = []
    for program, items, when in zip(programs, lists, begins, strict=True):
        out.append(_wired(program, items, _slots_of(split, items, when, sent), together))
    return out


def _wired(program: Program, items: Sequence[Item], slots: dict[Message, int], together: bool) -> tuple[Op, ...]:
    """Returns the ops of one stage, with its messages."""
    split = program.trace.cut
    messages: list[list[Op]] = [[]]  # before the first call, and after each
    for item in items:
        if isinstance(item, Call):
            messages.append([])
        else:
            messages[-1].append(item._replace(carry_slot=slots[item.message]))
    ops: list[Op] = []
    late: list[Op] = []

    def add(own: Sequence[Op]) -> None:
        at = len(own) if together else sum(isinstance(op, Send) for op in own)  # which come first
        ops.extend(own[:at])
        late.extend(own[at:])

    add(messages[0])
    for op, call, _, ends in in_calls(program):
        if op.stream == "compute":
            ops += late
            late.clear()
        if isinstance(op, ComputeOp):
            of = kind_of(op), op.visit, op.microbatch
            taken = tuple(slots[message] for message in split.takes(*of))
            given = tuple(slots[message] for message in split.gives(*of))
            op = op._replace(takes=taken, gives=given)
        ops.append(op)
        if ends:
            add(messages[call + 1])
    return *ops, *late


# ---- ops, by the call that they belong to


class InCall(NamedTuple):
    """An op of a stage. call: the number of the call that is under way before it, or comes next; inside: whether it is
    under way; ends: whether the op is its last compute"""

    op: Op
    call: int
    inside: bool
    ends: bool


def in_calls(program: Program) -> Iterator[InCall]:
    """Yields each op of a stage's program with its place among the calls of the stage."""
    split = program.trace.cut
    computes = [len(split.visits(call.segment)) for call in calls_of(program)]
    call = done = 0
    for op in program.ops:
        inside = done > 0
        done += isinstance(op, ComputeOp)
        ends = done > 0 and done == computes[call]
        yield InCall(op, call, inside, ends)
        if ends:
            call += 1
            done = 0
