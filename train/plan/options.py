"""What the command line of `python -m train plan` says."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

import torch

import models
import yafsdp_fn as ya
from train.bench import schedules
from yafsdp_fn.planner.cluster import cluster, nearest

Reduce = Literal["fp32", "bf16", "bf16-summed-in-fp32"]
PRECISIONS: dict[str, ya.Precision] = {
    "fp32": ya.Precision(compute=torch.bfloat16),
    "bf16": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    "bf16-summed-in-fp32": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32),
}
YAFSDP = "yafsdp"
ZERO3 = "zero3"


@dataclasses.dataclass(frozen=True)
class Options:
    model: str
    """A name in models.CONFIGS: llama2-7b, qwen3-8b, mixtral-8x7b, ..."""
    gpus: int
    """Ranks."""
    cluster: str = "a100-80g"
    """a100-80g, h100-80g, h200-141g: nodes of eight GPUs. local: two ranks on two CPU cores."""
    seq_len: int = 2048
    """Tokens in a sequence."""
    batch: int = 1
    """Sequences per rank, over all its microbatches."""
    microbatches: int = 1
    """Parts that a rank's sequences are cut into."""
    ckpt_layers: int | None = None
    """The first so many layers recompute their graph in the backward. Not given: as few as fit."""
    schedule: str = ZERO3
    """A builder of this toolkit, with options after dashes: zero3-resident4, hsdp-prefetch2, hpz, zero2, ddp. Or
    yafsdp: ZeRO-3 as YaFSDP runs it, on a100-80g with what nothing explains of its published times."""
    replicate: int | None = None
    """Copies of the state, for hsdp. Not given: one per node."""
    search: bool = False
    """Find the fastest schedule of this toolkit that fits, instead of --schedule."""
    reduce: Reduce = "fp32"
    """What gradients travel in."""
    memory_gib: float | None = None
    """What a rank may fill. Not given: what the cluster's GPUs have for tensors."""
    gpu_hour_price: float = 2.0
    """Dollars."""
    timeline: Path | None = Path("plan.png")
    """Where to draw the step: .png, .svg or .pdf. `None`: nowhere."""
    perfetto: Path | None = None
    """Where to write the step as trace events (.json), for https://ui.perfetto.dev."""
    json: bool = False
    """One JSON object on stdout, and nothing else."""

    def __post_init__(self) -> None:
        if self.model not in models.CONFIGS:
            raise ValueError(f"--model: unknown model {self.model!r}; {nearest(self.model, sorted(models.CONFIGS))}")
        cluster(self.cluster)
        for name in ("gpus", "seq_len", "batch", "microbatches", "replicate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1")
        if self.memory_gib is not None and not 0 < self.memory_gib < math.inf:
            raise ValueError(f"--memory-gib {self.memory_gib}: expected a number above 0")
        if not 0 <= self.gpu_hour_price < math.inf:
            raise ValueError(f"--gpu-hour-price {self.gpu_hour_price}: expected a number of dollars, at least 0")
        layers = models.CONFIGS[self.model].layers
        if self.ckpt_layers is not None and not 0 <= self.ckpt_layers <= layers:
            raise ValueError(f"--ckpt-layers {self.ckpt_layers}: {self.model} has {layers} layers")
        if self.search and (self.ckpt_layers is not None or self.schedule != ZERO3 or self.replicate is not None):
            raise ValueError("--search chooses the schedule, its mesh and its recomputed layers: give none of them")
        words = {} if self.schedule == YAFSDP else schedules.parse(self.schedule, "--schedule")[1]
        if "remat" in words:
            raise ValueError(
                f"--schedule {self.schedule}: instead of -remat, --ckpt-layers {layers} recomputes all layers"
            )
        if "chunk" in words and self.ckpt_layers:
            raise ValueError(f"--ckpt-layers {self.ckpt_layers}: the chunks of {self.schedule} are recomputed anyway")
        if self.replicate is not None and not self.schedule.startswith("hsdp"):
            raise ValueError(f"--replicate is for --schedule hsdp, not {self.schedule}")
