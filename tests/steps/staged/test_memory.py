"""What a pipeline keeps from step to step: nothing, however many steps there are."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import mesh_of
from tests.harness.pool import on_ranks
from tests.steps.staged.test_accepted_pipelines import ORDERS
from yafsdp_fn import schedules as s
from yafsdp_fn.runtime import programs

E, ROWS, PARTS, STEPS = 64, 1 << 9, 2, 200
CARRY = E * ROWS * 4


class Held(NamedTuple):
    """By one process: tensors, and resident bytes."""

    tensors: int
    resident: int


def held() -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(sum(type(found) is Tensor for found in gc.get_objects()), pages * os.sysconf("SC_PAGE_SIZE"))


def layer(x: Tensor, w: Tensor) -> tuple[Tensor, None]:
    return x * w, None


def loss(params: Any, batch: Tensor) -> ya.Mean:
    x = ya.apply(lambda w, x: x * w, params["first"], batch)
    x, _ = ya.scan(layer, x, params["layers"])
    return ya.Mean(ya.apply(lambda w, x: (x * w).square().sum(), params["last"], x), float(batch.numel()))


@on_ranks(2)
@pytest.mark.nightly
@pytest.mark.parametrize("order", ORDERS)
def test_steps_leave_nothing(_: Any, order: str) -> None:
    """What is held after a quarter of the steps, and after all of them."""
    build, per_stage, shape = ORDERS[order]
    one = ya.params.initializers.normal(1.0)
    params = {
        "first": ya.Param((E,), init=one),
        "last": ya.Param((E,), init=one),
        "layers": ya.Stacked(ya.Param((4, E), init=one)),
    }
    batch = torch.ones(PARTS * ROWS, E)
    tx = ya.optim.sgd(1e-6)
    trace = ya.planner.trace(loss, params, batch[:ROWS])
    stages = ya.schedules.assign(trace, 2, per_stage=per_stage, shape=shape)
    state = ya.init(params, tx, mesh=mesh_of(stage=2), stages=stages)
    step = ya.train_step(loss, tx, schedule=build(s.zero3()), microbatches=PARTS)
    for number in range(STEPS):
        state, _ = step(state, batch)
        if number == STEPS // 4:
            early = held()
    late = held()
    assert late.tensors == early.tensors
    assert late.resident - early.resident < STEPS // 4 * CARRY, "a carry for each step would be three times that"


@on_ranks(2)
def test_shapes_of_batches_are_forgotten(_: Any) -> None:
    """Whether what was kept for the first of five lengths is still there, how many are, and losses."""
    params = {name: ya.Param((E,)) for name in ("first", "last")} | {"layers": ya.Stacked(ya.Param((2, E)))}
    units = s.Assignment(((0,), (1,), (0,), (1,)), (0, 1))
    step = ya.train_step(loss, ya.optim.sgd(0.0), schedule=s.one_f_one_b())
    losses = []
    state = ya.init(params, ya.optim.sgd(0.0), mesh=mesh_of(stage=2), stages=units)
    with mock.patch.object(programs, "KEPT_SHAPES", 2):
        for rows in (2, 3, 4, 5):
            state, metrics = step(state, torch.ones(rows, E))
            losses.append(float(metrics["loss"]))
            if rows == 2:
                first = weakref.ref(next(iter(step._function.programs.known.values())))
        gc.collect()
        there = first() is not None
        state, metrics = step(state, torch.ones(2, E))
    kept = len(step._function.programs.known)
    losses = [*losses, float(metrics["loss"])]
    assert not there
    assert kept == 2
    assert losses[0] == losses[-1]
    assert losses == pytest.approx([losses[0]] * 5)
