"""Units that stages hold in odd ways: a table that is all the last stage has, layers visited twice in a row across a
border, and what no visit uses. Steps are those of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of, check_steps
from tests.harness.pool import on_ranks
from tests.harness.problems import Batch, E, Params, base_loss, base_params, block, embed, layer, masked_loss, param
from tests.steps.staged.models import F64

TX = ya.optim.adamw(1e-2, weight_decay=0.1)


def table_head(table: Tensor, x: Tensor, targets: Tensor) -> ya.Mean:
    return masked_loss(ya.linear(x, table), targets)


def table_loss(params: Params, batch: Batch) -> ya.Mean:
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(block, x, params.layers)
    return ya.apply(table_head, params.embed, x, batch["targets"])


def again_loss(params: Params, batch: Batch) -> ya.Mean:
    x = ya.apply(embed, params.embed, batch["tokens"])
    for of in (params.layers, params.layers, params.more, params.more):
        x, _ = ya.apply(lambda w, x: block(x, w), of, x)
    return ya.apply(table_head, params.head, x, batch["targets"])


PROBLEMS: dict[str, tuple[Any, Any, int, Any]] = {  # parameters, loss, stages, segments of each unit
    "table": (base_params(3)._replace(head=None), table_loss, 2, ((0, 1), (0,), (0,), (0,))),
    "again": (Params(param(37, E), layer(), param(37, E), layer()), again_loss, 3, ((0,), (0, 1), (2,), (1, 2))),
    "unused": (base_params(3)._replace(more=param(5, 3)), base_loss, 2, ((0,), (0,), (1,), (1,), (1,), (1,))),
}


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("world", "problem", "update"),
    [(2, "table", True), (4, "table", False), (3, "again", True), (2, "unused", False), (4, "unused", True)],
)
def test_exact(_: Any, problem: str, update: bool) -> None:
    """One rank's part."""
    params, loss, stages, units = PROBLEMS[problem]
    assignment = ya.schedules.Assignment(units, (*range(stages),))
    if problem == "table":
        assert (
            ya.schedules.assign(ya.planner.trace(loss, params, batch_of(0, rows=2), precision=F64), stages)
            == assignment
        )
    mesh = mesh_of(stage=stages)
    state = ya.init(params, TX, mesh=mesh, precision=F64, stages=assignment)
    oracle = ya.PlainState.create(ya.unshard(state), TX)
    schedule = ya.schedules.one_f_one_b(ya.schedules.zero2(update=update))
    step = ya.train_step(loss, TX, schedule=schedule, microbatches=2)
    plain = ya.train_step(loss, TX, microbatches=2)
    whole = [batch_of(0, rows=4, seed=number) for number in range(3)]
    batches = [(ya.shard_batch(batch, mesh), batch) for batch in whole]
    check_steps((step, state), (plain, oracle), batches, 1e-12)
