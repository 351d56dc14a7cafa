"""Models that are not embed, layers, head: what is planned for them is what a step does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import yafsdp_fn as ya
from tests.harness.small import E, Model, batch, block, loss, model, one_rank, with_block
from yafsdp_fn.planner import CLUSTERS, simulate, trace
from yafsdp_fn.schedules import zero3

TX = ya.optim.adamw(1e-2)


def frozen_trunk() -> Model:
    """Only the head is trained: no gradient reaches the layers."""
    tree = model()
    return tree._replace(embed=ya.frozen(tree.embed), layers=ya.frozen(tree.layers))


def adapters() -> Any:
    """A frozen embedding and frozen layers with trained adapters: gradients of inputs begin behind the first layer."""
    tree = model()
    stack = {"base": ya.Unit(ya.frozen(tree.layers.tree)), "a": ya.Param((3, E, E))}
    return tree._replace(embed=ya.frozen(tree.embed), layers=ya.Stacked(stack))


@with_block
def adapted_loss(x: Tensor, w: Any) -> tuple[Tensor, None]:
    return block(x, w["base"])[0] + F.linear(x, w["a"]), None


@pytest.mark.parametrize("remat", ["none", "all"])
@pytest.mark.parametrize(("params", "fun"), [(frozen_trunk, loss), (adapters, adapted_loss)])
def test_frozen_layers_without_gradients_have_no_backward(params: Any, fun: Any, remat: str) -> None:
    """FLOPs of a real step, with those of layers that recompute."""
    schedule = zero3(remat=remat)
    state = ya.init(params(), TX, mesh=one_rank())
    step = ya.train_step(fun, TX, schedule=schedule)
    for number in range(2):
        state, _ = step(state, batch(number))
    with FlopCounterMode(display=False) as counted:
        state, _ = step(state, batch(2))
    found = trace(fun, params(), batch(), tx=TX)
    cluster = CLUSTERS["a100-80g"].replace(matmul_flops=1.0, memory_bandwidth=math.inf)
    assert simulate(schedule(found), cluster).compute_s == pytest.approx(counted.get_total_flops())
    trunk = [visit.cost.bwd_flops for visit in found.visits if visit.name.startswith("layers")]
    assert (sum(trunk) == 0) == (params is frozen_trunk)
