"""Writes a program of stages as rows of actions, which torch.distributed.pipelining runs: what `from_actions` reads.

    actions = ya.schedules.to_actions(ya.schedules.v_shaped()(trace))
    actions.save("schedule.csv")            # for torchtitan's pipeline_parallel_schedule_csv
    print(actions)                          # the rows, and what the program says and they do not

for each stage:
    its calls, in order                                       0F0 0B0
    with "compute_comms" also, between them
        a segment's weights, from its first gather on         0UNSHARD ... 0RESHARD
        its gradients, once they are complete                 0REDUCE_GRAD
        its messages, as the program issues them              0SEND_F0 1RECV_F0
        for torch 2.15: when a send or a reduction must be done    0WAIT_SEND_F0 0WAIT_REDUCE_GRAD
"""

import csv
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from yafsdp_fn.interop.actions import REDUCTION, WAIT, Action, read_rows, units_of, written
from yafsdp_fn.pipelines.messages import in_calls
from yafsdp_fn.pipelines.orders import split_of
from yafsdp_fn.program.events import StageEvent, play
from yafsdp_fn.program.ops import AllReduce, Forward, Gather, MessageOp, Receive, Reduce, Stash
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import Split
from yafsdp_fn.proof.stages import calls_of
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules.build import readers

Format = Literal["compute_only", "compute_comms"]
"""The content of rows, in torch's words: to computes alone torch adds messages, gathers and reductions itself."""


class Actions(NamedTuple):
    """Rows of actions of torch.distributed.pipelining, one for each stage (torch's rank).

    left_out: what the program says and these rows cannot, in sentences

    >>> actions = ya.schedules.to_actions(ya.schedules.gpipe(ya.schedules.zero1())(two_stages))
    >>> actions.rows
    (('0F0', '0B0'), ('1F0', '1B0'))
    """

    rows: tuple[tuple[str, ...], ...]
    left_out: tuple[str, ...]

    def save(self, path: str | Path) -> None:
        """Writes the rows as a CSV, as `_PipelineScheduleRuntime._load_csv` reads it."""
        with Path(path).open("w", newline="") as file:
            csv.writer(file).writerows(self.rows)

    def __str__(self) -> str:
        rows = [f"rank {number}: {' '.join(row)}" for number, row in enumerate(self.rows)]
        return "\n".join([*rows, *[f"not in the rows: {line}" for line in self.left_out]])


def to_actions(program: Program, format: Format = "compute_only", *, waits: bool = False) -> Actions:
    """Writes a program of stages as torch's actions: a segment is a stage of torch's, a stage is its rank.

    format: "compute_only", which torchtitan loads, or "compute_comms", with SEND, RECV, UNSHARD, RESHARD and
        REDUCE_GRAD, for `_load_csv(path, "compute_comms")`
    waits: rows with messages also have WAIT_SEND and WAIT_REDUCE_GRAD, which torch 2.15 asks for, and 2.14 does not
        know

    A segment is gathered as a whole, and reduced once, after its last backward, since torch knows no smaller part of
    it; its weights stay until the last call before they are gathered again, with halves of weights, which torch runs on
    weights. Microbatches are numbered in the order in which the last segment has them, since torch finds a
    microbatch's loss by its number in that order. `from_actions` reads the rows again.

    Raises Refused for a program that is not right, ValueError for a step that torch cannot run: one without stages, of
    forwards alone, or in which segments skip their neighbours.

    >>> program = ya.schedules.one_f_one_b()(two_stages)
    >>> print(ya.schedules.to_actions(program))
    rank 0: 0F0 0B0
    rank 1: 1F0 1B0
    not in the rows: when messages, gathers and reductions are issued: torch adds its own to rows of computes
    """
    if format not in ("compute_only", "compute_comms"):
        raise ValueError(f"to_actions: format={format!r}: expected 'compute_only' or 'compute_comms'")
    whole = format == "compute_comms"
    if waits and not whole:
        raise ValueError("to_actions: waits=True: rows of computes have none; expected format='compute_comms'")
    split = split_of(program.trace)
    if not program.trace.trains:
        raise ValueError("to_actions: the step is of forwards alone; torch's runtime takes rows of a training step")
    _check_neighbours(split)
    parts = verify(program).by_stage
    end = len(split.homes) - 1
    last = calls_of(parts[split.homes[end]])
    taken = [call.microbatch for call in last if call.kind == "forward" and call.segment == end]
    stages = [_StageCalls(number, part, taken) for number, part in enumerate(parts)]
    rows = tuple(tuple(stage.row(waits) if whole else map(written, stage.calls)) for stage in stages)
    of_communication = _of_communication(stages, rows) if whole else [BY_TORCH]
    renamed = [f"numbers of microbatches: here they are in the order of losses, {taken}"] * (taken != sorted(taken))
    return Actions(rows, (*renamed, *_left_out(program), *of_communication))


def _check_neighbours(split: Split) -> None:
    """Checks that each segment takes what the one before it has made, and nothing else."""
    why = ""
    found = [(flow.source, flow.target) for flow in split.flows]
    expected = [*itertools.pairwise(range(len(split.homes)))]
    if found != expected or not all(flow.grad_bytes for flow in split.flows):
        why = "a gradient stops between segments"
    for flow in reversed(split.flows):
        if flow.target != flow.source + 1:
            why = f"segment {flow.target} takes something of segment {flow.source}"
    if why:
        raise ValueError(f"to_actions: {why}; torch's runtime sends from each segment to the next, and gradients back")


class _StageCalls:
    """The calls of one stage, and its ops with their places among them.

    number: of the stage; units: of each of its segments; own: segment -> its calls, by number
    """

    def __init__(self, number: int, program: Program, taken: list[int]) -> None:
        self.number = number
        self.program = program
        self.taken = taken
        calls = calls_of(program)
        self.calls = [call._replace(microbatch=taken.index(call.microbatch)) for call in calls]
        self.ops = [*in_calls(program)]
        self.own: dict[int, list[int]] = defaultdict(list)
        for at, call in enumerate(self.calls):
            self.own[call.segment].append(at)
        self.units = {segment: units_of(program.trace, segment) for segment in self.own}

    def row(self, waits: bool) -> list[str]:
        """Returns the actions in order: before each call sends, reductions, frees, gathers and receives."""
        # the call that each is before, and its turn there
        found = [(at, 5, written(call)) for at, call in enumerate(self.calls)]
        for segment, at in self._reductions():
            found.append((at, 1, f"{segment}{REDUCTION}"))
            if waits:
                found.append((at, 1, f"{segment}{WAIT}{REDUCTION}"))
        for segment, first, end in self.stays:
            found += [(end, 2, f"{segment}RESHARD"), (first, 3, f"{segment}UNSHARD")]
        last_send: dict[int, int] = {}
        messages = list(self._messages())
        for number, (at, message) in enumerate(messages):
            if "SEND" in message.word:
                last_send[at] = number
                if waits:
                    found.append((self._received(message), 6, str(message._replace(word=WAIT + message.word))))
        # messages stay in their order: a receive before a send goes with it
        for number, (at, message) in enumerate(messages):
            found.append((at, 0 if number <= last_send.get(at, -1) else 4, str(message)))
        return [action for *_, action in sorted(found, key=lambda each: each[:2])]

    def _messages(self) -> Iterator[tuple[int, Action]]:
        """Yields sends and receives, each with the call that it is before: what is issued inside of one is after it."""
        for op, at, inside, _ in self.ops:
            if isinstance(op, MessageOp):
                flow = self.program.trace.cut.flows[op.flow]
                receives = isinstance(op, Receive)
                end = flow.target if receives != op.back else flow.source
                word = ("RECV" if receives else "SEND") + ("_B" if op.back else "_F")
                yield at + inside, Action(word, end, self.taken.index(op.microbatch), self.number, at)

    def _received(self, send: Action) -> int:
        """Returns the call after which the other rank has received: the backward whose gradient answers an activation;
        nothing answers a gradient, so the end of the row."""
        for at in self.own[send.segment]:
            call = self.calls[at]
            if send.word == "SEND_F" and call.microbatch == send.microbatch and call.kind in ("backward", "inputs"):
                return at
        return len(self.calls)

    def _reductions(self) -> Iterator[tuple[int, int]]:
        """Yields segments, each with the call before which its gradients are reduced: after the last reduction of its
        units."""
        last: dict[int, int] = {}  # unit -> call
        for op, at, inside, _ in self.ops:
            if isinstance(op, Reduce):
                last |= dict.fromkeys(op.units, at + inside)
        for segment, units in self.units.items():
            places = [last[unit] for unit in units if unit in last]
            if places:
                yield segment, max(places)

    def _gathered(self) -> dict[int, int]:
        """Call -> the call before which the first of the gathers that it reads is issued: one of an earlier call goes
        on beside it."""
        found: dict[int, int] = {}
        for number, reader in readers(self.program.ops).items():
            if reader is not None:
                found.setdefault(self.ops[reader].call, self.ops[number].call)
        return found

    def streams(self, segment: int) -> bool:
        """Tells whether units of the segment share slots, so that it is never there as a whole."""
        own = self.units[segment]
        weights_of = self.program.trace.weights_of
        slots = {slot for op in self.program.ops for unit, slot in weights_of(op) if unit in own}
        return len(slots) < len(own)

    @cached_property
    def stays(self) -> list[tuple[int, int, int]]:
        """`(segment, first, end)` of all times for which weights are there, in the order in which they come."""
        gathered = self._gathered()
        found: list[tuple[int, int, int]] = []
        for segment, calls in self.own.items():
            streams = self.streams(segment)
            first = end = 0
            for number, at in enumerate(calls):
                # a segment that is streamed stays as long as nothing else is computed
                goes_on = streams and at == end
                anew = number == 0 or (at in gathered and not goes_on)
                if anew:
                    if number:
                        found.append((segment, first, end))
                    first = max(end, min(gathered.get(at, at), at))
                end = at + 1
            found.append((segment, first, end))
        return sorted(found, key=lambda stay: stay[1])


BY_TORCH = "when messages, gathers and reductions are issued: torch adds its own to rows of computes"


def _left_out(program: Program) -> Iterator[str]:
    """Names what no rows can say."""
    ops = [op for own in program.stages for op in own]
    recomputed = len({op.visit for op in ops if isinstance(op, Forward) and not op.keep})
    if recomputed:
        yield f"recomputation of {recomputed} visits: checkpoint those layers inside of the module"
    if any(isinstance(op, AllReduce) and op.over == "stages" for op in ops):
        yield "sums of the gradients of units that stages share: torch has none; add them up after the step"
    if program.has_updates:
        yield "updates of the optimizer inside of the program: torch's runtime ends with the gradients"
    if any(isinstance(op, Stash) for op in ops):
        yield "gathers inside of a node, from secondary shards: torch gathers from all ranks of a stage"


def _of_communication(stages: Sequence[_StageCalls], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Names what rows with messages, gathers and reductions cannot say of these."""
    slots = [str(len(stage.program.slot_bytes())) for stage in stages]
    yield f"slots, of weights {', '.join(slots)} on the stages: torch allocates what it gathers"
    for number, stage in enumerate(stages):
        ours = stage.program.count(Gather)
        theirs = sum(len(stage.units[segment]) for segment, *_ in stage.stays)
        if any(map(stage.streams, stage.own)) or ours != theirs:
            yield (
                f"gathers unit by unit on stage {number}, {ours} in all: UNSHARD is of a whole segment, which "
                f"comes to {theirs} units"
            )
        times = Counter(unit for op in stage.program.ops if isinstance(op, Reduce) for unit in op.units)
        most = max(times.values(), default=0)
        if most > 1:
            yield f"reductions in each microbatch on stage {number}, up to {most} of a unit: REDUCE_GRAD is there once"
    yield from _crossing(rows)


def _crossing(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Tells where rows do not end if each message waits for the other rank to come to it, as messages of one
    communicator do on NCCL; ours has one for each way."""
    other = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}
    messages = [action for row in read_rows(rows) for action in row if action.word in other]
    number = {(action.word, action.segment, action.microbatch): at for at, action in enumerate(messages)}
    events: list[StageEvent] = []
    for action in messages:
        word, by = other[action.word]
        partner = number[word, action.segment + by, action.microbatch]
        events.append(StageEvent(action.row, "messages", (), partner=partner))
    waiting: dict[int, Action] = {}  # rank -> its first message that never begins
    for action, time in zip(messages, play(events), strict=True):
        if time is None:
            waiting.setdefault(action.row, action)
    if waiting:
        stuck = [f"rank {rank} at {action}" for rank, action in waiting.items()]
        yield f"a communicator for each way: in one for both, as on NCCL, ranks would wait for ever: {', '.join(stuck)}"
