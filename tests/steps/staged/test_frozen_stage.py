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

TX = ya.optim.chain(ya.optim.clip_by_global_norm(0.1), ya.optim.adamw(1e-2))


@functools.cache
def mesh_of() -> Any:
    return ya.mesh(device="cpu", stage=2, shard=1)


def check(_: Any, update: bool) -> None:
    params: Params = base_params(3)
    params = params._replace(embed=ya.frozen(params.embed))
    stages = ya.Assignment(((0,), (1,), (1,), (1,), (1,)), (0, 1))
    state = ya.init(params, TX, mesh=mesh_of(), precision=F64, stages=stages)
    whole = ya.unshard(state)
    oracle = ya.PlainState.create(whole._replace(embed=ya.frozen(whole.embed)), TX)
    schedule = ya.schedules.one_f_one_b(ya.schedules.zero2(update=update))
    step = ya.train_step(base_loss, TX, schedule=schedule, microbatches=3)
    plain = ya.train_step(base_loss, TX, microbatches=3)
    for number in range(3):
        batch = batch_of(0, seed=number)
        state, metrics = step(state, batch)
        oracle, expected = plain(oracle, batch)
        compare((metrics["loss"], metrics["grad_norm"]), (expected["loss"], expected["grad_norm"]), 1e-12, "metrics")
        compare(ya.unshard(state), ya.strip(oracle.params), 1e-12, f"step {number}")


@pytest.mark.parametrize("update", [False, True])
def test_a_frozen_stage(pools: dict[int, Pool], update: bool) -> None:
    pools[2].run(check, update)
