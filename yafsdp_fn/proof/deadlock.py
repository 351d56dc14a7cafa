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
from collections.abc import Sequence
from typing import NamedTuple

from yafsdp_fn.communication.streams import Scoreboard
from yafsdp_fn.program.events import StageEvent, play
from yafsdp_fn.program.ops import AllReduce, MessageOp, Norm, Op
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.text import describe
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.stages import beside

Rows = Sequence[Sequence[Op]]
"""The items of each stage, in their order: its ops, and the norm that follows them where others take it inside."""

Place = tuple[int, int]
"""A stage, and the number of one of its items."""


# ---- The rule.


def all_end(pipeline: Program) -> None:
    """Raises Refused where stages wait for each other."""
    rows = _rows(pipeline)
    stuck = _stuck(rows)
    if not stuck:
        return

    def in_words(waiting: Stuck) -> str:
        item = rows[waiting.stage][waiting.at]
        return f"op {waiting.at} ({describe(item, pipeline.trace)})"

    stage, at, other, there = stuck[0]
    lines = [f"stage {stage}: {in_words(stuck[0])}: rule 'deadlock': it waits for stage {other}, which waits, too"]
    for waiting in stuck[1:]:
        lines.append(f"    stage {waiting.stage} waits at {in_words(waiting)} for stage {waiting.other}")
    ops = range(len(pipeline.stages[stage]))
    ops_there = range(len(pipeline.stages[other]))
    lines.append(beside(pipeline, (stage, ops, at), (other, ops_there, there)))
    raise Refused("deadlock", at, "\n".join(lines), stage)


class Stuck(NamedTuple):
    """A stage that does not end. at: its first item that has not; it waits for stage `other`, whose first one is
    `there`."""

    stage: int
    at: int
    other: int
    there: int


def _stuck(rows: Rows) -> list[Stuck]:
    """Returns the stages that do not end."""
    met = _met(rows)
    begun, over = _run(rows, met)
    first: dict[int, int] = {}  # stage -> its first item that does not end
    for stage, items in enumerate(rows):
        left = [at for at in range(len(items)) if (stage, at) not in over]
        if left:
            first[stage] = left[0]
    found: list[Stuck] = []
    for stage, at in first.items():
        # whom it needs, and who of these has not come: not those that wait for it there
        waiting = begun - over
        missing = [place[0] for place in met[stage, at] if place[0] != stage and place not in waiting]
        # named is one that it needs, or else any other that is stuck
        rest = [other for other in first if other != stage]
        other = [*missing, *rest, stage][0]
        found.append(Stuck(stage, at, other, first[other]))
    return found


# ---- All stages run at once: `program/events.py` says which items begin and end.


def _run(rows: Rows, met: dict[Place, list[Place]]) -> tuple[set[Place], set[Place]]:
    """Runs the items of all stages; returns those that have begun, and those that are over."""
    # two events for each item: it begins, and it ends, when all that are done with it have begun
    begins = {place: 2 * number for number, place in enumerate(met)}
    events: list[StageEvent] = []
    for stage, items in enumerate(rows):
        after_begins, after_ends = _waits(items)
        for at, item in enumerate(items):
            waits = [begins[stage, other] for other in after_begins[at]]
            waits += [begins[stage, other] + 1 for other in after_ends[at]]
            together = [begins[place] for place in met[stage, at]]
            events += [StageEvent(stage, item.stream, waits), StageEvent(stage, item.stream, together)]
    times = play(events)
    begun = {place for place, number in begins.items() if times[number] is not None}
    over = {place for place, number in begins.items() if times[number + 1] is not None}
    return begun, over


def _met(rows: Rows) -> dict[Place, list[Place]]:
    """Returns the places that are done together with each place, itself included, by stage."""
    by_key: defaultdict[object, list[Place]] = defaultdict(list)
    met: dict[Place, list[Place]] = {}
    for stage, items in enumerate(rows):
        for at, item in enumerate(items):
            key = _together(item)
            # one list for all of a key, which grows as they are met
            together = [] if key is None else by_key[key]
            together.append((stage, at))
            met[stage, at] = together
    return met


# ---- What an item waits for.


def _rows(pipeline: Program) -> list[list[Op]]:
    """Returns the ops of stages, with the norm of those that train nothing where others take it."""
    rows = [list(ops) for ops in pipeline.stages]
    for items in rows:
        if pipeline.has_updates and not any(isinstance(op, Norm) for op in items):
            items.append(Norm(()))
    return rows


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
    norm = next((at for at, item in enumerate(items) if isinstance(item, Norm)), None)
    if norm is not None:
        ends[norm] += [at for at in range(norm) if items[at].stream in ("reduce", "replicate")]
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
