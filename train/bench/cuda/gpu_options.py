"""What the command line of `python -m train bench --device cuda` says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from train.bench.processes import ROOT

BUDGET_S = 475.0
"""By itself, below ten minutes; `make gpu-check` gives it what its tests have left."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """All GPU figures, one section after the other, each in a process of its own; one JSON, rewritten after each."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs the same code on tiny models: a check of the command, not of the machine."""
    budget_s: float = BUDGET_S
    """Seconds for everything; sections that no time is left for are named in the JSON."""
    out: Path | None = None
    """The JSON; pictures go next to it. Default: docs/benchmarks/gpu.json, on the CPU runs/gpu_on_cpu.json."""
    sections: tuple[str, ...] = ()
    """Which to run, by default all; their order is that of their value. What other sections have found stays in the
    JSON, where that is of the same GPU and versions."""
    skip_without_device: bool = False
    """End with success when this machine has no CUDA device, saying so."""

    @property
    def json(self) -> Path:
        default = ROOT / ("docs/benchmarks/gpu.json" if self.device == "cuda" else "runs/gpu_on_cpu.json")
        return self.out or default

    def __post_init__(self) -> None:
        from train.bench.cuda.sections import SECTIONS

        if self.budget_s <= 0:
            raise ValueError(f"--budget-s {self.budget_s}: expected a positive number of seconds")
        for name in self.sections:
            if name not in SECTIONS:
                raise ValueError(f"--sections {name}: there is no such section; there are {', '.join(SECTIONS)}")
