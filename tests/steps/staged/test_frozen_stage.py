"""A stage that trains nothing: its step ends with that of the others, and norms and metrics are theirs."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import Pool
from tests.harness.problems import Params, base_loss, base_params
from tests.steps.staged.models import F64

CLIPPED = ya.optim.chain(ya.optim.clip_by_global_norm(0.1), ya.optim.adamw(1e-2))


@functools.cache
def mesh_of() -> Any:
    return ya.mesh(device="cpu", stage=2, shard=1)


def check(_: Any, update: bool, measured: bool) -> None:
    """measured: updates follow a norm"""
    tx = CLIPPED if measured else ya.optim.adamw(1e-2)
    params: Params = base_params(3)
    params = params._replace(embed=ya.frozen(params.embed))
    stages = ya.Assignment(((0,), (1,), (1,), (1,), (1,)), (0, 1))
    state = ya.init(params, tx, mesh=mesh_of(), precision=F64, stages=stages)
    whole = ya.unshard(state)
    oracle = ya.PlainState.create(whole._replace(embed=ya.frozen(whole.embed)), tx)
    schedule = ya.schedules.one_f_one_b(ya.schedules.zero2(update=update))
    step = ya.train_step(base_loss, tx, schedule=schedule, microbatches=3, skip_nonfinite=measured)
    plain = ya.train_step(base_loss, tx, microbatches=3, skip_nonfinite=measured)
    for number in range(3):
        batch = batch_of(0, seed=number)
        state, metrics = step(state, batch)
        oracle, expected = plain(oracle, batch)
        compare((metrics["loss"], metrics["grad_norm"]), (expected["loss"], expected["grad_norm"]), 1e-12, "metrics")
        compare(ya.unshard(state), ya.strip(oracle.params), 1e-12, f"step {number}")


@pytest.mark.parametrize(("update", "measured"), [(False, True), (True, True), (True, False)])
def test_a_frozen_stage(pools: dict[int, Pool], update: bool, measured: bool) -> None:
    pools[2].run(check, update, measured)
