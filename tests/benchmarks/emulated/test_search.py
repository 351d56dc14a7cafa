"""What `search` finds goes straight into `train_step`, and runs on the cluster that it was found for."""

from __future__ import annotations

import pytest
import torch

import yafsdp_fn as ya
from benchmarks.emulated import emulate
from models import llama
from tests.harness.child_process import in_child_process
from tests.planner.test_search import CONFIG, MIXED, SLOW, TX, budgets, traced
from yafsdp_fn.planner import search, simulate
from yafsdp_fn.schedules import verify


@pytest.mark.parametrize("budget", ["tight", "middle", "ample"])
@in_child_process
def test_the_choice_runs(budget: str) -> None:
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
    assert ran.ops == program.ops
    assert ran.trace.mesh == program.trace.mesh
    assert losses[-1] < losses[0]
    assert simulate(ya.schedules.zero3()(traced()), SLOW).seconds > found.best.step_s
