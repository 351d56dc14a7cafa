"""Stages that train nothing, or not all: their steps end with those of the others, and norms and metrics are theirs."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of, check_steps, global_batch, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import Params, base_loss, base_params, frozen_loss, frozen_params
from tests.steps.staged.models import F64

CLIPPED = ya.optim.chain(ya.optim.clip_by_global_norm(0.1), ya.optim.adamw(1e-2))


@on_ranks(2)
@pytest.mark.parametrize(("update", "measured"), [(False, True), (True, True), (True, False)])
def test_a_frozen_stage(_: Any, update: bool, measured: bool) -> None:
    """measured: updates follow a norm"""
    tx = CLIPPED if measured else ya.optim.adamw(1e-2)
    params: Params = base_params(3)
    params = params._replace(embed=ya.frozen(params.embed))
    stages = ya.schedules.Assignment(((0,), (1,), (1,), (1,), (1,)), (0, 1))
    state = ya.init(params, tx, mesh=mesh_of(stage=2), precision=F64, stages=stages)
    whole = ya.unshard(state)
    oracle = ya.PlainState.create(whole._replace(embed=ya.frozen(whole.embed)), tx)
    schedule = ya.schedules.one_f_one_b(ya.schedules.zero2(update=update))
    step = ya.train_step(base_loss, tx, schedule=schedule, microbatches=3, skip_nonfinite=measured)
    plain = ya.train_step(base_loss, tx, microbatches=3, skip_nonfinite=measured)
    batches = [(batch_of(0, seed=number),) * 2 for number in range(3)]
    check_steps((step, state), (plain, oracle), batches, 1e-12)


@on_ranks()
@pytest.mark.parametrize(("world", "border"), [(2, 3), (4, 6)])
def test_frozen_layers_in_a_stage_that_trains(_: Any, border: int) -> None:
    """Visits 0 to 4 train nothing, and nothing asks for a gradient of what they take; border: of stage 1"""
    tx = ya.optim.adamw(1e-2)
    params = frozen_params(4)
    mesh = mesh_of(stage=2)
    batch = global_batch(ranks := mesh.size() // 2, rows=2)
    mine = ya.shard_batch(batch, mesh)
    trace = ya.planner.trace(frozen_loss, params, {key: leaf[:1] for key, leaf in mine.items()}, precision=F64)
    homes = [{int(visit.id >= border) for visit in trace.visits if unit in visit.units} for unit in range(15)]
    state = ya.init(
        params, tx, mesh=mesh, precision=F64, stages=ya.schedules.Assignment(tuple(map(tuple, homes)), (0, 1))
    )
    oracle = ya.PlainState.create(optree.tree_map(torch.Tensor.double, plain(params)), tx)
    schedule = ya.schedules.zero_bubble(ya.schedules.zero3(remat="all"))
    step = ya.train_step(frozen_loss, tx, schedule=schedule, microbatches=2)
    whole = ya.train_step(frozen_loss, tx, microbatches=2 * ranks)
    check_steps((step, state), (whole, oracle), [(mine, batch)] * 3, 1e-12)
