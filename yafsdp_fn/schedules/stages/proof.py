"""Proof that a pipeline is right: each stage's program by itself (verify.py), and that they fit together.

The rules that a stage has beside those of a program, by the names that a refusal gives:

    part       each program is of its stage's part of the one step
    calls      each segment goes, on its stage, once forward and once backward in every microbatch, visit by visit
    match      between two stages, what one sends is what the other receives, in the same order
    deadlock   all programs end, also where a send waits for its receive

What accepted pipelines compute is exact: by `match` a receive puts into its carry slot what the send of its number took
from one; by `flow`, on each stage, that is what the segment before has made, and a compute takes what its segment
takes; by `calls` and `once` every contribution of the step is reduced on the stage that has made it, and by `shared`
and `deadlock` the stages that share a unit sum up what they have, all of them once and at the same op.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from yafsdp_fn.schedules import verify as program_rules
from yafsdp_fn.schedules.further_ops import Receive, Send
from yafsdp_fn.schedules.ops import Norm, Op
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.refused import Refused
from yafsdp_fn.schedules.split import Call, Split
from yafsdp_fn.schedules.stages.beside import beside
from yafsdp_fn.schedules.stages.part import part_of, units_of
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.schedules.stages.rendezvous import Stuck, run
from yafsdp_fn.schedules.stages.sound_calls import in_words, wrong_calls
from yafsdp_fn.schedules.text import describe
from yafsdp_fn.schedules.trace import Trace

P = TypeVar("P", Program, Pipeline)


def verify(program: P) -> P:
    """Returns the program or pipeline if it is right; raises `Refused`, which names stage, op, buffer, rule and both
    uses, if not."""
    if isinstance(program, Pipeline):
        _check(program)
        return program
    if isinstance(program, Program) and program.trace.split is not None and program.trace.stage is None:
        why = (
            "the step is cut into stages, and needs a program for each: ya.schedules.one_f_one_b(ya.schedules.zero2())"
        )
        raise Refused("part", -1, f"rule 'part': {why}")
    return program_rules.verify(program)


def _check(pipeline: Pipeline) -> None:
    trace, programs = pipeline
    split = _whole(pipeline)
    rows = []
    for stage, program in enumerate(programs):
        rows.append(list(calls_of(split, stage, program)))
    for stage, at, why in wrong_calls(split, rows, trace.microbatches, trace.trains):
        where = "" if at is None else f"call {at} ({in_words(rows[stage][at])}): "
        raise Refused("calls", -1, f"stage {stage}: {where}rule 'calls': {why}", stage)
    for stage, program in enumerate(programs):
        _same_step(trace, stage, program, part_of(trace, stage, rows[stage]))
        try:
            program_rules.verify(program)
        except Refused as refused:
            raise Refused(refused.rule, refused.op, f"stage {stage}: {refused}", stage) from None
    _alike(pipeline)
    _match(pipeline, split)
    stuck = run(pipeline)
    if stuck:
        raise _deadlock(pipeline, stuck)


# ---- one step


def _whole(pipeline: Pipeline) -> Split:
    """The split of the whole step. Raises Refused where programs are not those of its stages."""
    split = pipeline.trace.split
    if split is None or pipeline.trace.stage is not None:
        raise Refused("part", -1, "rule 'part': the pipeline's trace is no whole step that is split")
    if len(pipeline.stages) != split.stages:
        raise Refused("part", -1, f"rule 'part': {split.stages} stages, but {len(pipeline.stages)} programs")
    for stage, program in enumerate(pipeline.stages):
        if program.trace.stage != stage:
            why = f"program {stage} is of stage {program.trace.stage}"
            raise Refused("part", -1, f"stage {stage}: rule 'part': {why}", stage)
    holders: dict[int, list[int]] = {}
    for stage in range(split.stages):
        for unit in sorted(units_of(pipeline.trace, stage)):
            holders.setdefault(unit, []).append(stage)
    shared = {unit: tuple(stages) for unit, stages in sorted(holders.items()) if len(stages) > 1}
    if shared != dict(split.shared):
        why = f"stages share units {shared}, the split says {dict(split.shared)}"
        raise Refused("part", -1, f"rule 'part': {why}; let `cut` make it")
    return split


def calls_of(split: Split, stage: int, program: Program) -> Iterator[Call]:
    """The calls that a stage's order of computes consists of."""
    order = program.trace.order
    at = 0
    while at < len(order):
        kind, visit, microbatch, _ = order[at]
        first, end = next((ends for ends in split.segments if ends[0] <= visit < ends[1]), (visit, visit + 1))
        visits = range(first, end) if kind == "forward" else range(end - 1, first - 1, -1)
        found = [compute[:3] for compute in order[at : at + len(visits)]]
        if found != [(kind, number, microbatch) for number in visits]:
            why = f"visits {min(visits)} to {max(visits)} are one segment, but its computes do not follow each other"
            raise Refused(
                "calls", -1, f"stage {stage}: compute {at} ({kind} of visit {visit}): rule 'calls': {why}", stage
            )
        segment = next((number for number, ends in enumerate(split.segments) if ends == (first, end)), -1)
        yield Call(kind, segment, microbatch)
        at += len(visits)


def _same_step(trace: Trace, stage: int, program: Program, part: Trace) -> None:
    for field in part._fields:
        if getattr(program.trace, field) != getattr(part, field):
            why = f"{field} of its trace is not that of stage {stage}'s part of the step (part_of)"
            raise Refused("part", -1, f"stage {stage}: rule 'part': {why}", stage)


def _alike(pipeline: Pipeline) -> None:
    """What all stages do together, some of them must not do alone: the norm is one, and so is the optimizer's step."""
    stages = [stage for stage, program in enumerate(pipeline.stages) if program.trace.trained]
    normed = {stage: any(isinstance(op, Norm) for op in pipeline.stages[stage].ops) for stage in stages}
    updated = {stage: pipeline.stages[stage].has_updates for stage in stages}
    for rule, found, what in (("update", updated, "updates its units"), ("norm", normed, "takes the norm")):
        if len(set(found.values())) > 1:
            alone = next(stage for stage in stages if found[stage])
            other = next(stage for stage in stages if not found[stage])
            why = f"stage {alone} {what} inside its program, stage {other} does not"
            raise Refused(rule, -1, f"stage {other}: rule {rule!r}: {why}", other)


# ---- messages


def _match(pipeline: Pipeline, split: Split) -> None:
    for source in range(split.stages):
        for target in range(split.stages):
            sent, received = (
                list(_between(pipeline, split, source, target, Send)),
                list(_between(pipeline, split, source, target, Receive)),
            )
            for number in range(max(len(sent), len(received))):
                mine, theirs = sent[number : number + 1], received[number : number + 1]
                if mine and theirs and mine[0][1].parcel == theirs[0][1].parcel:
                    continue
                raise _mismatch(pipeline, source, target, sent, received, number)


def _between(
    pipeline: Pipeline, split: Split, source: int, target: int, kind: type[Send] | type[Receive]
) -> Iterator[tuple[int, Send | Receive]]:
    stage = source if kind is Send else target
    for at, op in enumerate(pipeline.stages[stage].ops):
        if isinstance(op, Send | Receive) and isinstance(op, kind) and split.ends(op.flow, op.back) == (source, target):
            yield at, op


def _mismatch(
    pipeline: Pipeline,
    source: int,
    target: int,
    sent: Sequence[tuple[int, Send | Receive]],
    received: Sequence[tuple[int, Send | Receive]],
    number: int,
) -> Refused:
    """The refusal of message `number` from one stage to another."""
    own = number < len(sent)
    stage, at = (source, sent[number][0]) if own else (target, received[number][0])
    op = pipeline.stages[stage].ops[at]
    if number >= len(received):
        why = f"stage {target} never receives it"
    elif not own:
        why = f"stage {source} never sends it"
    else:
        there = describe(received[number][1], pipeline.trace)
        why = (
            f"message {number} from stage {source} to {target} is another one there: op {received[number][0]} ({there})"
        )
    drawn = beside(
        pipeline,
        (source, [at for at, _ in sent], number),
        (target, [at for at, _ in received], number),
    )
    where = f"stage {stage}: op {at} ({describe(op, pipeline.trace)}): rule 'match': {why}"
    return Refused("match", at, f"{where}\n    messages from stage {source} to stage {target}:\n{drawn}", stage)


def _deadlock(pipeline: Pipeline, stuck: Sequence[Stuck]) -> Refused:
    first = stuck[0]
    stage, at, other, there = first
    op: Op = pipeline.stages[stage].ops[at]
    why = f"it waits for stage {other}, which waits, too"
    lines = [f"stage {stage}: op {at} ({describe(op, pipeline.trace)}): rule 'deadlock': {why}"]
    for waiting in stuck[1:]:
        what = describe(pipeline.stages[waiting.stage].ops[waiting.at], pipeline.trace)
        lines.append(f"    stage {waiting.stage} waits at op {waiting.at} ({what}) for stage {waiting.other}")
    every = [range(len(pipeline.stages[number].ops)) for number in (stage, other)]
    drawn = beside(pipeline, (stage, every[0], at), (other, every[1], there))
    return Refused("deadlock", at, "\n".join([*lines, drawn]), stage)
