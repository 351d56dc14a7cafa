"""What `search` finds goes straight into `train_step`, and runs on the cluster that it was found for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from benchmarks.emulated import emulate
from models import llama
from tests.planner.test_search import CONFIG, MIXED, SLOW, TX, budgets, traced
from yafsdp_fn.planner import search, simulate
from yafsdp_fn.schedules import verify


def train(budget: str) -> dict[str, Any]:
    """Two steps of the schedule that was found, on rank 0 of 16."""
    found = search(traced(), SLOW, memory=budgets(traced())[budget])
    program = found.program
    verify(program)
    text = torch.arange(4 * 65).view(4, 65) % 251
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    with emulate(SLOW, 16):
        state = ya.init(llama.params(CONFIG), TX, mesh=ya.mesh(device="cpu", **found.mesh), precision=MIXED)
        step = ya.train_step(llama.loss(CONFIG), TX, schedule=found)
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        ran = step.program(state)
    assert ran is not None
    default = simulate(ya.schedules.zero3()(traced()), SLOW).seconds
    return {
        "same": ran.ops == program.ops and ran.trace.mesh == program.trace.mesh,
        "losses": losses,
        "gain": default / found.best.step_s,
        "builder": found.best.point.builder,
    }


@pytest.mark.parametrize("budget", ["tight", "middle", "ample"])
def test_the_choice_runs(in_child: Callable[..., Any], budget: str) -> None:
    ran = in_child(train, budget)
    assert ran["same"] and ran["gain"] > 1
    assert ran["losses"][-1] < ran["losses"][0]
