"""Writes a program of stages as rows of actions, which torch.distributed.pipelining runs: what `from_actions` reads.

    actions = ya.schedules.to_actions(ya.schedules.v_shaped()(trace))
    actions.save("schedule.csv")            # for torchtitan's pipeline_parallel_schedule_csv
    print(actions)                          # the rows, and what the program says and they do not

Rows are of computes, 0F0 0B0: torch adds messages, gathers and reductions itself.
"""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from yafsdp_fn.interop.actions import written
from yafsdp_fn.program.ops import AllReduce, Forward, Stash
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import Split
from yafsdp_fn.proof.stages import calls_of
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules.pipelines import split_of


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


def to_actions(program: Program) -> Actions:
    """Writes a program of stages as torch's actions: a segment is a stage of torch's, a stage is its rank.

    Microbatches are numbered in the order in which the last segment has them, since torch finds a microbatch's loss by
    its number in that order. `from_actions` reads the rows again.

    Raises Refused for a program that is not right, ValueError for a step that torch cannot run: one without stages, of
    forwards alone, or in which segments skip their neighbours.

    >>> program = ya.schedules.one_f_one_b()(two_stages)
    >>> print(ya.schedules.to_actions(program))
    rank 0: 0F0 0B0
    rank 1: 1F0 1B0
    not in the rows: when messages, gathers and reductions are issued: torch adds its own to rows of computes
    """
    split = split_of(program.trace)
    if not program.trace.trains:
        raise ValueError("to_actions: the step is of forwards alone; torch's runtime takes rows of a training step")
    _check_neighbours(split)
    parts = verify(program).by_stage
    stages = [list(calls_of(split, number, part)) for number, part in enumerate(parts)]
    last = len(split.homes) - 1
    ends = [call for call in stages[split.homes[last]] if call.kind == "forward" and call.segment == last]
    taken = [call.microbatch for call in ends]
    rows = []
    for calls in stages:
        rows.append(tuple(written(call._replace(microbatch=taken.index(call.microbatch))) for call in calls))
    return Actions(tuple(rows), tuple(_left_out(program, taken)))


def _check_neighbours(split: Split) -> None:
    """Checks that each segment takes what the one before it has made, and nothing else."""
    found = [(flow.source, flow.target) for flow in split.flows]
    why = ""
    if found != [*itertools.pairwise(range(len(split.homes)))] or not all(flow.grad_bytes for flow in split.flows):
        why = "a gradient stops between segments"
    for source, target in reversed(found):
        if target != source + 1:
            why = f"segment {target} takes something of segment {source}"
    if why:
        raise ValueError(f"to_actions: {why}; torch's runtime sends from each segment to the next, and gradients back")


def _left_out(program: Program, taken: list[int]) -> Iterator[str]:
    """Names what the rows cannot say. taken: microbatches in the order of their losses"""
    if taken != sorted(taken):
        yield f"numbers of microbatches: here they are in the order of losses, {taken}"
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
    yield "when messages, gathers and reductions are issued: torch adds its own to rows of computes"
