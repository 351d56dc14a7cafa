"""Checks the rule `deadlock`: the programs of all stages end, even if a send waits for its receive, and the host for
the device.

On each stage the host goes through its program. Before each op that is not a message it may wait for everything that
it has issued: a capture of a graph, a return of memory, the first use of a kernel or of a communicator synchronise
the device. So these ops run one after the other, after all messages before them. Messages between two of them are
under way together. A message begins when the message before it on its stream has ended, when the ops that its buffers
wait for (hazards) have ended, and when everything issued before it has begun: on a GPU kernels of several communicators
begin in the order in which they were issued (docs/gpu.md). A send and its receive end together. So do the sums of a
gradient over stages, and the norm of all stages; a stage without updates takes the norm when its program has ended.

No engine waits for more. If sends are buffered, or the host does not wait, each op waits for some of the same ops, so a
pipeline that ends here ends there, too. Nothing waits for a later step, so it is enough to look at one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from yafsdp_fn.communication.streams import Scoreboard
from yafsdp_fn.program.events import StageEvent, play
from yafsdp_fn.program.ops import AllReduce, MessageOp, Norm, Op
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.text import describe
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.stages import beside

# ---- The rule.


def all_end(pipeline: Program) -> None:
    """Raises Refused where stages wait for each other."""
    stuck = list(_stuck(pipeline))
    if not stuck:
        return

    def op(of: Stuck) -> Op:
        ops = pipeline.stages[of.stage]
        return ops[of.at] if of.at < len(ops) else Norm(())  # that follows a program without updates

    stage, at, other, there = stuck[0]
    what = f"op {at} ({describe(op(stuck[0]), pipeline.trace)})"
    lines = [f"stage {stage}: {what}: rule 'deadlock': it waits for stage {other}, which waits, too"]
    for waiting in stuck[1:]:
        what = f"op {waiting.at} ({describe(op(waiting), pipeline.trace)})"
        lines.append(f"    stage {waiting.stage} waits at {what} for stage {waiting.other}")
    every = [range(len(pipeline.stages[number])) for number in (stage, other)]
    drawn = beside(pipeline, (stage, every[0], at), (other, every[1], there))
    raise Refused("deadlock", at, "\n".join([*lines, drawn]), stage)


class Stuck(NamedTuple):
    """A stage that does not end. at: the first op that has not; it waits for stage `other`, whose first one is `there`.
    Each is the number of ops where the program is over, and only what follows it waits."""

    stage: int
    at: int
    other: int
    there: int


def _stuck(pipeline: Program) -> Iterator[Stuck]:
    """Yields the stages that do not end."""
    rows = _rows(pipeline)
    met = _met(rows)
    begun, over = _run(rows, met)
    firsts = [next((at for at in range(len(items)) if (n, at) not in over), None) for n, items in enumerate(rows)]
    for stage, first in enumerate(firsts):
        if first is None:
            continue
        # whom it needs, and who of these has not come
        item = rows[stage][first]
        there = met[_together(item)]
        needed = range(len(rows)) if isinstance(item, Norm) else there if _together(item) else ()
        others = [other for other in needed if other != stage]
        waiting = [other for other in others if other in there and (other, there[other]) in begun - over]
        missing = [other for other in others if other not in waiting]
        rest = [other for other, left in enumerate(firsts) if other != stage and left is not None]
        # named is one that it needs, or else any other that is stuck
        other = next(iter((*missing, *rest, stage)))
        last = firsts[other]
        yield Stuck(stage, first, other, len(pipeline.stages[other]) if last is None else last)


_Places = set[tuple[int, int]]
"""(stage, item)"""


# ---- All stages run at once: `program/events.py` says which items begin and end.


def _run(rows: Sequence[Sequence[Op]], met: "_Met") -> tuple[_Places, _Places]:
    """Runs the items of all stages; returns those that have begun, and those that are over."""
    events, begins = _events(rows, met)
    times = play(events)
    begun = {place for place, number in begins.items() if times[number] is not None}
    return begun, {place for place in begun if times[begins[place] + 1] is not None}


_Met = Mapping[object, Mapping[int, int]]
"""The items that are done together, by stage."""


def _met(rows: Sequence[Sequence[Op]]) -> _Met:
    met: defaultdict[object, dict[int, int]] = defaultdict(dict)
    for stage, items in enumerate(rows):
        for at, item in enumerate(items):
            met[_together(item)][stage] = at
    return met


def _events(rows: Sequence[Sequence[Op]], met: _Met) -> tuple[list[StageEvent], dict[tuple[int, int], int]]:
    """Returns two events for each item: it begins, and it ends, when all that are done with it have begun; and the
    number of the first of them."""
    places = [(stage, at) for stage, items in enumerate(rows) for at in range(len(items))]
    begins = {place: 2 * number for number, place in enumerate(places)}
    events: list[StageEvent] = []
    for stage, items in enumerate(rows):
        for at, (item, after_begin, after_end) in enumerate(zip(items, *_waits(items), strict=True)):
            waits = [begins[stage, other] for other in after_begin] + [begins[stage, other] + 1 for other in after_end]
            together = met[_together(item)].items() if _together(item) else [(stage, at)]
            events += [
                StageEvent(stage, item.stream, waits),
                StageEvent(stage, item.stream, [begins[one] for one in together]),
            ]
    return events, begins


# ---- What an item waits for.


def _rows(pipeline: Program) -> list[list[Op]]:
    """Returns the ops of stages, with the norm of those that train nothing where others take it."""
    alone = [pipeline.has_updates and not any(isinstance(op, Norm) for op in ops) for ops in pipeline.stages]
    return [[*ops, *[Norm(())] * adds] for ops, adds in zip(pipeline.stages, alone, strict=True)]


def _together(item: Op) -> object:
    """Returns a key, equal for items that stages do together; None for an item that a stage does alone."""
    if isinstance(item, MessageOp):
        return item.message
    if isinstance(item, AllReduce) and item.over == "stages":
        return item
    return Norm if isinstance(item, Norm) else None


def _waits(items: Sequence[Op]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns, for each item of a stage, those that must have begun before it does, and those that must have ended."""
    board: Scoreboard[int] = Scoreboard()
    ends = [board.use(at, item.stream, *item.uses()) for at, item in enumerate(items)]
    # the end of the backward comes before the norm, and waits for every gradient
    first = next((at for at, op in enumerate(items) if isinstance(op, Norm)), None)
    if first is not None:
        ends[first] += [at for at in range(first) if items[at].stream in ("reduce", "replicate")]
    begins: list[list[int]] = []
    before: dict[str, int] = {}  # stream -> its last item
    alone: list[int] = []  # the last item that is no message
    for at, item in enumerate(items):
        if isinstance(item, MessageOp):  # the host issues it without anything that could synchronise the device
            begins.append([other for stream, other in before.items() if stream != item.stream])
            ends[at] += alone
        else:  # the host may have waited for all that it has issued
            begins.append([])
            ends[at] += before.values()
            alone = [at]
        before[item.stream] = at
    return begins, ends
