"""`python -m train bench lora`: full fine-tuning against adapters on a frozen base, in turn, with the same schedule.

    full         every weight is trained
    lora         all matrices of the layers are frozen with an adapter, the rest is frozen: `ya.lora(params, RANK)`
    lora-bf16    the same, matrices stored and gathered in bf16
    lora-int8    the same, in int8

All compute in fp32: bf16 products are slow on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from rich.console import Console

import yafsdp_fn as ya
from models.llama import model as llama
from train.bench import report, schedules, tables, variants
from train.bench.contenders import ADAMW, LEARNING_RATE, Ours
from train.bench.options import Shape
from train.bench.variants import Variants

FULL, RANK = "full", 16
STORED = {"lora": None, "lora-bf16": torch.bfloat16, "lora-int8": torch.int8}
"""What matrices with an adapter are stored in."""
CONTENDERS = (FULL, *STORED)


@dataclasses.dataclass(frozen=True)
class Lora(Variants):
    """Time full fine-tuning and low-rank adapters interleaved, with their memory and messages."""

    ranks: int = 2
    """Rank processes, with gloo."""


def build(name: str, schedule: str, shape: Shape, *, seed: int, device: torch.device) -> Ours:
    """One contender; all begin with the same weights, but for int8, whose sizes alone are right."""
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    mesh = ya.mesh(device=device.type, **schedules.mesh(schedule, torch.distributed.get_world_size()))
    params = llama.params(shape.llama())
    state = ya.init(params if name == FULL else ya.lora(params, RANK, dtype=STORED[name]), tx, mesh=mesh, seed=seed)
    made = schedules.make(schedule, shape.layers)
    return Ours(state, ya.train_step(llama.loss(shape.llama()), tx, schedule=made, skip_nonfinite=False))


def measure(lora: Lora, command: str, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed."""
    return {
        **report.heading(command),
        "config": lora.config,
        "shape": dataclasses.asdict(lora.bench(lora.ranks).shape),
        "schedule": lora.schedule,
        "rank": RANK,
        "ranks": lora.ranks,
        "steps": lora.steps,
        "contenders": variants.measure("lora", lora, lora.ranks, CONTENDERS, console),
    }


def show(found: dict[str, Any], console: Console) -> None:
    """A row for each contender."""
    console.print(
        f"config {found['config']}, {found['ranks']} rank(s), {found['schedule']}, fp32, adapters of rank "
        f"{found['rank']}; {found['steps']} interleaved steps, medians. Memory: the most live tensors of a rank",
        highlight=False,
        soft_wrap=True,
    )
    variants.show("per step and rank", found["contenders"], console)
    tables.footer(found, console)
