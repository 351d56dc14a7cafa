"""`verify`: each stage's program is right by itself, and the stages fit together."""

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
    for segment in split.of(stage):
        for microbatch in range(microbatches):
            forward = Call("forward", segment, microbatch)
            whole, inputs, weights = (forward._replace(kind=kind) for kind in ("backward", "inputs", "weights"))
            if forward not in done:
                yield Wrong(stage, None, f"no {in_words(forward)}")
            if trains and whole not in done and weights not in done:
                yield Wrong(stage, None, f"no {in_words(weights if inputs in done else whole)}")


def in_words(call: Call) -> str:
    kind, segment, microbatch = call
    half = f" of {kind}" if kind in ("inputs", "weights") else ""
    return f"{'backward' if half else kind}{half} of segment {segment}, microbatch {microbatch}"


# ---- Checks the rules `stages`, `calls` and `match`, and that all stages take part in the optimizer's step.
#
# stage 0                                          stage 1
# op 4   send segment 0 -> 1 <- carry slot 0       op 0   receive segment 0 -> 1 -> carry slot 1
# op 9   send gradient ...                    <--> op 7   receive ...                                 rule 'match'


def split_of(pipeline: Program) -> Split:
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
    holders: dict[int, list[int]] = {}
    for stage in range(split.stages):
        for unit in sorted(units_of(pipeline.trace, stage)):
            holders.setdefault(unit, []).append(stage)
    shared = {unit: tuple(stages) for unit, stages in sorted(holders.items()) if len(stages) > 1}
    if shared != dict(split.shared):
        why = f"stages share units {shared}, the split says {dict(split.shared)}"
        raise Refused("stages", -1, f"rule 'stages': {why}; let `cut` make it")


# ---- calls


def once_each_way(pipeline: Program) -> None:
    split = split_of(pipeline)
    check_calls(pipeline.trace, split, [list(calls_of(split, *each)) for each in enumerate(pipeline.by_stage)])


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
        first, end = next((ends for ends in split.segments if ends[0] <= visit < ends[1]), (visit, visit + 1))
        visits = range(first, end) if kind == "forward" else range(end - 1, first - 1, -1)
        found = [compute[:3] for compute in order[at : at + len(visits)]]
        if found != [(kind, number, microbatch) for number in visits]:
            why = f"visits {min(visits)} to {max(visits)} are one segment, but its computes do not follow each other"
            raise refusal_on(stage, "calls", why, f"compute {at} ({kind} of visit {visit}): ")
        segment = next((number for number, ends in enumerate(split.segments) if ends == (first, end)), -1)
        yield Call(kind, segment, microbatch)
        at += len(visits)


# ---- all stages, or none


def all_or_none_update(pipeline: Program) -> None:
    """Checks that no stage takes the optimizer's step alone, which is one."""
    trained = [(stage, program) for stage, program in enumerate(pipeline.by_stage) if program.trace.trained]
    found = {stage: program.has_updates for stage, program in trained}
    if len(set(found.values())) > 1:
        alone = next(stage for stage in found if found[stage])
        other = next(stage for stage in found if not found[stage])
        why = f"stage {alone} updates its units inside its program, stage {other} does not"
        raise refusal_on(other, "update", why)


# ---- messages


def sent_is_received(pipeline: Program) -> None:
    split = split_of(pipeline)
    sent, received = (_messages(pipeline, split, kind) for kind in (Send, Receive))
    for source, target in itertools.product(range(split.stages), repeat=2):
        here = sent[source, target]
        there = received[source, target]
        for number, (mine, theirs) in enumerate(itertools.zip_longest(here, there)):
            if mine and theirs and mine[1].message == theirs[1].message:
                continue
            # one side has another message, or none
            if theirs is None:
                why = f"stage {target} never receives it"
            elif mine is None:
                why = f"stage {source} never sends it"
            else:
                what = f"op {theirs[0]} ({describe(theirs[1], pipeline.trace)})"
                why = f"message {number} from stage {source} to {target} is another one there: {what}"
            stage, (at, op) = (source, mine) if mine else (target, theirs)
            sides = (source, [at for at, _ in here], number), (target, [at for at, _ in there], number)
            drawn = f"    messages from stage {source} to stage {target}:\n{beside(pipeline, *sides)}"
            raise refusal_on(stage, "match", f"{why}\n{drawn}", f"op {at} ({describe(op, pipeline.trace)}): ", at)


_Messages = defaultdict[tuple[int, int], list[tuple[int, MessageOp]]]
"""(source, target) -> messages in their order, each with the number of its op."""


def _messages(pipeline: Program, split: Split, kind: type[Send] | type[Receive]) -> _Messages:
    """Returns the messages that stages send, or that they receive, by their ends."""
    found: _Messages = defaultdict(list)
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
    columns = [_column(pipeline, side) for side in (left, right)]
    width = max(map(len, columns[0]))
    middle = ["    "] * (AROUND + 1) + ["<-->"] + ["    "] * AROUND
    rows = [
        f"    {a.ljust(width)} {mark} {b}".rstrip() for a, mark, b in zip(columns[0], middle, columns[1], strict=True)
    ]
    return "\n".join(row for row in rows if row)


def _column(pipeline: Program, side: Side) -> list[str]:
    stage, ops, mark = side
    lines = [f"stage {stage}"]
    for place in range(mark - AROUND, mark + AROUND + 1):
        at = ops[place] if 0 <= place < len(ops) else None
        words = "" if at is None else f"op {at:<3}  {describe(pipeline.stages[stage][at], pipeline.trace)}"
        lines.append(words or ("nothing" if place == mark else ""))
    return lines
