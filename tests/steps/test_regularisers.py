"""What a loss reads beside its visits, and what nothing visits: every builder gives the plain loop's numbers."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.histories import BUILDERS
from tests.harness.meshes import made
from tests.harness.oracle import batch_of, compare, global_batch
from tests.harness.pool import on_ranks
from tests.harness.problems import Batch, Params, base_loss, base_params, layer

TXS = {
    "clipped": ya.optim.chain(ya.optim.clip_by_global_norm(0.1), ya.optim.adamw(1e-2, weight_decay=0.1)),
    "plain": ya.optim.adamw(1e-2, weight_decay=0.1),
}
DOUBLE = ya.Precision(torch.float64)


def more_params() -> Params:
    """`more` is visited by nothing."""
    return base_params(3)._replace(more=ya.Stacked(layer(2)))


def regularised(params: Params, batch: Batch) -> ya.Mean:
    """Every rank's part of the total has the whole regulariser, by its weight."""
    total, weight = base_loss(params, batch)
    return ya.Mean(total + 0.01 * weight.double() * ya.vdot(params.head, params.head), weight)


LOSSES = {"regulariser": regularised, "unvisited": base_loss}


@functools.cache
def plain_steps(kind: str, when: str, ranks: int, steps: int) -> tuple[list[Any], Any]:
    loss, tx, whole = (
        LOSSES[kind],
        TXS[when],
        optree.tree_map(Tensor.double, ya.PlainState.create(more_params(), TXS[when]).params),
    )
    state, step, seen = ya.PlainState.create(whole, tx), ya.train_step(loss, tx, skip_nonfinite=False), []
    for number in range(steps):
        state, metrics = step(state, global_batch(ranks, seed=number))
        seen.append((metrics["loss"], metrics["grad_norm"]))
    return seen, ya.params.without_markers(state.params)


def trained(mesh: Any, kind: str, schedule: Any, loss: str, when: str, steps: int = 2) -> None:
    on, tx = made(kind), TXS[when]
    state = ya.init(more_params(), tx, mesh=on, precision=DOUBLE)
    step = ya.train_step(LOSSES[loss], tx, schedule=schedule, skip_nonfinite=False)
    seen, params = plain_steps(loss, when, mesh.size(), steps)
    for number in range(steps):
        state, metrics = step(state, batch_of(mesh.get_rank(), seed=number))
        compare((metrics["loss"], metrics["grad_norm"]), seen[number], 1e-11, f"{kind}, {loss}, {when}, step {number}")
    compare(state, params, 1e-11, f"{kind}, {loss}, {when}: parameters")


NOT_HERE = {"shard": {"ddp", "hsdp", "hpz"}, "replicate": {"hpz"}, "nodes": {"ddp", "hsdp"}}
"""Builders that a mesh does not suit; on a mesh of four ranks ddp refuses shards."""


CASES = [(2, "shard", when, loss) for when in TXS for loss in LOSSES]
CASES += [(4, "replicate", "plain", "regulariser"), (4, "replicate", "clipped", "unvisited")]


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(("world", "kind", "when", "loss"), CASES)
def test_every_builder_is_exact_or_says_why_not(mesh: Any, kind: str, when: str, loss: str, builder: str) -> None:
    not_here = builder in NOT_HERE[kind] or (builder == "ddp" and mesh.size() == 4)
    for update in (False, True):
        with pytest.raises(ValueError) if not_here else contextlib.nullcontext():
            trained(mesh, kind, BUILDERS[builder](update=update), loss, when)
