"""Schedules that others wrote: rows of actions of torch.distributed.pipelining as a schedule of ours.

    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    ya.train_step(loss_fn, tx, schedule=ya.schedules.from_actions(rows, ya.schedules.zero3()))

What rows say is taken as they say it, and what they leave open is ours: without SEND and RECV the messages, without
UNSHARD and RESHARD the gathers, without REDUCE_GRAD the reductions.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from yafsdp_fn.schedules.builders import Schedule
from yafsdp_fn.schedules.further_ops import Receive, Send
from yafsdp_fn.schedules.refused import Refused
from yafsdp_fn.schedules.split import Call, Parcel, Split
from yafsdp_fn.schedules.stages.action_rows import MESSAGES, REDUCTION, WEIGHTS, Action, read_rows, written
from yafsdp_fn.schedules.stages.builders import StageSchedule, pipeline, sharding_of, split_of, staged
from yafsdp_fn.schedules.stages.calls import forward_only
from yafsdp_fn.schedules.stages.literal import literal
from yafsdp_fn.schedules.stages.messages import Item, gives, takes, with_messages
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.schedules.stages.sound_calls import wrong_calls
from yafsdp_fn.schedules.trace import Trace

MOST = 8
"""Wrong actions that a refusal names."""


def from_actions(
    rows: Sequence[Sequence[Any]] | Mapping[int, Sequence[Any]] | str | os.PathLike[str],
    sharding: Schedule | None = None,
) -> StageSchedule:
    """A schedule from rows of actions, one for each stage: strings ("0F0", "1I3", "0UNSHARD", "1RECV_F2",
    "(0F1;1B0)OVERLAP_F_B"), torch's own actions, or the path of a CSV that torch has written.

    Torch's stages are segments here, its ranks stages: the state must be assigned so, segment by segment. `2SEND_F0`
    sends what segment 3 takes of segment 2 in microbatch 0.

    sharding: what builds each stage's program, `zero2()` by default. What rows say of gathers and reductions takes the
        place of its own; recomputation and updates are its own in any case

    Raises ValueError for what is no action, and, when a step is traced, Refused with row, column and action: rule
    `calls` where the calls are no step, `weights` where one has no weights, `flow` where what it takes has not come or
    is not sent, `reduce` and `once` where a gradient is not reduced once, `deadlock` where calls wait for each other.
    """
    actions = read_rows(rows)
    inside = sharding_of(sharding)
    words = {action.word for row in actions for action in row}

    def schedule(trace: Trace) -> Pipeline:
        split = split_of(trace)
        if not trace.trains:
            return staged(forward_only, inside)(trace)
        _check_shape(split, actions)
        _check_calls(split, actions, trace)
        if not words.isdisjoint(WEIGHTS):
            _check_weights(actions)
        if REDUCTION in words:
            _check_reductions(trace, split, actions)
        if words.isdisjoint(MESSAGES):
            lists = with_messages(split, [[a.call for a in row if a.call is not None] for row in actions])
        else:
            _check_flows(split)
            lists = [list(_items(split, row)) for row in actions]

        def as_listed(part: Trace) -> Any:
            assert part.stage is not None
            gathers = not words.isdisjoint(WEIGHTS)
            return literal(inside(part), actions[part.stage], gathers=gathers, reductions=REDUCTION in words)

        return pipeline(trace, lists, as_listed)

    return schedule


def _check_shape(split: Split, rows: Sequence[Sequence[Action]]) -> None:
    """That there is a row for each stage, and segments are on the stages of their rows."""
    if len(rows) != split.stages:
        raise ValueError(
            f"from_actions: {len(rows)} rows of actions for {split.stages} stages; build the state on "
            f"ya.mesh(stage={len(rows)})"
        )
    homes: dict[int, set[int]] = {}
    for stage, row in enumerate(rows):
        for action in row:
            homes.setdefault(action.segment, set()).add(stage)
    count = max(homes, default=-1) + 1
    one_each = sorted(homes) == list(range(count)) and all(len(stages) == 1 for stages in homes.values())
    found = [min(homes[segment]) for segment in range(count)] if one_each else None
    if found and tuple(found) != split.homes:
        raise ValueError(
            f"from_actions: the rows have segments on stages {' '.join(map(str, found))}, the state has them on "
            f"{' '.join(map(str, split.homes))}; give it that assignment (ya.assign: per_stage, shape)"
        )


def _check_calls(split: Split, rows: Sequence[Sequence[Action]], trace: Trace) -> None:
    calls = [[action for action in row if action.call is not None] for row in rows]
    found: list[str] = []
    first: int | None = None
    for stage, at, why in wrong_calls(split, [_calls(row) for row in rows], trace.microbatches, trace.trains):
        where = f"row {stage}" if at is None else f"row {stage}, column {calls[stage][at].column} ({calls[stage][at]})"
        found.append(f"{where}: {why}")
        first = stage if first is None else first
    if found:
        more = [f"... and {len(found) - MOST} more"] * (len(found) > MOST)
        lines = [f"rule 'calls': {found[0]}", *[f"    {line}" for line in [*found[1:MOST], *more]]]
        raise Refused("calls", -1, "\n".join(lines), first)


def _calls(row: Sequence[Action]) -> list[Call]:
    return [action.call for action in row if action.call is not None]


def _check_weights(rows: Sequence[Sequence[Action]]) -> None:
    for row in rows:
        there: set[int] = set()
        for action in row:
            if action.word == "UNSHARD" and action.segment in there:
                action.refuse("weights", f"segment {action.segment} is there already")
            if action.word in ("RESHARD", "F", "B", "I") and action.segment not in there:
                why = f"the weights of segment {action.segment} are not there; no {action.segment}UNSHARD before it"
                action.refuse("weights", why)
            if action.word == "UNSHARD":
                there.add(action.segment)
            elif action.word == "RESHARD":
                there.remove(action.segment)


def _check_reductions(trace: Trace, split: Split, rows: Sequence[Sequence[Action]]) -> None:
    for row in rows:
        added: dict[int, Action] = {}  # segment -> the call that has added to its gradient last
        for action in row:
            visits = trace.visits[slice(*split.segments[action.segment])] if action.segment < len(split.homes) else ()
            if not any(visit.trained for visit in visits):
                continue
            if action.word in ("B", "W"):
                added[action.segment] = action
            elif action.word == REDUCTION and added.pop(action.segment, None) is None:
                action.refuse("reduce", f"there is no gradient of segment {action.segment} that is not reduced")
        for segment, action in added.items():
            action.refuse("once", f"what it adds to the gradient is never reduced; no {segment}REDUCE_GRAD after it")


def _check_flows(split: Split) -> None:
    """That the rows' messages are all there can be: they name those between neighbours."""
    for source, target, *_ in split.flows:
        if target != source + 1 and split.homes[source] != split.homes[target]:
            raise ValueError(
                f"from_actions: the rows list messages from segment to next segment, but in this step segment {target} "
                f"takes something of segment {source} (a skip connection), which they cannot name; leave SEND and RECV "
                "out of them, and all messages are put where they are needed"
            )


def _items(split: Split, row: Sequence[Action]) -> Iterator[Item]:
    """A row's calls with its messages, as they are listed."""
    made: dict[Parcel, Action] = {}  # what is not sent yet
    come: dict[Parcel, Action] = {}  # what is not taken yet
    kept: set[Parcel] = set()  # what is for another segment of this stage
    calls = {action.call for action in row}
    for action in row:
        call = action.call
        if call is not None:
            for parcel in takes(split, call):
                source, target = split.ends(parcel.flow, parcel.back)
                if source == target and parcel not in kept:
                    action.refuse("flow", "what it takes is made by a later call of its row")
                if source != target and come.pop(parcel, None) is None:
                    word = f"{call.segment}{'RECV_B' if parcel.back else 'RECV_F'}{call.microbatch}"
                    action.refuse("flow", f"what it takes has not come: no {word} before it")
            for parcel in gives(split, call):
                source, target = split.ends(parcel.flow, parcel.back)
                if source == target:
                    kept.add(parcel)
                else:
                    made[parcel] = action
            yield call
        elif action.word in MESSAGES:
            own = _of(split, action, calls)
            parcels = takes(split, own) if action.word.startswith("RECV") else gives(split, own)
            for parcel in parcels:
                source, target = split.ends(parcel.flow, parcel.back)
                if source == target:
                    continue
                if action.word.startswith("RECV"):
                    if parcel in come:
                        action.refuse("flow", "it has been received already")
                    come[parcel] = action
                    yield Receive(parcel.flow, 0, parcel.microbatch, parcel.back)
                else:
                    if made.pop(parcel, None) is None:
                        action.refuse("flow", f"there is nothing to send: no {written(own)} before it, or sent already")
                    yield Send(parcel.flow, 0, parcel.microbatch, parcel.back)
    for action in made.values():
        way = "SEND_F" if action.word == "F" else "SEND_B"
        action.refuse("flow", f"what it gives is never sent; no {action.segment}{way}{action.microbatch} after it")
    for action in come.values():
        action.refuse("flow", "nothing takes what is received")


def _of(split: Split, action: Action, calls: set[Call | None]) -> Call:
    """The call whose message an action sends or receives."""
    if action.segment not in split.of(action.row):
        action.refuse("calls", f"segment {action.segment} is not on stage {action.row}")
    forward = Call("forward", action.segment, action.microbatch)
    if action.word.endswith("F"):
        return forward
    halves = forward._replace(kind="inputs")
    return halves if halves in calls else forward._replace(kind="backward")
