"""Checks the rule `deadlock`: the programs of all stages end, where a send waits for its receive, and the host for the
device.

On each stage the host goes through its program. Before any op that is no message it may wait for all that it has
issued: what captures a graph, gives memory back, loads a kernel or uses a communicator for the first time synchronises
the device. So such ops run one after the other, after all messages before them. Messages between two of them are under
way together: one begins when the one before it on its stream is over, what its buffers wait for (hazards.py) is over,
and all that was issued before it has begun, since on a GPU kernels of several communicators begin in the order in which
they were issued (docs/gpu.md). A send and its receive end together, and so do the sums of a gradient over stages, and
what all stages add up for their updates: the norm, which a stage without updates takes when its program is over, or,
where there is none, the weights of all losses (`weighed`).

No engine waits for more. Where sends are buffered, or the host does not wait, each op waits for a part of the same
ones, so that a pipeline that ends here ends there, too. Nothing waits for a later step: one that ends is enough.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from yafsdp_fn.program.events import Event, play
from yafsdp_fn.program.hazards import Scoreboard
from yafsdp_fn.program.ops import AllReduce, Backward, Buffer, Forward, Norm, Op, Receive, Send, Update
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.text import describe
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.stages import beside


def all_end(pipeline: Program) -> None:
    """Raises Refused where stages wait for each other."""
    stuck = list(_stuck(pipeline))
    if not stuck:
        return

    def op(of: Stuck) -> Op:
        ops = pipeline.stages[of.stage]
        return ops[of.at] if of.at < len(ops) else Norm(())  # that follows a program without updates

    def whom(of: Stuck) -> str:
        return f"the losses of stage {of.other}" if isinstance(op(of), Update) else f"stage {of.other}"

    stage, at, other, there = stuck[0]
    what = f"op {at} ({describe(op(stuck[0]), pipeline.trace)})"
    lines = [f"stage {stage}: {what}: rule 'deadlock': it waits for {whom(stuck[0])}, which waits, too"]
    for waiting in stuck[1:]:
        what = f"op {waiting.at} ({describe(op(waiting), pipeline.trace)})"
        lines.append(f"    stage {waiting.stage} waits at {what} for {whom(waiting)}")
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


class _Weights(NamedTuple):
    """The sum of the weights of all losses, over all ranks: the first update waits for it."""

    stream: str = "metrics"

    def uses(self) -> tuple[list[Buffer], list[Buffer]]:
        return [], []


_Item = Op | _Weights


def _stuck(pipeline: Program) -> Iterator[Stuck]:
    """Yields the stages that do not end."""
    rows = _rows(pipeline)
    if unmeasured(pipeline):
        for items, at in zip(rows, weighed(pipeline), strict=True):
            items.insert(at, _Weights())
    met = _met(rows)
    begun, over = _run(rows, met)
    firsts = [
        next((at for at, item in enumerate(items) if (n, at) not in over and not isinstance(item, _Weights)), None)
        for n, items in enumerate(rows)
    ]
    for stage, first in enumerate(firsts):
        if first is None:
            continue
        item = rows[stage][first]
        there = met[_together(_Weights() if isinstance(item, Update) else item)]  # all before an update is over
        needed = range(len(rows)) if isinstance(item, Norm | Update) else there if _together(item) else ()
        others = [other for other in needed if other != stage]
        waiting = [other for other in others if other in there and (other, there[other]) in begun - over]
        missing = [other for other in others if other not in waiting]
        rest = [other for other, left in enumerate(firsts) if other != stage and left is not None]
        other = next(iter((*missing, *rest, stage)))
        yield Stuck(stage, _number(pipeline, rows, stage, first), other, _number(pipeline, rows, other, firsts[other]))


_Places = set[tuple[int, int]]
"""(stage, item)"""


def _run(rows: Sequence[Sequence[_Item]], met: "_Met") -> tuple[_Places, _Places]:
    """Runs the items of all stages; returns those that have begun, and those that are over."""
    events, begins = _events(rows, met)
    times = play(events)
    begun = {place for place, number in begins.items() if times[number] is not None}
    return begun, {place for place in begun if times[begins[place] + 1] is not None}


_Met = Mapping[object, Mapping[int, int]]
"""The items that are done together, by stage."""


def _met(rows: Sequence[Sequence[_Item]]) -> _Met:
    met: defaultdict[object, dict[int, int]] = defaultdict(dict)
    for stage, items in enumerate(rows):
        for at, item in enumerate(items):
            met[_together(item)][stage] = at
    return met


def _events(rows: Sequence[Sequence[_Item]], met: _Met) -> tuple[list[Event], dict[tuple[int, int], int]]:
    """Returns two events for each item: it begins, and it ends, when all that are done with it have begun; and the
    number of the first of them."""
    places = [(stage, at) for stage, items in enumerate(rows) for at in range(len(items))]
    begins = {place: 2 * number for number, place in enumerate(places)}
    events: list[Event] = []
    for stage, items in enumerate(rows):
        for at, (item, after_begin, after_end) in enumerate(zip(items, *_waits(items), strict=True)):
            waits = [begins[stage, other] for other in after_begin] + [begins[stage, other] + 1 for other in after_end]
            together = met[_together(item)].items() if _together(item) else [(stage, at)]
            events += [Event(stage, item.stream, waits), Event(stage, item.stream, [begins[one] for one in together])]
    return events, begins


def _rows(pipeline: Program) -> list[list[_Item]]:
    """Returns the ops of stages, with the norm of those that train nothing where others take it."""
    normed = pipeline.has_updates and not unmeasured(pipeline)
    alone = [normed and not any(isinstance(op, Norm) for op in ops) for ops in pipeline.stages]
    return [[*ops, *[Norm(())] * adds] for ops, adds in zip(pipeline.stages, alone, strict=True)]


def unmeasured(pipeline: Program) -> bool:
    """Returns whether updates come without a norm before them."""
    return pipeline.has_updates and not any(isinstance(op, Norm) for ops in pipeline.stages for op in ops)


def weighed(pipeline: Program) -> list[int]:
    """Returns, for each stage, the number of the op before which it begins to add up the weights of all losses, which
    the updates of a program without a norm wait for.

    All that the last forward of any stage waits for is issued before that, and nothing else: a sooner sum could wait
    for a forward that waits for this stage, and a later one hold up what another stage waits for to come to it.
    """
    rows = _rows(pipeline)
    events, begins = _events(rows, _met(rows))
    before: dict[tuple[int, str], int] = {}
    waits: list[list[int]] = []
    for number, event in enumerate(events):
        stream = event.stage, event.stream
        waits.append([*event.waits, *([before[stream]] if stream in before else [])])
        before[stream] = number
    todo = [
        begins[stage, max(at for at, op in enumerate(items) if isinstance(op, Forward))] + 1
        for stage, items in enumerate(rows)
        if any(isinstance(op, Forward) for op in items)
    ]
    needed = set(todo)
    while todo:
        new = set(waits[todo.pop()]) - needed
        needed |= new
        todo += new
    found = [0] * len(rows)
    for (stage, at), number in begins.items():
        if number in needed or number + 1 in needed:
            found[stage] = max(found[stage], at + 1)
    return found


def _together(item: _Item) -> object:
    """Returns a key, equal for items that stages do together; None for an item that a stage does alone."""
    if isinstance(item, Send | Receive):
        return item.parcel
    if isinstance(item, AllReduce) and item.over == "stages":
        return item
    return type(item) if isinstance(item, Norm | _Weights) else None


def _waits(items: Sequence[_Item]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns, for each item of a stage, those that must have begun before it does, and those that must have ended."""
    board: Scoreboard[int] = Scoreboard()
    ends = [board.use(at, item.stream, *item.uses()) for at, item in enumerate(items)]
    # the end of the backward comes before the first norm or update after all computes, and waits for every gradient
    last = max((at for at, op in enumerate(items) if isinstance(op, Forward | Backward)), default=-1)
    first = next((at for at, op in enumerate(items) if at > last and isinstance(op, Norm | Update)), None)
    if first is not None:
        ends[first] += [at for at in range(first) if items[at].stream in ("reduce", "replicate")]
    for first in [at for at, op in enumerate(items) if isinstance(op, Update)][:1]:
        ends[first] += [at for at, item in enumerate(items) if isinstance(item, _Weights)]
    begins: list[list[int]] = []
    before: dict[str, int] = {}  # stream -> its last item
    alone: list[int] = []  # the last item that is no message
    for at, item in enumerate(items):
        if _is_message(item):
            begins.append([other for stream, other in before.items() if stream != item.stream])
            ends[at] += alone
        else:  # the host may have waited for all that it has issued
            begins.append([])
            ends[at] += before.values()
            alone = [at]
        before[item.stream] = at
    return begins, ends


def _is_message(item: _Item) -> bool:
    """Returns whether the host issues an item without anything that could synchronise the device."""
    return isinstance(item, Send | Receive | _Weights)


def _number(pipeline: Program, rows: Sequence[Sequence[_Item]], stage: int, at: int | None) -> int:
    """Returns the number of an item as an op; how many ops there are for what is behind them, or None."""
    if at is None:
        return len(pipeline.stages[stage])
    return sum(not isinstance(item, _Weights) for item in rows[stage][:at])
