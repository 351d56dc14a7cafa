"""Gradients and three AdamW steps across stages, in float64, against the plain loop: every builder, with sharding."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import pytest
import torch

import yafsdp_fn as ya
from tests.harness import oracle
from tests.harness.marks import nightly
from tests.harness.meshes import mesh_of
from tests.harness.oracle import Batch, batch_of, by_autograd, compare, joined
from tests.harness.pool import on_ranks
from tests.harness.problems import CLIPPED as TX
from tests.harness.problems import base_params, tied_params
from tests.steps.staged import models
from yafsdp_fn import schedules as s
from yafsdp_fn.runtime.reductions import combine

UNITWISE = ya.optim.adamw(1e-2)
TOLERANCE = 1e-12
MODELS = {
    "skip": (models.params, models.loss),
    "tied": (tied_params, models.tied_loss),
    "pinned": (models.pinned_params, models.tied_loss),
    "products": (base_params, models.product_loss),
}


class How(NamedTuple):
    order: Any
    sharding: s.Schedule
    per_stage: int = 1
    shape: Any = "loop"


HOW = {
    "gpipe": How(s.gpipe, s.zero2()),
    "gpipe, recomputed": How(s.gpipe, s.zero3(remat="all")),
    "1f1b": How(s.one_f_one_b, s.zero2()),
    "1f1b, gathered anew": How(s.one_f_one_b, s.zero3(remat="every:2")),
    "1f1b, reduced once, updates": How(s.one_f_one_b, s.zero1(update=True)),
    "interleaved": How(s.interleaved, s.zero2(remat="first:1"), 2),
    "interleaved, gathered anew, updates": How(s.interleaved, s.zero3(update=True), 2),
    "zero-bubble": How(s.zero_bubble, s.zero2()),
    "zero-bubble, recomputed, updates": How(s.zero_bubble, s.zero3(remat="all", update=True)),
    "v": How(s.v_shaped, s.zero2(), 2, "v"),
    "v, reduced once": How(s.v_shaped, s.zero3(defer=True), 2, "v"),
    "zero-bubble, gathered anew": How(s.zero_bubble, s.zero3()),
    "v, half the memory": How(s.v_half, s.zero2(), 2, "v"),
    "v, a third of the memory": How(s.v_min, s.zero3(), 2, "v"),
    "v, fsdp2": How(s.v_shaped, s.fsdp2(), 2, "v"),
}
ALL = os.environ.get("STAGES") == "all"


@functools.cache
def trace_of(model: str) -> s.Trace:
    """Of a microbatch, of which all cases have as many rows."""
    abstract, loss = MODELS[model]
    return ya.planner.trace(loss, abstract(7), batch_of(0, rows=2), precision=models.F64, has_aux=True)


def check(_: Any, model: str, name: str, stages: int, microbatches: tuple[int, ...], skips: bool) -> None:
    """One rank's part. skips: the step looks at the norm before it updates"""
    abstract, loss = MODELS[model]
    how = HOW[name]
    params = abstract(7)
    tx = TX if skips else UNITWISE
    mesh = mesh_of(stage=stages)
    ranks = mesh.size() // stages
    for parts in microbatches:
        rows = 2 * parts
        batches = [batch_of(rank, rows=rows, seed=parts) for rank in range(ranks)]
        mine = ya.shard_batch(joined(batches), mesh)
        assignment = ya.schedules.assign(trace_of(model), stages, per_stage=how.per_stage, shape=how.shape)
        state = ya.init(params, tx, mesh=mesh, precision=models.F64, stages=assignment)
        whole = ya.PlainState.create(ya.unshard(state), tx)
        schedule = how.order(how.sharding)
        options: Any = {"microbatches": parts, "has_aux": True}
        if not name.endswith("updates"):
            got = ya.value_and_grad(loss, schedule=schedule, **options)(state.params, mine)
            expected = looped(loss, whole.params, batches, parts, step=0)
            compare((got[0], got[1]), expected, TOLERANCE, f"{model}, {name}, {parts}: gradients")
        step = ya.train_step(loss, tx, schedule=schedule, skip_nonfinite=skips, **options)
        for number in range(3):
            (value, aux), grads = looped(loss, whole.params, batches, parts, step=number)
            whole = whole.apply_gradients(grads, tx)
            state, metrics = step(state, mine)
            what = f"{model}, {name}, {parts} microbatches, step {number}"
            compare((metrics["loss"], metrics["aux"]), (value, aux), TOLERANCE, what)
            compare(state, whole.params, TOLERANCE, what)
        value, aux = looped(loss, whole.params, batches, parts, step=3)[0]
        found = ya.eval_step(loss, schedule=schedule, **options)(state, mine)
        compare((found["loss"], found["aux"]), (value, aux), TOLERANCE, f"{model}, {name}: evaluation")


def looped(loss: Any, params: Any, batches: list[Batch], parts: int, step: int) -> Any:
    """`((value, aux), grads)` by plain autograd: one rank and one microbatch after the other."""
    found = []

    def noted(params: Any, batch: Batch) -> ya.Mean:
        mean, aux = loss(params, batch)
        found.append((ya.Sum(mean.total.detach()), ya.Sum(torch.as_tensor(mean.weight).double()), aux))
        return mean

    _, grads = oracle.looped(noted, params, batches, parts=parts, step=step)
    total, weight, aux = combine(found, None)
    return (total / weight, aux), grads


CASES = [(2, 2), (4, 2), (3, 3), (4, 4)]  # world, stages
EVERY = [(*case, name) for case in CASES for name in HOW]
# by day: each order, and each way to shard, once
DAILY = [(4, 2, name) for name in HOW if name.endswith("updates")] + [(4, 2, "v, fsdp2")]
DAILY += [(2, 2, "gpipe"), (3, 3, "interleaved"), (4, 4, "zero-bubble")]
DAILY += [(2, 2, "v, half the memory"), (2, 2, "v, a third of the memory")]
OTHERS = [*((4, 2, name) for name in HOW if "," in name), (4, 4, "1f1b"), (3, 3, "v")]
SOME = [*DAILY, *(nightly(*case) for case in OTHERS if case not in DAILY)]
SHARED = ["v", "1f1b", "zero-bubble, recomputed, updates", "interleaved, gathered anew, updates"]

SOME_SHARED = [(*CASES[k // 2], ("tied", "pinned")[k % 2], name) for k, name in enumerate(SHARED)]


@on_ranks()
@pytest.mark.parametrize(("world", "stages", "name"), EVERY if ALL else SOME)
def test_exact(mesh: Any, stages: int, name: str) -> None:
    world = mesh.size()
    at = list(HOW).index(name) + CASES.index((world, stages))
    every = (1, stages, 2 * stages + 1)
    microbatches = every if ALL else (every[at % 3],)
    for skips in (True, False) if ALL else (bool(at % 2),):
        check(mesh, "skip", name, stages, microbatches, skips)


@on_ranks()
@pytest.mark.parametrize(
    ("world", "stages", "model", "name"),
    [(*case, model, name) for case in CASES for model in ("tied", "pinned") for name in SHARED]
    if ALL
    else [nightly(*case) if case[-1] == "1f1b" else case for case in SOME_SHARED],
)
def test_shared(mesh: Any, stages: int, model: str, name: str) -> None:
    """Units that several stages have: a tied embedding, gains of all layers."""
    world = mesh.size()
    check(mesh, model, name, stages, (1, stages, 2 * stages + 1) if ALL else (3,), world % 2 == 0)


PRODUCTS = [
    (2, 2, "zero-bubble, recomputed, updates"),
    nightly(4, 2, "zero-bubble"),
    (4, 2, "zero-bubble, gathered anew"),
]


@on_ranks()
@pytest.mark.nightly
@pytest.mark.parametrize(("world", "stages", "name"), PRODUCTS)
def test_weights_that_are_multiplied_with_weights(mesh: Any, stages: int, name: str) -> None:
    """The later half of a backward needs a weight whose slot has held other units in between."""
    check(mesh, "products", name, stages, (2 * stages + 1,), False)


@on_ranks(4)
def test_weights_that_are_not_large(mesh: Any) -> None:
    """As small weights are by default; in the other tests all go the way of large ones."""
    with by_autograd():
        check(mesh, "skip", "zero-bubble, gathered anew", 2, (3,), True)
