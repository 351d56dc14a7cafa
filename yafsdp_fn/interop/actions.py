"""Reads rows of actions of torch.distributed.pipelining as a schedule of ours."""

import csv
import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from yafsdp_fn.pipelines.messages import Item, in_calls, with_messages
from yafsdp_fn.pipelines.orders import forward_only, pipeline, sharding_of, split_of, staged
from yafsdp_fn.program.ops import AllReduce, Backward, ComputeOp, Forward, Gather, Op, Receive, Reduce, Send, Stash
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import Call, Kind, Message, Split
from yafsdp_fn.program.trace import Trace, writes_of
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.stages import wrong_calls
from yafsdp_fn.schedules.build import begun_early, sums_over_stages
from yafsdp_fn.schedules.builders import Schedule

# ---- Rows as torch writes them, read.
#
#     0F0  1B2  1I2  1W2        forward, backward, its halves, of a segment (torch's stage) in a microbatch
#     0SEND_F2  1RECV_F2        what goes between segments; SEND_B, RECV_B: gradients
#     0UNSHARD  0RESHARD        a segment's weights are gathered, and let go
#     0REDUCE_GRAD              its gradient is reduced
#     (0F3;1B0)OVERLAP_F_B      both of them
#     0WAIT_SEND_F2  0WAIT_REDUCE_GRAD      from torch 2.15 on: left out, since an op's waits follow from its buffers
#
# A row is a stage's (torch's rank). Empty actions are left out; errors name row and column as they were given.

KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
LETTERS = {kind: letter for letter, kind in KINDS.items()}
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WEIGHTS = ("UNSHARD", "RESHARD")
REDUCTION = "REDUCE_GRAD"
WAIT = "WAIT_"
OF_SEGMENTS = (*WEIGHTS, REDUCTION, WAIT + REDUCTION)
OF_MICROBATCHES = (*MESSAGES, WAIT + "SEND_F", WAIT + "SEND_B", *KINDS)
ACTION = re.compile(rf"(\d+)(?:({'|'.join(OF_SEGMENTS)})|({'|'.join(OF_MICROBATCHES)})(\d+))")
BOTH = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action, and where it was. microbatch: -1 for those that have none"""

    word: str
    segment: int
    microbatch: int
    row: int
    column: int

    @property
    def call(self) -> Call | None:
        """The call that it is, if it is one."""
        kind = KINDS.get(self.word)
        return None if kind is None else Call(kind, self.segment, self.microbatch)

    def __str__(self) -> str:
        return f"{self.segment}{self.word}{self.microbatch if self.microbatch >= 0 else ''}"

    def refuse(self, rule: str, why: str) -> NoReturn:
        raise Refused(rule, -1, f"row {self.row}, column {self.column} ({self}): rule {rule!r}: {why}", self.row)


def written(call: Call) -> str:
    """Returns a call as an action."""
    return f"{call.segment}{LETTERS[call.kind]}{call.microbatch}"


def read_rows(given: Any) -> list[list[Action]]:
    """Actions from lists of strings or of torch's actions, one list per row, or from the path of a CSV file. Raises
    ValueError or TypeError, naming row, column and action."""
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        if not os.path.isfile(path):  # Path.is_file raises where the name is too long
            raise ValueError(
                f"from_actions: there is no file {given!r:.300}; expected a CSV, a row of actions per stage; "
                "rows themselves are lists"
            )
        with path.open(newline="") as file:
            given = list(csv.reader(file))
        while given and not given[-1]:
            given.pop()
    elif isinstance(given, Mapping):  # torch's pipeline_order: by rank
        given = [given[rank] for rank in sorted(given)]
    if not isinstance(given, list | tuple) or not given or not all(isinstance(row, list | tuple) for row in given):
        raise TypeError(f"from_actions: expected a list of actions for each stage, or a CSV's path, got {given!r:.80}")
    rows: list[list[Action]] = []
    for number, row in enumerate(given):
        rows.append([])
        for column, item in enumerate(row):
            rows[-1] += _read(item, number, column)
    return rows


def _read(item: Any, row: int, column: int) -> Iterable[Action]:
    text = "" if item is None else str(item).strip()
    both = BOTH.fullmatch(text)
    parts = both[1].split(";") if both else [text]
    for part in filter(None, map(str.strip, parts)):
        found = ACTION.fullmatch(part)
        if found is None:
            raise ValueError(
                f"row {row}, column {column}: {part!r}: expected an action, such as 2F0 (segment 2, microbatch 0), "
                "2B0, 2I0, 2W0, 2SEND_F0, 2RECV_B0, 2UNSHARD, 2RESHARD, 2REDUCE_GRAD or (2F1;3B0)OVERLAP_F_B"
            )
        word = found[2] or found[3]
        if not word.startswith(WAIT):
            yield Action(word, int(found[1]), int(found[4] or -1), row, column)


# ---- A stage's program with its gathers, or its reductions, where a row of actions has them, in place of its own.
#
# 0UNSHARD        gather the units of segment 0 that are not there
# 0RESHARD        their slots are free: for segments that are never there at the same time
# 0REDUCE_GRAD    reduce what the units of segment 0 have added up, each in a gradient slot of its own


def literal(program: Program, actions: Sequence[Action], *, gathers: bool, reductions: bool) -> Program:
    """Returns `program` with the gathers of `actions`, the row that its order was made of, with their reductions, or
    both."""
    trace = program.trace
    slots = _slots(trace, actions) if gathers else {}
    replaced = (Gather, Stash) * gathers + (Reduce, AllReduce) * reductions
    before, *after = _listed(trace, actions, slots, reductions)
    ops: list[Op] = before
    for op, call, _, ends in in_calls(program):
        if isinstance(op, replaced):
            continue
        if isinstance(op, ComputeOp):
            visit = trace.visits[op.visit]
            if gathers and op.slots:
                op = op._replace(slots=tuple(slots[unit] for unit in visit.units))
            if reductions and isinstance(op, Forward):
                op = op._replace(early=())
            elif reductions and isinstance(op, Backward) and op.grad_slots:
                op = op._replace(grad_slots=visit.trained)
        ops.append(op)
        if ends:
            ops += after[call]
    return Program(trace, tuple(begun_early(ops) if reductions else ops))


def _listed(trace: Trace, actions: Iterable[Action], slots: dict[int, int], reductions: bool) -> Iterator[list[Op]]:
    """Yields the ops of a row's actions: those before its first call, and those after each of its calls. Raises Refused
    where reductions are listed, and a gradient is not reduced once."""
    added: set[int] = set()  # units with a gradient that is not reduced
    last: dict[int, Action] = {}  # segment -> the call that has added to its gradient last, and is not reduced
    left = Counter(unit for now in trace.order for unit in writes_of(now, trace))
    own = trace.cut.of(trace.stage or 0)
    ops: list[Op] = []
    for action, segments in _there(actions):
        visits = [trace.visits[number] for number in trace.cut.visits(action.segment)]
        trained = [unit for visit in visits for unit in visit.trained]
        if action.call is not None:
            yield ops
            ops = []
            if action.call.kind in ("backward", "weights"):
                added.update(trained)
                left.subtract(trained)
                if trained:
                    last[action.segment] = action
        elif action.word == "UNSHARD":
            there = {unit for segment in segments for unit in units_of(trace, segment)}
            for visit in visits:
                new = tuple(unit for unit in visit.units if unit not in there)
                if new:
                    ops.append(Gather(new, tuple(slots[unit] for unit in new)))
                there.update(new)
        elif action.word == REDUCTION:
            frozen = action.segment in own and not trained
            if last.pop(action.segment, None) is None and not frozen:
                action.refuse("reduce", f"there is no gradient of segment {action.segment} that is not reduced")
            for visit in reversed(visits):
                ready = tuple(unit for unit in visit.trained if unit in added)
                complete = tuple(unit for unit in ready if not left[unit])
                added.difference_update(ready)
                if ready:
                    ops.append(Reduce(ready, ready))
                if complete and trace.replicas > 1:
                    ops.append(AllReduce(complete))
    if reductions:
        for segment, action in last.items():
            action.refuse("once", f"what it adds to the gradient is never reduced; no {segment}REDUCE_GRAD after it")
        ops += sums_over_stages(trace)
    yield ops


def _slots(trace: Trace, actions: Sequence[Action]) -> dict[int, int]:
    """Returns unit -> slot: units that are there at the same time are in different ones, others of a size share them.
    Raises Refused where a call has no weights."""
    beside: defaultdict[int, set[int]] = defaultdict(set)
    for action, there in _there(actions):
        segment = action.segment
        if action.word == "UNSHARD":
            if segment in there:
                action.refuse("weights", f"segment {segment} is there already")
            units = {unit for each in (segment, *there) for unit in units_of(trace, each)}
            for unit in units:
                beside[unit] |= units
        elif action.word in ("RESHARD", "F", "B", "I") and segment not in there:
            action.refuse("weights", f"the weights of segment {segment} are not there; no {segment}UNSHARD before it")
    numbers: dict[tuple[int, int], int] = {}  # the slots of each size
    slots: dict[int, int] = {}
    for unit in sorted(beside):
        taken = {slots.get(other) for other in beside[unit]}
        size = trace.units[unit].gather_bytes
        ours = (numbers.setdefault((size, k), len(numbers)) for k in itertools.count())
        slots[unit] = next(slot for slot in ours if slot not in taken)
    return slots


def _there(actions: Iterable[Action]) -> Iterator[tuple[Action, frozenset[int]]]:
    """Yields each action of a row with the segments whose weights are there before it."""
    there: frozenset[int] = frozenset()
    for action in actions:
        yield action, there
        if action.word == "UNSHARD":
            there |= {action.segment}
        elif action.word == "RESHARD":
            there -= {action.segment}


def units_of(trace: Trace, segment: int) -> tuple[int, ...]:
    """Returns the units that the visits of a segment use."""
    found: dict[int, None] = {}
    for number in trace.cut.visits(segment):
        found |= dict.fromkeys(trace.visits[number].units)
    return tuple(found)


# ---- A schedule from rows.
#
#     rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
#     ya.train_step(loss_fn, tx, schedule=ya.schedules.from_actions(rows, ya.schedules.zero3()))
#
# What rows say is taken as they say it, and what they leave open is ours: without SEND and RECV the messages, without
# UNSHARD and RESHARD the gathers, without REDUCE_GRAD the reductions.

MOST = 8
"""Wrong actions that a refusal names."""


def from_actions(
    rows: Sequence[Sequence[Any]] | Mapping[int, Sequence[Any]] | str | os.PathLike[str],
    sharding: Schedule | None = None,
) -> Schedule:
    """Returns a schedule from rows of actions, one for each stage: strings ("0F0", "1I3", "0UNSHARD", "1RECV_F2",
    "(0F1;1B0)OVERLAP_F_B"), torch's own actions, or the path of a CSV that torch has written.

    Torch's stages are segments here, its ranks stages: the state must be assigned so, segment by segment. `2SEND_F0`
    sends what segment 3 takes of segment 2 in microbatch 0.

    sharding: the schedule that builds each stage's program, `zero2()` by default. Gathers and reductions in the rows
        replace its own; recomputation and updates are always its own

    Raises ValueError for strings that are no actions, and, when a step is traced, Refused with row, column and action:
    rule `calls` if the calls are no step, `weights` if a call has no weights, `flow` if a message has not come or is
    not sent, `reduce` and `once` if a gradient is not reduced once, `deadlock` if calls wait for each other.

    >>> schedule = ya.schedules.from_actions([["0F0", "0B0"], ["1F0", "1B0"]], ya.schedules.zero3())
    >>> len(ya.verify(schedule(two_stages)).stages)
    2
    """
    actions = read_rows(rows)
    inside = sharding_of(sharding)
    words = {action.word for row in actions for action in row}

    gathers = not words.isdisjoint(WEIGHTS)
    reductions = REDUCTION in words
    listed = not words.isdisjoint(MESSAGES)

    def as_listed(part: Trace) -> Program:
        if not gathers and not reductions:
            return inside(part)
        return literal(inside(part), actions[part.stage or 0], gathers=gathers, reductions=reductions)

    def schedule(trace: Trace) -> Program:
        split = split_of(trace)
        if not trace.trains:
            return staged(forward_only, inside)(trace)
        _check_shape(split, actions)
        _check_calls(trace, actions)
        if not listed:
            return pipeline(trace, with_messages(split, [_calls(row) for row in actions]), as_listed)
        _check_flows(split)
        return pipeline(trace, [list(_items(split, row)) for row in actions], as_listed, together=True)

    return schedule


def _check_shape(split: Split, rows: Sequence[Sequence[Action]]) -> None:
    """Checks that there is a row for each stage, and segments are on the stages of their rows."""
    if len(rows) != split.stages:
        raise ValueError(
            f"from_actions: {len(rows)} rows of actions for {split.stages} stages; build the state on "
            f"ya.mesh(stage={len(rows)})"
        )
    homes = sorted({(action.segment, stage) for stage, row in enumerate(rows) for action in row})
    stages = tuple(stage for _, stage in homes)
    if homes and [segment for segment, _ in homes] == [*range(len(homes))] and stages != split.homes:
        raise ValueError(
            f"from_actions: the rows have segments on stages {' '.join(map(str, stages))}, the state has them on "
            f"{' '.join(map(str, split.homes))}; give it that assignment (ya.schedules.assign: per_stage, shape)"
        )


def _check_calls(trace: Trace, rows: Sequence[Sequence[Action]]) -> None:
    wrong = list(wrong_calls(trace, [_calls(row) for row in rows]))
    if not wrong:
        return
    lines = []
    for stage, at, why in wrong[:MOST]:
        where = f"row {stage}"
        if at is not None:
            action = [action for action in rows[stage] if action.call is not None][at]
            where += f", column {action.column} ({action})"
        lines.append(f"{where}: {why}")
    if len(wrong) > MOST:
        lines.append(f"... and {len(wrong) - MOST} more")
    raise Refused("calls", -1, "rule 'calls': " + "\n    ".join(lines), wrong[0][0])


def _calls(row: Sequence[Action]) -> list[Call]:
    return [action.call for action in row if action.call is not None]


def _check_flows(split: Split) -> None:
    """Checks that the rows' messages are all there can be: they name those between neighbours."""
    for source, target, *_ in split.flows:
        if target != source + 1 and split.homes[source] != split.homes[target]:
            raise ValueError(
                f"from_actions: the rows list messages from segment to next segment, but in this step segment {target} "
                f"takes something of segment {source} (a skip connection), which they cannot name; leave SEND and RECV "
                "out of them, and all messages are put where they are needed"
            )


def _items(split: Split, row: Sequence[Action]) -> Iterator[Item]:
    """Yields a row's calls with its messages, as they are listed."""
    made: dict[Message, Action] = {}  # what is not sent yet
    come: dict[Message, Action] = {}  # what is not taken yet
    kept: set[Message] = set()  # what is for another segment of this stage
    calls = {action.call for action in row}
    for action in row:
        call = action.call
        if call is not None:
            for message in split.taken_by(call):
                if split.crosses(message) and come.pop(message, None) is None:
                    word = f"{call.segment}{'RECV_B' if message.back else 'RECV_F'}{call.microbatch}"
                    action.refuse("flow", f"what it takes has not come: no {word} before it")
                if not split.crosses(message) and message not in kept:
                    action.refuse("flow", "what it takes is made by a later call of its row")
            for message in split.given_by(call):
                if split.crosses(message):
                    made[message] = action
                else:
                    kept.add(message)
            yield call
        elif action.word in MESSAGES:
            own = _of(split, action, calls)
            receives = action.word.startswith("RECV")
            for message in filter(split.crosses, split.taken_by(own) if receives else split.given_by(own)):
                if receives and message in come:
                    action.refuse("flow", "it has been received already")
                if receives:
                    come[message] = action
                elif made.pop(message, None) is None:
                    action.refuse("flow", f"there is nothing to send: no {written(own)} before it, or sent already")
                kind = Receive if receives else Send
                yield kind(message.flow, 0, message.microbatch, message.back)
    for action in made.values():
        way = "SEND_F" if action.word == "F" else "SEND_B"
        action.refuse("flow", f"what it gives is never sent; no {action.segment}{way}{action.microbatch} after it")
    for action in come.values():
        action.refuse("flow", "nothing takes what is received")


def _of(split: Split, action: Action, calls: set[Call | None]) -> Call:
    """Returns the call whose message an action sends or receives."""
    if action.segment not in split.of(action.row):
        action.refuse("calls", f"segment {action.segment} is not on stage {action.row}")
    forward = Call("forward", action.segment, action.microbatch)
    if action.word.endswith("F"):
        return forward
    halves = forward._replace(kind="inputs")
    return halves if halves in calls else forward._replace(kind="backward")
