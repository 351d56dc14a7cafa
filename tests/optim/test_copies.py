"""Working copies follow the parameters in the optimizer's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.small import batch, loss, model, one_rank

HALF = ya.Precision(compute=torch.bfloat16)
MATRICES = ya.optim.adamw(1e-2, weight_decay=0.1, mask=lambda path, param: len(param.shape) > 1)
PLAIN = ya.optim.chain(ya.optim.adamw(1e-2), ya.optim.scale(0.5))
"""No kernel does it."""


@pytest.mark.parametrize("tx", [ya.optim.adamw(1e-2), MATRICES, ya.optim.sgd(0.1), PLAIN], ids=list("amsp"))
@pytest.mark.parametrize("update", [False, True])
def test_working_copies_follow(tx: Any, update: bool) -> None:
    state = ya.init(model(), tx, mesh=one_rank(), precision=HALF)
    step = ya.train_step(loss, tx, schedule=ya.schedules.zero3(update=update), skip_nonfinite=False)
    for number in range(3):
        state, _ = step(state, batch(number))
    memory = state.memory
    for master, working in zip(memory.masters(), memory.working.present, strict=True):
        assert working.dtype == torch.bfloat16
        assert torch.equal(working, master.bfloat16())
