"""Predicted memory of a stage: to the byte what state, slots and messages hold, and the allocator's peak."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import yafsdp_fn as ya
from models import llama
from tests.harness.marks import nightly
from tests.harness.meshes import mesh_of
from tests.harness.pool import on_ranks
from tests.harness.small import batch
from tests.planner.test_footprint import (
    MUON,
    PRECISIONS,
    SMALL_HEAD,
    TX,
    agree,
    cast_loss,
    frozen_embedding,
    held_by,
    measured,
    tokens,
)
from yafsdp_fn.nn import linear
from yafsdp_fn.planner.footprint import predict_memory
from yafsdp_fn.schedules import assign, gpipe, interleaved, one_f_one_b, zero1, zero2, zero3, zero_bubble

ORDERS: dict[str, tuple[Any, int]] = {
    "gpipe": (gpipe(zero2()), 1),
    "1f1b, recomputed, updates": (one_f_one_b(zero3(remat="all", update=True)), 1),
    "zero-bubble": (zero_bubble(zero1()), 1),
    "interleaved": (interleaved(zero3()), 2),
}
"""And segments of a stage."""
OPTIMIZERS = {"adamw": TX, "muon": MUON, "sgd": ya.optim.sgd(1e-2)}
CASES = [
    ("gpipe", "fp32", "adamw"),
    ("1f1b, recomputed, updates", "bf16", "adamw"),
    ("zero-bubble", "fp32", "muon"),
    ("interleaved", "bf16 wire", "adamw"),
    ("gpipe", "wide sums", "sgd"),
]


@pytest.mark.sampled
@on_ranks(2, 4)
@pytest.mark.parametrize(("order", "precision", "optimizer"), CASES)
def test_a_stage_holds_what_is_predicted(mesh: Any, order: str, precision: str, optimizer: str) -> None:
    """Predicted and real bytes of what a stage holds on this rank after two steps."""
    mesh = mesh_of(stage=2)
    tx = OPTIMIZERS[optimizer]
    dtypes = PRECISIONS[precision]
    schedule, per_stage = ORDERS[order]
    params = frozen_embedding()
    given = batch(rows=8)
    part = {key: leaf[:2] for key, leaf in given.items()}
    trace = ya.planner.trace(cast_loss, params, part, precision=dtypes)
    assignment = assign(trace, 2, per_stage=per_stage)
    state = ya.init(params, tx, mesh=mesh, precision=dtypes, stages=assignment)
    for scratch in (state.memory.comms.reduce_scratch, state.memory.comms.replicate_scratch):
        scratch._made.clear()  # of other states on this mesh
    make = functools.partial(ya.train_step, cast_loss, tx, schedule=schedule, microbatches=4, skip_nonfinite=False)
    lowered = make().lower(state, given)
    step = make()
    for _ in range(2):
        state, _metrics = step(state, given)
    program = step.program(state)
    real = held_by(state)
    assert predict_memory(program, device="cpu") == predict_memory(lowered, device="cpu")
    found = predict_memory(program.by_stage[state.memory.comms.stage], device="cpu").itemised()
    assert {name: found[name] for name in real} == real
    assert real["carry_slots"] > 0
    assert real["optimizer"] > 0 or optimizer == "sgd"


PEAKS = [
    nightly(one_f_one_b, "none", 0.02),
    nightly(gpipe, "all", 0.03),
    (zero_bubble, "none", 0.04),
]
"""By how much they may be off: what a head keeps between halves of its backward is not known to the byte."""


@on_ranks()
@pytest.mark.parametrize("world", [2, nightly(4)])
@pytest.mark.parametrize(("order", "remat", "tolerance"), PEAKS)
def test_the_peak_of_a_stage(_: Any, order: Any, remat: str, tolerance: float) -> None:
    precision = PRECISIONS["fp32"]
    trace = ya.planner.trace(llama.loss(SMALL_HEAD), llama.params(SMALL_HEAD), tokens(SMALL_HEAD), precision=precision)
    how: dict[str, Any] = {"stages": assign(trace, 2), "rows": 8, "precision": precision}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "LARGE", 1 << 16)  # as in a run: halves of backwards keep other things
        found = measured(mesh_of(stage=2), SMALL_HEAD, order(zero3(remat=remat)), 4, **how)
    agree(*found, tolerance)
