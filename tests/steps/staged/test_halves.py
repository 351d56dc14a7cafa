"""Odd blocks in a backward in halves: what `ya.linear` leaves for later is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of, compare, joined, looped, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import TX, Layer, base_params
from tests.runtime.test_gradients import again, checkpointed, hooked, inner_twice, loss_of, plain_head, several_uses
from tests.steps.staged.models import F64, TWO_STAGES
from yafsdp_fn import schedules as s

PARTS = 3
HALVES = s.zero_bubble(s.zero3())


def odd(x: Tensor, w: Layer) -> Tensor:
    return again(checkpointed(inner_twice(several_uses(x, w), w), w), w)


@on_ranks(4)
@pytest.mark.parametrize("block", [odd, hooked])
def test_exact(_: Any, block: Callable[[Tensor, Layer], Tensor]) -> None:
    mesh = mesh_of(stage=2)
    batches = [batch_of(rank, rows=2 * PARTS) for rank in range(mesh.size() // 2)]
    state = ya.init(base_params(3), TX, mesh=mesh, precision=F64, stages=TWO_STAGES)
    whole = optree.tree_map(torch.Tensor.double, plain(base_params(3)))
    loss = loss_of(block, plain_head, 1)
    _value, expected = looped(loss, whole, batches, parts=PARTS)
    function = ya.value_and_grad(loss, schedule=HALVES, microbatches=PARTS)
    _value, grads = function(state.params, ya.shard_batch(joined(batches), mesh))
    compare(grads, expected, 1e-12, block.__name__)
