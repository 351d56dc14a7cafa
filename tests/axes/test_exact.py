"""Gradients, and steps of training, on axes inside blocks: those of the plain loop."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.axes.model import PLAIN, ROWS, Options, batch_of, loss_of, mesh_of, params
from tests.harness.marks import nightly
from tests.harness.oracle import compare
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn.schedules import (
    Backward,
    Forward,
    Schedule,
    Stash,
    assign,
    gpipe,
    interleaved,
    one_f_one_b,
    remat,
    v_shaped,
    zero1,
    zero2,
    zero3,
    zero_bubble,
)
from yafsdp_fn.schedules.builders import _schedule
from yafsdp_fn.util.mesh_axes import INSIDE

FLOAT64 = ya.Precision(torch.float64)
STEPS = 3


def one_slot(trace: Any) -> dict[int, int]:
    """A slot for each stack of units: every layer is gathered again for its backward."""
    names = list(dict.fromkeys(unit.stack or unit.name for unit in trace.units))
    return {unit.id: names.index(unit.stack or unit.name) for unit in trace.units}


SCHEDULES: dict[str, Schedule] = {
    "zero1": zero1(),
    "zero2": zero2(),
    "zero3": zero3(),
    "recomputed": zero3(remat="all"),
    "offloaded": zero3(remat=remat.offload()),
    "secondary": _schedule(one_slot, "none", prefetch=0, update=False, secondary=6),  # hpz, in one node
    "updates": zero2(update=True),
}


class Pipeline(NamedTuple):
    """Schedules of a pipeline. per_stage: its segments"""

    schedule: Schedule
    per_stage: int = 1
    shape: Any = "loop"


PIPELINES = {
    "gpipe": Pipeline(gpipe(zero3(remat="all"))),
    "1f1b": Pipeline(one_f_one_b(zero2())),
    "interleaved": Pipeline(interleaved(zero3()), 2),
    "zero-bubble": Pipeline(zero_bubble(zero2())),
    "zero-bubble, recomputed": Pipeline(zero_bubble(zero3(remat="all"))),
    "v": Pipeline(v_shaped(zero1()), 2, "v"),
}


def optimizer() -> Any:
    return ya.optim.chain(ya.optim.clip_by_global_norm(0.5), ya.optim.adamw(1e-2, weight_decay=0.1))


def close(got: Any, want: Any, what: str, most: float = 1e-12) -> None:
    compare(got, want, most, what)


@functools.cache
def plain(of: Options, microbatches: int = 1) -> tuple[Any, Any, list[dict[str, Any]], Any]:
    """Value and gradients of the plain loop, the metrics of its steps, and the parameters after them. microbatches:
    each draws its own random numbers"""
    state = ya.PlainState.create(params(of), optimizer())
    both = ya.value_and_grad(loss_of(of), microbatches=microbatches)(state.params, batch_of(0))
    step = ya.train_step(loss_of(of), optimizer(), microbatches=microbatches)
    metrics = []
    for number in range(STEPS):
        state, found = step(state, batch_of(number))
        metrics.append(found)
    return *both, metrics, state.params


@functools.cache
def whole_trace(of: Options) -> Any:
    return ya.planner.trace(loss_of(of), params(of), batch_of(0))


def stages_of(of: Options, axes: dict[str, int], schedule: str = "1f1b") -> Any:
    """Which stage has which units; None on a mesh without."""
    if "stage" not in axes:
        return None
    pipeline = PIPELINES[schedule]
    return assign(whole_trace(of), axes["stage"], per_stage=pipeline.per_stage, shape=pipeline.shape)


def exact(_: Any, axes: dict[str, int], of: Options, schedule: str, microbatches: int) -> None:
    mesh = mesh_of(**axes)
    state = ya.init(params(of), optimizer(), mesh=mesh, precision=FLOAT64, stages=stages_of(of, axes, schedule))
    loss, gradients, metrics, after = plain(of, microbatches if of.dropout else 1)
    cut = functools.partial(ya.shard_batch, mesh=mesh, split={"context": 1}, zigzag=of.zigzag)
    made = PIPELINES[schedule].schedule if schedule in PIPELINES else SCHEDULES[schedule]
    how: Any = {"schedule": made, "microbatches": microbatches}
    both = ya.value_and_grad(loss_of(of), **how)
    for _ in range(2 if schedule != "updates" else 0):  # recorded, and by its program
        value, grads = both(state.params, cut(batch_of(0)))
        close(value, loss, "loss")
        close(grads, gradients, "gradient")
        close(ya.global_norm(grads), ya.global_norm(gradients), "norm")
    step = ya.train_step(loss_of(of), optimizer(), **how)
    with ya.timeline.record() as recording:
        for number in range(STEPS):
            state, found = step(state, cut(batch_of(number)))
            close(found["loss"], metrics[number]["loss"], "loss")
            close(found["grad_norm"], metrics[number]["grad_norm"], "norm")
    own = step.program(state).stages[state.memory.comms.stage]
    assert any(isinstance(op, Stash) for op in own) == (schedule == "secondary")
    spans = recording.timeline().spans
    computes = (Forward, Backward)
    assert [span.op for span in spans if isinstance(span.op, computes)] == [
        op for op in own if isinstance(op, computes)
    ]
    close(state, after, "parameters")


SP = Options(sequence_parallel=True)
NOISY = Options(sequence_parallel=True, dropout=0.2)
SOME = [
    (2, {"tensor": 2}, PLAIN, "zero3", 1),
    (2, {"tensor": 2}, NOISY, "zero2", 2),
    nightly(2, {"context": 2}, PLAIN, "zero3", 1),
    (2, {"context": 2}, Options(zigzag=True), "recomputed", 1),
    (2, {"expert": 2}, PLAIN, "recomputed", 2),
    (4, {"shard": 2, "tensor": 2}, PLAIN, "zero1", 2),
    nightly(4, {"shard": 2, "tensor": 2}, SP, "zero3", 1),
    (4, {"expert": 2, "tensor": 2}, Options(frozen=True), "recomputed", 2),
    nightly(4, {"shard": 2, "tensor": 2}, Options(tied=True, sequence_parallel=True, frozen=True), "recomputed", 1),
    nightly(4, {"context": 2, "tensor": 2}, PLAIN, "zero2", 1),
    nightly(4, {"local": 1, "tensor": 2}, PLAIN, "secondary", 2),
    (4, {"stage": 2, "tensor": 2}, NOISY, "1f1b", 2),
    nightly(4, {"stage": 2, "expert": 2}, Options(tied=True), "interleaved", 2),
    nightly(4, {"stage": 2, "context": 2}, Options(zigzag=True), "zero-bubble", 4),
]

# ---- nightly: every mesh with every schedule, and three axes on eight ranks

MESHES: list[dict[str, int]] = [
    *({name: 4} for name in INSIDE),
    *({"shard": 2, name: 2} for name in INSIDE),
    *({one: 2, other: 2} for one, other in itertools.combinations(INSIDE, 2)),
    {"replicate": 2, "shard": 1, "tensor": 2},
    {"local": 1, "tensor": 2},
]
TURNS = (
    PLAIN,
    SP,
    Options(tied=True, sequence_parallel=True, zigzag=True),
    Options(frozen=True, unroll=2),
    Options(tied=True, frozen=True, sequence_parallel=True, unroll=2),
)
"""Options take turns, and one microbatch and two, where ranks have two rows or more."""


def in_turn(meshes: list[dict[str, int]], schedules: Any) -> list[Any]:
    out = []
    for at, (axes, name) in enumerate(itertools.product(meshes, schedules)):
        rows = ROWS // math.prod(size for axis, size in axes.items() if axis not in ("stage", "context", "tensor"))
        of = TURNS[at % len(TURNS)]
        if name in ("secondary", "interleaved", "v"):  # layers share a slot, or are in several segments
            of = of._replace(unroll=1)
        out.append(nightly(4, axes, of, name, 1 + (at % 2 and rows > 1)))
    return out


EVERY = [*in_turn(MESHES, SCHEDULES), *in_turn([{"stage": 2, name: 2} for name in INSIDE], PIPELINES)]
EVERY += [nightly(4, {"tensor": 4}, Options(dropout=0.2), "recomputed", 2)]
EIGHT = [
    nightly(8, {"expert": 2, "context": 2, "tensor": 2}, Options(sequence_parallel=True, zigzag=True), "zero3", 1),
    nightly(8, {"shard": 2, "context": 2, "tensor": 2}, Options(tied=True, unroll=2), "zero1", 1),
    nightly(8, {"shard": 2, "expert": 2, "tensor": 2}, Options(frozen=True), "recomputed", 1),
    nightly(8, {"shard": 2, "expert": 2, "context": 2}, PLAIN, "offloaded", 1),
    nightly(8, {"local": 2, "tensor": 2}, SP, "secondary", 1),
    nightly(8, {"replicate": 2, "shard": 2, "tensor": 2}, SP, "zero2", 1),
    nightly(8, {"stage": 2, "shard": 2, "tensor": 2}, SP, "1f1b", 1),
    nightly(8, {"stage": 2, "expert": 2, "tensor": 2}, Options(tied=True), "zero-bubble, recomputed", 2),
    nightly(8, {"stage": 2, "replicate": 2, "shard": 1, "tensor": 2}, PLAIN, "interleaved", 2),
    nightly(8, {"stage": 2, "local": 1, "tensor": 2}, PLAIN, "v", 2),
]


@on_ranks()
@pytest.mark.parametrize(("world", "axes", "of", "schedule", "microbatches"), [*SOME, *EVERY, *EIGHT])
def test_gradients_and_steps_are_those_of_the_plain_loop(
    mesh: Any, axes: Any, of: Options, schedule: str, microbatches: int
) -> None:
    exact(mesh, axes, of, schedule, microbatches)


# ---- sums of other dtypes


@on_ranks(4)
@pytest.mark.nightly
def test_sums_in_a_wider_dtype(_: Any) -> None:
    """Ranks sum gradients themselves, in a wider dtype than that of the wire: only its rounding is between."""
    precision = ya.Precision(torch.float64, reduce=torch.float32, accumulate=torch.float64)
    for axes in ({"shard": 2, "tensor": 2}, {"replicate": 2, "shard": 1, "tensor": 2}):
        state = ya.init(params(PLAIN), mesh=mesh_of(**axes), precision=precision)
        for schedule in (zero3(), zero2()):
            both = ya.value_and_grad(loss_of(PLAIN), schedule=schedule, microbatches=2)
            for _ in range(2):
                _, grads = both(state.params, ya.shard_batch(batch_of(0), state.mesh))
                close(grads, plain(PLAIN)[1], "gradient", 1e-6)


# ---- deterministic meshes: the same bits at every number of ranks on `shard`


def bits(_: Any, axes: dict[str, int], schedule: str) -> Any:
    """Losses and norms of three steps, and the parameters, in float32. One rank of `shard`, or two."""
    mesh = ya.mesh(device="cpu", deterministic=4, **axes)
    state = ya.init(params(NOISY), optimizer(), mesh=mesh, precision=ya.Precision(torch.float32))
    step = ya.train_step(loss_of(NOISY), optimizer(), schedule=SCHEDULES[schedule])
    found = list[Any]()
    for number in range(STEPS):
        state, metrics = step(state, ya.shard_batch(batch_of(number), mesh, split={"context": 1}))
        found += [metrics["loss"], metrics["grad_norm"]]
    return [leaf.clone() for leaf in optree.tree_leaves((found, ya.unshard(state)))]


@pytest.mark.parametrize("axis", ["tensor", nightly("context"), nightly("expert")])
def test_equal_bits_on_deterministic_meshes(pools: Pools, axis: str) -> None:
    one, other = (pools[world].run(bits, {axis: 2}, how)[0] for world, how in ((2, "zero3"), (4, "recomputed")))
    assert all(map(torch.equal, one, other))
