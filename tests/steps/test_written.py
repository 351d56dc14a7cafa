"""Programs that synthesis wrote for layers of unlike kinds, on ranks: one step is that of the plain model."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import Pools
from tests.harness.unlike import MODELS
from yafsdp_fn.planner import Synthesized, predict_memory, search, trace
from yafsdp_fn.planner.cluster import LOCAL
from yafsdp_fn.planner.space import Point, layers
from yafsdp_fn.planner.synthesize import Synthesis

RATE = 0.1
TX = ya.optim.sgd(RATE)
WIDE = ya.Precision(param=torch.float64)
FREE = LOCAL.replace(gpus_per_node=1, network_latency=0.0, host_computes=False, contention=0.0)
SLOW = FREE.replace(network_bandwidth=2e6)
"""A step takes as long as its communication."""
WEAK = FREE.replace(matmul_flops=1e7, attention_flops=1e7, network_bandwidth=1e12, memory_bandwidth=1e15)
"""A step takes as long as its products."""
RUN = {
    "local-global": (2, 1, 1),
    "half-the-gradients": (2, 4, 1),
    "experts": (2, 2, 1),
    "few-microbatches": (4, 4, 4),
}
"""Case -> ranks, microbatches, stages."""


def written(name: str) -> Synthesized:
    """On every rank the same: nothing but the seed and the number of moves decides."""
    ranks, microbatches, stages = RUN[name]
    model = MODELS[name]
    traced = trace(
        model.loss,
        model.params(),
        model.batch(microbatches * (4 // ranks if stages == 1 else 1)),
        tx=TX,
        ranks=ranks,
        precision=WIDE,
        microbatches=microbatches,
    )
    if stages > 1:
        traced = traced.on((("shard", 1),))
        found = search(traced, WEAK, memory=2**30, stages=(stages,), ranks=ranks, synthesize=600, moves=40).synthesized
        return found
    several = microbatches > 1
    ends = ya.schedules.zero3(remat="all", defer=several), ya.schedules.zero3(remat="all" if several else "none")
    memory = sum(predict_memory(end(traced)).peak_bytes for end in ends) // 2
    first = Point("zero3", traced.mesh, remat=layers(traced) if several else layers(traced) * 2 // 3)
    return Synthesis(traced, [first], SLOW if several else WEAK, memory).run(150)


def step(_: Any, name: str) -> None:
    _, microbatches, stages = RUN[name]
    model = MODELS[name]
    schedule = written(name)
    assert schedule.step_s < schedule.builder_s
    mesh = ya.mesh(**schedule.mesh)
    state = ya.init(model.params(), TX, mesh=mesh, seed=0, precision=WIDE, stages=schedule.stages)
    rows = model.batch(4 * microbatches if stages == 1 else microbatches, "cpu")
    rows = {key: (tokens * 7 + torch.arange(len(tokens))[:, None]) % model.sizes.V for key, tokens in rows.items()}
    leaves, spec = optree.tree_flatten(ya.unshard(state.params))
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    total, count = model.loss(optree.tree_unflatten(spec, leaves), rows)
    slopes = torch.autograd.grad(total / count, leaves)
    ours = ya.train_step(model.loss, TX, schedule=schedule, microbatches=microbatches)
    state, metrics = ours(state, ya.shard_batch(rows, mesh))
    torch.testing.assert_close(metrics["loss"].double(), (total / count).detach(), rtol=1e-6, atol=0.0)
    for got, leaf, slope in zip(optree.tree_leaves(ya.unshard(state.params)), leaves, slopes, strict=True):
        torch.testing.assert_close((leaf.detach() - got) / RATE, slope, rtol=0.0, atol=1e-11 * float(slope.norm()))
    program = ours.program(state)
    assert program.stages == schedule.program.stages


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUN)
def test_a_step_is_the_plain_one(pools: Pools, name: str) -> None:
    pools[RUN[name][0]].run(step, name)
