"""The schedules of torch.distributed.pipelining, written by its own classes, run here: gradients of the plain loop.

Rows of calls, for which messages, gathers and reductions are ours; and rows with SEND, RECV, UNSHARD, RESHARD and
REDUCE_GRAD, as torch lowers them. STAGES=all: every family on every mesh, with several numbers of microbatches; else
each on one.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of, compare, joined
from tests.harness.pool import Pools
from tests.harness.problems import base_params
from tests.steps.staged import models
from tests.steps.staged.test_exact_stages import TOLERANCE, TX, looped
from yafsdp_fn import schedules as s


class Family(NamedTuple):
    """lowered: whether torch lowers its rows to messages and gathers; those of one segment a stage it does not"""

    per_stage: int
    shape: Any = "loop"
    lowered: bool = True


FAMILIES = {
    "GPipe": Family(1, lowered=False),
    "1F1B": Family(1, lowered=False),
    "LoopedBFS": Family(2),
    "Interleaved1F1B": Family(2),
    "InterleavedZeroBubble": Family(2),
    "ZBVZeroBubble": Family(2, "v"),
    "DualPipeV": Family(2, "v"),
}
ALL = os.environ.get("STAGES") == "all"
CASES = [nightly(2, 2), nightly(4, 2), (4, 4), *[(3, 3)] * ALL]  # world, stages


def rows_of(family: str, stages: int, microbatches: int, lowered: bool) -> list[list[str]]:
    """What the class does, by row."""
    if family == "1F1B":  # what `get_schedule_ops` has of it is not what it runs
        return [run_1f1b(stage, stages, microbatches) for stage in range(stages)]
    per_stage = FAMILIES[family].per_stage
    rows = get_schedule_ops(family, stages, microbatches, per_stage if per_stage > 1 else None, with_comms=lowered)
    return [["" if action is None else str(action) for action in row] for row in rows]


def run_1f1b(number: int, stages: int, microbatches: int) -> list[str]:
    """What `Schedule1F1B` asks of a stage."""
    row: list[str] = []
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.configure_mock(stage_index=number, num_stages=stages, group_rank=number, group_size=stages, is_last=False)
    stage.forward_one_chunk.side_effect = lambda m, *_, **__: row.append(f"{number}F{m}")
    stage.backward_one_chunk.side_effect = lambda m, *_, **__: row.append(f"{number}B{m}")
    stage.perform_reduce_grad.side_effect = lambda _: row.append(f"{number}REDUCE_GRAD")
    for way in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(stage, f"get_{way}_ops").return_value = []
    schedule = Schedule1F1B(stage, microbatches)
    with mock.patch.object(schedule, "_initialize_stage"):
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return row


Case = tuple[str, int, list[list[str]], str]
"""Family, microbatches, rows, and the name of the schedule of a stage."""


def check(_: Any, stages: int, cases: list[Case]) -> None:
    """One rank's part."""
    mesh = mesh_of(stage=stages)
    ranks = mesh.size() // stages
    for family, parts, rows, sharding in cases:
        params = base_params(2 * stages)
        loss = models.chain_loss
        batches = [batch_of(rank, rows=2 * parts, seed=parts) for rank in range(ranks)]
        mine = ya.shard_batch(joined(batches), mesh)
        trace = ya.planner.trace(loss, params, batch_of(0, rows=2), precision=models.F64, has_aux=True)
        of = FAMILIES[family]
        assignment = ya.schedules.assign(trace, stages, per_stage=of.per_stage, shape=of.shape)
        state = ya.init(params, TX, mesh=mesh, precision=models.F64, stages=assignment)
        expected = looped(loss, ya.PlainState.create(ya.unshard(state), TX).params, batches, parts, step=0)
        schedule = s.from_actions(rows, INSIDE[sharding])
        run = ya.value_and_grad(loss, schedule=schedule, microbatches=parts, has_aux=True)
        got = run(state.params, mine)
        what = f"{family}, {stages} stages of {ranks}, {parts} microbatches, {sharding}"
        compare((got[0], got[1]), expected, TOLERANCE, what)


INSIDE = {"zero2": s.zero2(), "zero3, recomputed": s.zero3(remat="all")}


@pytest.mark.parametrize(("world", "stages"), CASES)
def test_torchs_own_rows_run_exactly(pools: Pools, world: int, stages: int) -> None:
    cases = []
    for at, (family, of) in enumerate(FAMILIES.items()):
        if not ALL and CASES[at % len(CASES)] != (world, stages):
            continue
        for parts in (2 * stages, 3 * stages) if ALL else (2 * stages,):
            for lowered in {False, of.lowered} if ALL else {of.lowered}:
                rows = rows_of(family, stages, parts, lowered)
                for sharding in INSIDE if ALL else [list(INSIDE)[at % 2]]:
                    cases.append((family, parts, rows, sharding))
    pools[world].run(check, stages, cases)
