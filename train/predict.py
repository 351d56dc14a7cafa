"""`python -m train predict`: a step of a small Llama, predicted from this machine's figures and then measured.

    python -m train launch --ranks 2 predict --timeline predict.png

Calibrates, traces, simulates; runs the step and records it; prints both. On every rank alike; rank 0 prints.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch

import yafsdp_fn as ya
from models import llama
from train.command_line import cli
from train.schedule_names import make, parse
from train.shapes import SHAPES
from yafsdp_fn.planner import simulate
from yafsdp_fn.planner.cluster import nearest
from yafsdp_fn.timeline import record


@dataclasses.dataclass(frozen=True)
class Options:
    config: str = "A"
    """A model of the benchmarks: A, B, C or tiny."""
    schedule: str = "zero3"
    """A builder with options after dashes, of those that need no other mesh than the plain one."""
    steps: int = 20
    """Steps to measure; the one of median time is compared."""
    timeline: Path | None = None
    """File to draw to: the prediction above the measurement: .png, .svg or .pdf."""

    def __post_init__(self) -> None:
        if self.config not in SHAPES:
            raise ValueError(f"--config: unknown model {self.config!r}; {nearest(self.config, list(SHAPES))}")
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: expected at least 1")
        parse(self.schedule, "--schedule")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv`; returns the exit status."""
    options = cli(Options, argv, prog="python -m train predict")
    torch.set_num_threads(1)
    shape = SHAPES[options.config]
    config, tx = shape.llama(), ya.optim.adamw(1e-3)
    mesh = ya.mesh(device="cpu")
    here = ya.planner.calibrate(device="cpu")
    state = ya.init(llama.params(config), tx, mesh=mesh)
    step = ya.train_step(llama.loss(config), tx, schedule=make(options.schedule, config.layers))
    text = torch.randint(256, (shape.batch, shape.seq + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    program = step.lower(state, batch)
    program = program.with_trace(program.trace._replace(kernels="eager"))  # blocks are not compiled here
    predicted = simulate(program, here)
    with record() as recording:
        for _ in range(options.steps + 2):
            state, metrics = step(state, batch)
            metrics["loss"].item()
    measured = sorted(recording.timelines[2:], key=lambda timeline: timeline.seconds)[options.steps // 2]
    if int(os.environ.get("RANK", "0")) == 0:
        print(here)
        print(ya.planner.compare({"predicted": predicted, "measured": measured}))
        if options.timeline is not None:
            predicted.save(options.timeline, beside=measured)
    return 0
