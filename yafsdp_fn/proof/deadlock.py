"""Checks the rule `deadlock`: the programs of all stages end, where a send waits for its receive.

On each stage the host goes through its program: it waits for every compute, and when the backward is over for every
gradient; all else it hands to the streams. An op begins when the one before it on its stream is over, and what its
buffers wait for (hazards.py); a send and its receive end together, and so do the sums of a gradient over stages,
and what all stages add up for their updates: the norm, which a stage without updates takes when its program is over,
or, where there is none, the weights of all losses, from each stage after its last forward. On a GPU kernels of several
communicators begin in the order in which they were issued (docs/gpu.md): so communication begins only when all that was
issued before it has begun. Two receives that wait, one behind the other, hold up whatever follows them.

No engine waits for more. Where sends are buffered, or the host goes on while a stream computes, each op waits for a
part of the same ones, so that a pipeline that ends here ends there, too. Nothing waits for a later step: one that ends
is enough.
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
    normed = any(isinstance(op, Norm) for ops in pipeline.stages for op in ops)
    rows = [_items(program, pipeline.has_updates, normed) for program in pipeline.parts]
    met: defaultdict[object, dict[int, int]] = defaultdict(dict)  # what is done together -> stage -> item
    for stage, items in enumerate(rows):
        for at, item in enumerate(items):
            met[_together(item)][stage] = at
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


def _run(rows: Sequence[Sequence[_Item]], met: Mapping[object, Mapping[int, int]]) -> tuple[_Places, _Places]:
    """Runs the items of all stages; returns those that have begun, and those that are over.

    An item is two events: it begins, and it ends, when all that are done with it have begun. met: those, by stage
    """
    places = [(stage, at) for stage, items in enumerate(rows) for at in range(len(items))]
    begins = {place: 2 * number for number, place in enumerate(places)}
    events: list[Event] = []
    for stage, items in enumerate(rows):
        for at, (item, after_begin, after_end) in enumerate(zip(items, *_waits(items), strict=True)):
            waits = [begins[stage, other] for other in after_begin] + [begins[stage, other] + 1 for other in after_end]
            together = met[_together(item)].items() if _together(item) else [(stage, at)]
            events += [Event(stage, item.stream, waits), Event(stage, item.stream, [begins[one] for one in together])]
    times = play(events)
    begun = {place for place, number in begins.items() if times[number] is not None}
    return begun, {place for place in begun if times[begins[place] + 1] is not None}


def _items(program: Program, updates: bool, normed: bool) -> list[_Item]:
    """Returns the ops of a stage, with what all stages add up."""
    items: list[_Item] = list(program.ops)
    if updates and normed and not any(isinstance(op, Norm) for op in program.ops):
        items.append(Norm(()))  # of a stage that trains nothing
    elif updates and not normed:
        items.insert(_after_last_forward(program), _Weights())
    return items


def _after_last_forward(program: Program) -> int:
    """Returns the place where the host knows the losses: it has issued what follows, up to the next compute."""
    last = {type(op): at for at, op in enumerate(program.ops) if isinstance(op, Forward | Backward)}
    kinds: tuple[type[Op], ...] = (Forward, Backward)
    if last[Forward] == max(last.values()):
        kinds = (Norm, Update)
    left = range(last[Forward] + 1, len(program.ops))
    return next((at for at in left if isinstance(program.ops[at], kinds)), len(program.ops))


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
    for at, item in enumerate(items):
        if item.stream != "compute":
            ends[at] += [before["compute"]] if "compute" in before else []  # the host has waited for it
            begins.append([other for stream, other in before.items() if stream not in ("compute", item.stream)])
        else:
            begins.append([])
        before[item.stream] = at
    return begins, ends


def _number(pipeline: Program, rows: Sequence[Sequence[_Item]], stage: int, at: int | None) -> int:
    """Returns the number of an item as an op; how many ops there are for what is behind them, or None."""
    if at is None:
        return len(pipeline.stages[stage])
    return sum(not isinstance(item, _Weights) for item in rows[stage][:at])
