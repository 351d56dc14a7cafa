"""Who sends what when: rows of calls, and the programs of stages, with their sends, receives and carry slots.

    stage 0   forward 0 | send 0 ...                               a send follows the call that has made it
    stage 1   receive 0 ... | (the call before) | forward 0        a receive is there a call ahead, to overlap

Calls are run in unit time, and that gives all messages one order, by the time at which they are made. Sends and
receives of every stage are in that order, and a receive is issued before anything that is sent later, and after the
receive before it is over. So a message waits for earlier ones alone, and all arrive, also where a send waits for its
receive, and where communication begins in the order in which it was issued. Which carry slots they are in is decided in
slots.py.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from yafsdp_fn.schedules.further_ops import Receive, Send
from yafsdp_fn.schedules.refused import Refused
from yafsdp_fn.schedules.split import Call, Parcel, Split
from yafsdp_fn.schedules.stages.sound_calls import in_words

Item = Call | Send | Receive
"""Of a stage's list: calls, and messages between them, in carry slots that are not known yet."""

SPAN = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Units of time that a call takes."""


def takes(split: Split, call: Call) -> tuple[Parcel, ...]:
    """What a call takes of other segments."""
    first, end = split.segments[call.segment]
    return split.takes(call.kind, first if call.kind == "forward" else end - 1, call.microbatch)


def gives(split: Split, call: Call) -> tuple[Parcel, ...]:
    """What it gives to others."""
    first, end = split.segments[call.segment]
    return split.gives(call.kind, end - 1 if call.kind == "forward" else first, call.microbatch)


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
        # what stages send at one time is in the order of stages
        ends = [(begin + SPAN[call.kind], stage) for begin, call in zip(begins[stage], row, strict=True)]
        for number, (when, at, parcel) in reversed([*enumerate(arriving)]):
            place = min(place, max(0, at - 1), bisect_right(ends, when[:2]))  # none after what is sent later
            # nor before the receive before it is over: on one stream it could not begin, and would hold up what follows
            over = bisect_left(ends, arriving[number - 1][0][:2]) if number else 0
            before.setdefault(max(place, over), []).insert(0, parcel)
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
