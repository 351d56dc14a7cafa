"""`python -m train bench lora`: full fine-tuning against adapters on a frozen base, in turn, with the same schedule.

    full         every weight is trained
    lora         all matrices of the layers are frozen with an adapter, the rest is frozen: `ya.lora(params, RANK)`
    lora-bf16    the same, matrices stored and gathered in bf16
    lora-int8    the same, in int8

All compute in fp32: bf16 products are slow on a CPU. Messages are of the program; memory is the largest sum of live
tensors, measured, and what the planner says.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

import yafsdp_fn as ya
from models.llama import model as llama
from train.bench import launch, report, schedules, tables
from train.bench.contenders import ADAMW, LEARNING_RATE, Ours
from train.bench.options import Bench, Shape

FULL, RANK = "full", 16
STORED = {"lora": None, "lora-bf16": torch.bfloat16, "lora-int8": torch.int8}
"""What matrices with an adapter are stored in."""
CONTENDERS = (FULL, *STORED)
GOAL = 0.03
"""Of the planner's memory, beside what is measured."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Time full fine-tuning and low-rank adapters interleaved, with their memory and messages."""

    config: Literal["A", "B", "C", "tiny"] = "A"
    """The model, as in `python -m train bench`."""
    schedule: str = "zero3"
    """Ours, as in `python -m train bench --schedules`."""
    ranks: int = 2
    """Rank processes, with gloo."""
    steps: int = 20
    """Timed rounds."""
    warmup: int = 3
    """Rounds before that."""
    json: bool = False
    """Print JSON alone on stdout instead of the table."""
    save: Path | None = None
    """Also write the JSON to this file."""
    timeout: float = 900.0
    """Seconds after which rank processes that have not ended are killed."""

    def __post_init__(self) -> None:
        self.bench()

    def bench(self) -> Bench:
        return Bench(
            config=self.config,
            schedules=(self.schedule,),
            peers=("ddp",),  # not built: a `Bench` wants two
            ranks=self.ranks,
            steps=self.steps,
            warmup=self.warmup,
            timeout=self.timeout,
        )


def build(name: str, schedule: str, shape: Shape, *, seed: int, device: torch.device) -> Ours:
    """One contender; all begin with the same weights, but for int8, whose sizes alone are right."""
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    mesh = ya.mesh(device=device.type, **schedules.mesh(schedule, torch.distributed.get_world_size()))
    params = llama.params(shape.llama())
    state = ya.init(params if name == FULL else ya.lora(params, RANK, dtype=STORED[name]), tx, mesh=mesh, seed=seed)
    made = schedules.make(schedule, shape.layers)
    return Ours(state, ya.train_step(llama.loss(shape.llama()), tx, schedule=made, skip_nonfinite=False))


def planned(contender: Ours, batch: Any) -> dict[str, int]:
    """Bytes that a rank holds at most and that it sends in a step, of a contender that has taken no step."""
    program = contender.train_step.lower(contender.state, batch)
    peak = ya.memory(program, device=contender.state.memory.comms.device.type).peak_bytes
    return {"planned_bytes": peak, "wire_bytes": sum(program.wire_bytes().values())}


def measure(lora: Lora, command: str, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed."""
    bench = lora.bench()
    with console.status(f"timing {', '.join(CONTENDERS)} in turn"):
        found = launch.run("lora", (lora.schedule,), bench)
    seconds = found["seconds"]
    return {
        **report.heading(command),
        "config": lora.config,
        "shape": dataclasses.asdict(bench.shape),
        "schedule": lora.schedule,
        "rank": RANK,
        "ranks": lora.ranks,
        "steps": lora.steps,
        "contenders": {name: row(name, seconds, found["bytes"]) for name in CONTENDERS},
    }


def row(name: str, seconds: dict[str, list[float]], nbytes: dict[str, dict[str, int]]) -> dict[str, Any]:
    """One contender, and over full fine-tuning."""
    own, full = nbytes[name], nbytes[FULL]
    return {
        "step_ms": 1e3 * statistics.median(seconds[name]),
        "over_full": report.ratios(seconds[name], seconds[FULL]),
        **own,
        "wire_over_full": own["wire_bytes"] / full["wire_bytes"] if full["wire_bytes"] else None,
        "peak_over_full": own["peak_bytes"] / full["peak_bytes"],
        "planned_over_peak": own["planned_bytes"] / own["peak_bytes"],
    }


def show(found: dict[str, Any], console: Console) -> None:
    """A row for each contender."""
    console.print(
        f"config {found['config']}, {found['ranks']} rank(s), {found['schedule']}, fp32, adapters of rank "
        f"{found['rank']}; {found['steps']} interleaved steps, medians. Memory: the most live tensors of a rank",
        highlight=False,
        soft_wrap=True,
    )
    rows: tables.Rows = {}
    for name, each in found["contenders"].items():
        over, off = each["over_full"], each["planned_over_peak"] - 1
        wire = each["wire_over_full"]
        rows[name] = {
            "step ms": f"{each['step_ms']:.1f}",
            "over full": f"{over['median']:.3f}",
            "p10 - p90": f"{over['p10']:.3f} - {over['p90']:.3f}",
            "sent MiB": tables.mib(each["wire_bytes"]),
            "over full ": "" if wire is None else f"{wire:.3f}",
            "memory MiB": tables.mib(each["peak_bytes"]),
            "over full  ": f"{each['peak_over_full']:.3f}",
            "planned MiB": tables.mib(each["planned_bytes"]),
            "off": f"{off:+.1%}{'' if abs(off) <= GOAL else ' MISSED'}",
        }
    console.print(tables.table("per step and rank", rows))
    tables.footer(found, console)
