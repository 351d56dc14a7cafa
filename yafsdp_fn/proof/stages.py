"""The rules of pipelines: each stage's program is right by itself, and the stages fit together.

    stages      before anything else: there are ops for each stage
    calls       when all ops are in form: the computes of a stage are calls, each segment once each way
    update      when each stage is right: all take the optimizer's step, or none
    match       what one stage sends is what another receives, in the same order

`deadlock` has a file of its own.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from yafsdp_fn.program.ops import MessageOp, Receive, Send
from yafsdp_fn.program.program import Program, units_of
from yafsdp_fn.program.split import Call, Kind, Split
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


def wrong_calls(split: Split, rows: Sequence[Sequence[Call]], microbatches: int, trains: bool) -> Iterator[Wrong]:
    """Yields all mistakes, stage by stage; none, if the rows are a step."""
    for stage, row in enumerate(rows):
        done: set[Call] = set()
        for at, call in enumerate(row):
            if why := _wrong(split, stage, call, microbatches, trains, done):
                yield Wrong(stage, at, why)
            done.add(call)
        yield from _missing(split, stage, microbatches, trains, done)


def _wrong(split: Split, stage: int, call: Call, microbatches: int, trains: bool, done: set[Call]) -> str | None:
    """Returns what is wrong with a call, if anything. done: calls of the stage before it"""
    # is there such a call, here?
    kind, segment, microbatch = call
    if kind not in BEFORE:
        return f"{kind!r}: expected forward, backward, inputs or weights"
    if not 0 <= segment < len(split.homes):
        return f"there are segments 0 to {len(split.homes) - 1}"
    if split.homes[segment] != stage:
        return f"segment {segment} is on stage {split.homes[segment]}"
    if not 0 <= microbatch < microbatches:
        return f"there are microbatches 0 to {microbatches - 1}"
    if kind != "forward" and not trains:
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


def _missing(split: Split, stage: int, microbatches: int, trains: bool, done: set[Call]) -> Iterator[Wrong]:
    """Yields the calls that a stage's row lacks. done: those that it has"""
    for segment, microbatch in itertools.product(split.of(stage), range(microbatches)):
        forward = Call("forward", segment, microbatch)
        backward = forward._replace(kind="backward")
        weights = forward._replace(kind="weights")
        if forward not in done:
            yield Wrong(stage, None, f"no {in_words(forward)}")
        if trains and backward not in done and weights not in done:
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


def split_of(pipeline: Program) -> Split:
    """Returns the cut of a pipeline that `a_program_each` has accepted."""
    assert pipeline.trace.split is not None, "a_program_each"
    return pipeline.trace.split


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
    split = split_of(pipeline)
    rows = [list(calls_of(split, stage, program)) for stage, program in enumerate(pipeline.by_stage)]
    check_calls(pipeline.trace, split, rows)


def check_calls(trace: Trace, split: Split, rows: Sequence[Sequence[Call]]) -> None:
    """Raises Refused for the first thing that is wrong with the calls of stages."""
    for stage, at, why in wrong_calls(split, rows, trace.microbatches, trace.trains):
        where = "" if at is None else f"call {at} ({in_words(rows[stage][at])}): "
        raise refusal_on(stage, "calls", why, where)


def calls_of(split: Split, stage: int, program: Program) -> Iterator[Call]:
    """Yields the calls that a stage's order of computes consists of."""
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
            raise refusal_on(stage, "calls", why, f"compute {at} ({kind} of visit {visit}): ")
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
    split = split_of(pipeline)
    sent = _messages(pipeline, split, Send)
    received = _messages(pipeline, split, Receive)
    for source, target in itertools.product(range(split.stages), repeat=2):
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


def _messages(
    pipeline: Program, split: Split, kind: type[Send] | type[Receive]
) -> defaultdict[tuple[int, int], Messages]:
    """Returns (source, target) -> the messages that stages send, or that they receive."""
    found: defaultdict[tuple[int, int], Messages] = defaultdict(list)
    for ops in pipeline.stages:
        for at, op in enumerate(ops):
            if isinstance(op, MessageOp) and isinstance(op, kind):
                found[split.ends(op.flow, op.back)].append((at, op))
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
