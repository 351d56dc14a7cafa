"""What is predicted is what runs; ranks keep to their cores; what is shown. Nothing is timed but in the nightly run."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import yafsdp_fn as ya
from tests.harness.pool import Pool
from train.bench import command, control
from train.bench.control import EXPERTS, STEPS, A, Control, Step, Where
from train.machine import ROOT
from yafsdp_fn.planner import CLUSTERS
from yafsdp_fn.schedules import Program

TINY = {"layers": 4, "embed": 16, "ffn": 24, "heads": 2, "kv_heads": 2, "head_dim": 8, "max_length": 8, "vocab": 32}
DENSE, ROUTED = dataclasses.replace(A, **TINY), dataclasses.replace(EXPERTS, **TINY)
KINDS = {
    "kept layers": Step(DENSE, "zero3-resident2", Where(2), rows=4, microbatches=2),
    "replicas": Step(DENSE, "ddp", Where(2), rows=2),
    "experts": Step(ROUTED, "zero2", Where(2), rows=2),
    "1F1B": Step(DENSE, "zero1", Where(2), rows=4, microbatches=4, stages=2),
}


def ran(mesh: Any, name: str) -> tuple[list[list[str]], float]:
    """The ops of a step, of each stage, and the loss of the first one."""
    step = KINDS[name].runs()
    loss = step.step({})
    return ops_of(step.train_step.program(step.state)), loss


def ops_of(program: Program) -> list[list[str]]:
    return [[str(op) for op in stage] for stage in program.stages]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_predicted_runs(pools: dict[int, Pool], name: str) -> None:
    step = KINDS[name]
    plan = step.plan(CLUSTERS["local"])
    assert plan.step_s > 0 and plan.program.trace.kernels == "eager"
    losses = []
    for rank in range(2):  # stages read the same rows
        loss, params, batch, _ = step.parts(rank)
        mean = loss(ya.materialize(params, seed=0), batch)
        losses.append((mean.total / mean.weight).item())
    for ops, loss in pools[2].run(ran, name):
        assert ops == ops_of(plan.program)
        assert loss == pytest.approx(sum(losses) / 2, rel=1e-5)


def pinned(rank: int, ranks: int) -> list[set[int]]:
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    control.pin(rank, ranks)
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
def test_ranks_share_out_the_cores(in_child: Callable[..., Any], ranks: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    first, *others = in_child(pinned, ranks - 1, ranks)
    assert first == set(cores[-max(1, len(cores) // ranks) :]) and all(each == first for each in others)


def test_the_middle_of_calibrations() -> None:
    one, two, three = (vars(CLUSTERS["local"].replace(node_bandwidth=value)) for value in (1e9, 5e9, 2e9))
    assert control.middle([one, two, three]) == CLUSTERS["local"].replace(node_bandwidth=2e9)


def found(measured: float) -> dict[str, Any]:
    took = {"median": measured, "p10": measured, "p90": measured}
    step = {"where": "2 ranks", "predicted_s": 1.0, "range_s": (0.87, 1.32), "measured_s": took}
    cluster = vars(CLUSTERS["local"])
    clusters = {"clusters": {"2 ranks": [cluster]}, "after": {"2 ranks": {**cluster, "matmul_flops": 210e9}}}
    skipped = {"2 ranks, 1000 Mbit/s": "no link of 1000 Mbit/s: Operation not permitted"}
    return {"predicted": "then", "steps": {"zero3": step}, "skipped": skipped, **clusters}


def test_shown() -> None:
    text = {}
    for measured in (1.02, 2.0):
        console = Console(file=io.StringIO(), width=200)
        console.print(*control.show(Control(), found(measured)))
        text[measured] = console.file.getvalue()  # type: ignore[attr-defined]
    assert "-2.0%" in text[1.02] and "OUTSIDE" not in text[1.02] and "MISSED" not in text[1.02]
    assert "-50.0%" in text[2.0] and "OUTSIDE" in text[2.0] and "median error 50.0% MISSED" in text[2.0]
    assert "matmul_flops 1.05e+11, after +100%" in text[2.0] and "skipped: 2 ranks, 1000 Mbit/s: no link" in text[2.0]


def test_a_step_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["control", "--only", "zero9"])
    assert "--only 'zero9': expected some of 'zero3', 'replicas'" in capsys.readouterr().err


def test_no_link_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, or `ip`, a slow link cannot be; its steps are skipped, and nothing of them is left out silently."""

    def refused(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(control.subprocess, "run", refused)
    made = control.measure(Control(only=("slow link",)), Console(file=io.StringIO()))
    assert made["steps"] == {} and "no link of 2000 Mbit/s" in made["skipped"]["2 ranks, 2000 Mbit/s"]
    console = Console(file=io.StringIO(), width=200)
    console.print(*control.show(Control(), made))
    assert "skipped: 2 ranks, 2000 Mbit/s" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_ten_steps(tmp_path: Path) -> None:
    """Predictions are written before the first step ends, and every step has its own."""
    kept = tmp_path / "control.json"
    assert len(STEPS) == 10 and len({step.where for step in STEPS.values() if step.where.mbit}) == 2
    run = [sys.executable, "-m", "train", "bench", "control", "--steps", "2", "--save", str(kept)]
    subprocess.run(run, cwd=ROOT, check=True, timeout=900)  # its ranks are no forks: some live in another namespace
    made = json.loads(kept.read_text())
    assert len(made["steps"]) + sum(str(step.where) in made["skipped"] for step in STEPS.values()) == 10
    for step in made["steps"].values():
        assert made["predicted"] < step["measured"] and step["predicted_s"] > 0 < step["measured_s"]["median"]
