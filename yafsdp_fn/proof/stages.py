"""The rules of pipelines: each stage's program is right by itself, and the stages fit together.

stages      before anything else: there are ops for each stage
calls       when all ops are in form: the computes of a stage are calls, each segment once each way
update      when each stage is right: all take the optimizer's step, or none
match       what one stage sends is what another receives, in the same order
deadlock    all stages end, even if a send waits for its receive, and the host for the device
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from yafsdp_fn.communication.streams import Scoreboard
from yafsdp_fn.program.events import StageEvent, play
from yafsdp_fn.program.ops import AllReduce, MessageOp, Norm, Op, Receive, Send
from yafsdp_fn.program.program import Program, units_of
from yafsdp_fn.program.split import Call, CallRows, Kind
from yafsdp_fn.program.text import describe
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.proof.errors import Refused, refusal_on

# ---- Checks that rows of calls are a step: on its own stage, each segment goes once forward and once backward in
# every microbatch.

BEFORE: dict[Kind, tuple[Kind, ...]] = {
    "forward": (),
    "backward": ("forward",),
    "inputs": ("forward",),
    "weights": ("forward", "inputs"),
}
"""Calls that must have been before a call of a kind, which reads what they leave behind."""


class Wrong(NamedTuple):
    """A mistake in a row of calls. at: index of the call; None where calls are missing."""

    stage: int
    at: int | None
    why: str


def wrong_calls(trace: Trace, rows: CallRows) -> Iterator[Wrong]:
    """Yields all mistakes, stage by stage; none, if the rows are a step."""
    for stage, row in enumerate(rows):
        done: set[Call] = set()
        for at, call in enumerate(row):
            if why := _wrong(trace, stage, call, done):
                yield Wrong(stage, at, why)
            done.add(call)
        yield from _missing(trace, stage, done)


def _wrong(trace: Trace, stage: int, call: Call, done: set[Call]) -> str | None:
    """Returns what is wrong with a call, if anything. done: calls of the stage before it"""
    # is there such a call, here?
    kind, segment, microbatch = call
    homes = trace.cut.homes
    if kind not in BEFORE:
        return f"{kind!r}: expected forward, backward, inputs or weights"
    if not 0 <= segment < len(homes):
        return f"there are segments 0 to {len(homes) - 1}"
    if homes[segment] != stage:
        return f"segment {segment} is on stage {homes[segment]}"
    if not 0 <= microbatch < trace.microbatches:
        return f"there are microbatches 0 to {trace.microbatches - 1}"
    if kind != "forward" and not trace.trains:
        return "the step is of forwards alone"
    # is it in its turn?
    if call in done:
        return "it is there twice"
    for before in BEFORE[kind]:
        if call._replace(kind=before) not in done:
            return f"no {in_words(call._replace(kind=before))} before it"
    if kind in ("backward", "inputs"):
        other = call._replace(kind="inputs" if kind == "backward" else "backward")
        if other in done:
            return f"after {in_words(other)}, which is the same gradient"
    return None


def _missing(trace: Trace, stage: int, done: set[Call]) -> Iterator[Wrong]:
    """Yields the calls that a stage's row lacks. done: those that it has"""
    for segment, microbatch in itertools.product(trace.cut.of(stage), range(trace.microbatches)):
        forward = Call("forward", segment, microbatch)
        backward = forward._replace(kind="backward")
        weights = forward._replace(kind="weights")
        if forward not in done:
            yield Wrong(stage, None, f"no {in_words(forward)}")
        if trace.trains and backward not in done and weights not in done:
            begun = forward._replace(kind="inputs") in done
            yield Wrong(stage, None, f"no {in_words(weights if begun else backward)}")


def in_words(call: Call) -> str:
    """Returns a call in words: `backward of inputs of segment 1, microbatch 0`."""
    kind, segment, microbatch = call
    what = f"backward of {kind}" if kind in ("inputs", "weights") else kind
    return f"{what} of segment {segment}, microbatch {microbatch}"


# ---- Checks the rules `stages`, `calls` and `match`, and that all stages take part in the optimizer's step.
#
# stage 0                                          stage 1
# op 4   send segment 0 -> 1 <- carry slot 0       op 0   receive segment 0 -> 1 -> carry slot 1
# op 9   send gradient ...                    <--> op 7   receive ...                                 rule 'match'


# ---- stages


def a_program_each(pipeline: Program) -> None:
    """Checks that the trace is of a whole step, with ops for each of its stages, and shares units as its split says."""
    split = pipeline.trace.split
    if split is None or pipeline.trace.stage is not None:
        raise Refused("stages", -1, "rule 'stages': the pipeline's trace is no whole step that is split")
    if len(pipeline.stages) != split.stages:
        why = (
            f"the step is cut into {split.stages} stages, and needs ops for each, not {len(pipeline.stages)} lists: "
            "ya.schedules.one_f_one_b(ya.schedules.zero2())"
        )
        raise Refused("stages", -1, f"rule 'stages': {why}")
    # stages sum the gradients of what they share: none may be left out
    held = [units_of(pipeline.trace, stage) for stage in range(split.stages)]
    shared: dict[int, tuple[int, ...]] = {}
    for unit in range(len(pipeline.trace.units)):
        holders = tuple(stage for stage, units in enumerate(held) if unit in units)
        if len(holders) > 1:
            shared[unit] = holders
    if shared != dict(split.shared):
        why = f"stages share units {shared}, the split says {dict(split.shared)}"
        raise Refused("stages", -1, f"rule 'stages': {why}; let `cut` make it")


# ---- calls


def once_each_way(pipeline: Program) -> None:
    """Checks that the computes of each stage are calls, and that these are a step."""
    check_calls(pipeline.trace, [list(calls_of(program)) for program in pipeline.by_stage])


def check_calls(trace: Trace, rows: CallRows) -> None:
    """Raises Refused for the first thing that is wrong with the calls of stages."""
    for stage, at, why in wrong_calls(trace, rows):
        where = "" if at is None else f"call {at} ({in_words(rows[stage][at])}): "
        raise refusal_on(stage, "calls", why, where)


def calls_of(program: Program) -> Iterator[Call]:
    """Yields the calls that the order of computes in a stage's program consists of."""
    split = program.trace.cut
    order = program.trace.order
    at = 0
    while at < len(order):
        kind, visit, microbatch, _ = order[at]
        # the segment that it begins
        segment = -1
        visits = range(visit, visit + 1)
        for number in range(len(split.segments)):
            if visit in split.visits(number):
                segment = number
                visits = split.visits(number)
        # all of it follows
        turn = visits if kind == "forward" else reversed(visits)
        found = [compute[:3] for compute in order[at : at + len(visits)]]
        if found != [(kind, number, microbatch) for number in turn]:
            why = f"visits {min(visits)} to {max(visits)} are one segment, but its computes do not follow each other"
            raise refusal_on(program.trace.stage or 0, "calls", why, f"compute {at} ({kind} of visit {visit}): ")
        yield Call(kind, segment, microbatch)
        at += len(visits)


# ---- all stages, or none


def all_or_none_update(pipeline: Program) -> None:
    """Checks that no stage takes the optimizer's step alone, which is one."""
    updates: list[int] = []
    others: list[int] = []
    for stage, program in enumerate(pipeline.by_stage):
        if program.trace.trained:
            kind = updates if program.has_updates else others
            kind.append(stage)
    if updates and others:
        why = f"stage {updates[0]} updates its units inside its program, stage {others[0]} does not"
        raise refusal_on(others[0], "update", why)


# ---- messages

Messages = list[tuple[int, MessageOp]]
"""Messages in their order, each with the number of its op."""


def sent_is_received(pipeline: Program) -> None:
    """Checks that the messages between any two stages are sent and received in one order."""
    sent = _messages(pipeline, Send)
    received = _messages(pipeline, Receive)
    for source, target in itertools.product(range(pipeline.trace.cut.stages), repeat=2):
        here = sent[source, target]
        there = received[source, target]
        number = _first_apart(here, there)
        if number is None:
            continue
        stage, side = (source, here) if number < len(here) else (target, there)
        at, op = side[number]
        if number == len(here):
            why = f"stage {source} never sends it"
        elif number == len(there):
            why = f"stage {target} never receives it"
        else:
            other = f"op {there[number][0]} ({describe(there[number][1], pipeline.trace)})"
            why = f"message {number} from stage {source} to {target} is another one there: {other}"
        columns = [(source, [at for at, _ in here], number), (target, [at for at, _ in there], number)]
        drawn = f"    messages from stage {source} to stage {target}:\n{beside(pipeline, *columns)}"
        raise refusal_on(stage, "match", f"{why}\n{drawn}", f"op {at} ({describe(op, pipeline.trace)}): ", at)


def _first_apart(here: Messages, there: Messages) -> int | None:
    """Returns the number of the first message that is another one on the other side, or is not there."""
    for number, ((_, mine), (_, theirs)) in enumerate(zip(here, there, strict=False)):
        if mine.message != theirs.message:
            return number
    return None if len(here) == len(there) else min(len(here), len(there))


def _messages(pipeline: Program, kind: type[Send] | type[Receive]) -> defaultdict[tuple[int, int], Messages]:
    """Returns (source, target) -> the messages that stages send, or that they receive."""
    found: defaultdict[tuple[int, int], Messages] = defaultdict(list)
    for ops in pipeline.stages:
        for at, op in enumerate(ops):
            if isinstance(op, MessageOp) and isinstance(op, kind):
                found[pipeline.trace.cut.ends(op.flow, op.back)].append((at, op))
    return found


# ---- two stages side by side, as refusals draw them

AROUND = 3
"""Lines before and after the two that do not fit."""

Side = tuple[int, Sequence[int], int]
"""Stage, the ops to show, and which of them does not fit."""


def beside(pipeline: Program, left: Side, right: Side) -> str:
    """Draws the ops around two that do not fit, in a column for each stage."""
    here = _column(pipeline, left)
    there = _column(pipeline, right)
    width = max(map(len, here))
    lines: list[str] = []
    for row, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        mark = "<-->" if row == AROUND + 1 else "    "  # below the names of the stages
        line = f"    {mine.ljust(width)} {mark} {theirs}".rstrip()
        if line:
            lines.append(line)
    return "\n".join(lines)


def _column(pipeline: Program, side: Side) -> list[str]:
    """Returns the ops around one, a line each, below the name of their stage."""
    stage, ops, mark = side
    lines = [f"stage {stage}"]
    for place in range(mark - AROUND, mark + AROUND + 1):
        if 0 <= place < len(ops):
            at = ops[place]
            lines.append(f"op {at:<3}  {describe(pipeline.stages[stage][at], pipeline.trace)}")
        else:
            lines.append("nothing" if place == mark else "")
    return lines


# ---- Checks the rule `deadlock`: the programs of all stages end.
#
# On each stage the host goes through its program. Before each op that is not a message it may wait for everything that
# it has issued: a capture of a graph, a return of memory, the first use of a kernel or of a communicator synchronise
# the device. So these ops run one after the other, after all messages before them. Messages between two of them are
# under way together. A message begins when the message before it on its stream has ended, when the ops that its buffers
# wait for (hazards) have ended, and when everything issued before it has begun: on a GPU kernels of several
# communicators begin in the order in which they were issued (docs/gpu.md). A send and its receive end together. So do
# the sums of a gradient over stages, and the norm of all stages; a stage without updates takes the norm when its
# program has ended.
#
# No engine waits for more. If sends are buffered, or the host does not wait, each op waits for some of the same ops, so
# a pipeline that ends here ends there, too. Nothing waits for a later step, so it is enough to look at one.

Rows = Sequence[Sequence[Op]]
"""The items of each stage, in their order: its ops, and the norm that follows them where others take it inside."""

Place = tuple[int, int]
"""A stage, and the number of one of its items."""


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


# ---- all stages at once: `program/events.py` says which items begin and end


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


# ---- what an item waits for


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
