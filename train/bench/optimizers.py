"""`python -m train bench optimizers`: AdamW against Muon, in turn, on one rank and on several.

    adamw     a fused kernel
    muon      matrices of layers by Muon, iterations in fp32; the rest by AdamW

Each matrix is orthogonalised once, whatever the number of ranks: on two, Muon should add half of what it adds on one.
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

CONTENDERS = ("adamw", "muon")
GOAL_SHARE, GOAL_RATIO = 0.55, 1.2
"""Of what Muon adds to a step on one rank, on two; of a step of many tokens, over AdamW's."""


@dataclasses.dataclass(frozen=True)
class Optimizers(Variants):
    """Time steps of AdamW and of Muon interleaved, with their memory and messages."""

    ranks: tuple[int, ...] = (1, 2)
    """Rank processes, with gloo: one run for each number."""


def build(name: str, schedule: str, shape: Shape, *, seed: int, device: torch.device) -> Ours:
    """One contender; all begin with the same weights."""
    adamw = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    tx = adamw if name == "adamw" else ya.optim.muon(LEARNING_RATE, dtype=None, others=adamw)
    mesh = ya.mesh(device=device.type, **schedules.mesh(schedule, torch.distributed.get_world_size()))
    state = ya.init(llama.params(shape.llama(), pin_norms=True), tx, mesh=mesh, seed=seed)
    made = schedules.make(schedule, shape.layers)
    return Ours(state, ya.train_step(llama.loss(shape.llama()), tx, schedule=made, skip_nonfinite=False))


def measure(options: Optimizers, command: str, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed."""
    by_ranks = {ranks: variants.measure("optimizers", options, ranks, CONTENDERS, console) for ranks in options.ranks}
    adds = {ranks: rows["muon"]["adds_ms"]["median"] for ranks, rows in by_ranks.items()}
    return {
        **report.heading(command),
        "config": options.config,
        "shape": dataclasses.asdict(options.bench(1).shape),
        "schedule": options.schedule,
        "steps": options.steps,
        "ranks": {str(ranks): rows for ranks, rows in by_ranks.items()},
        "muon_adds_ms": {str(ranks): each for ranks, each in adds.items()},
        "muon_adds_over_one_rank": {str(ranks): each / adds[1] for ranks, each in adds.items()} if 1 in adds else {},
    }


def show(found: dict[str, Any], console: Console) -> None:
    """A table for each number of ranks, and what Muon adds."""
    shape = found["shape"]
    console.print(
        f"config {found['config']}, {shape['batch'] * shape['seq']:,} tokens a rank, {found['schedule']}, fp32; "
        f"{found['steps']} interleaved steps, medians. Memory: the most live tensors of a rank",
        highlight=False,
        soft_wrap=True,
    )
    for ranks, rows in found["ranks"].items():
        variants.show(f"per step and rank, {ranks} rank(s)", rows, console)
    for ranks, adds in found["muon_adds_ms"].items():
        share = found["muon_adds_over_one_rank"].get(ranks)
        over = "" if share is None else f", {share:.2f} of what it adds on one"
        missed = " MISSED" if ranks == "2" and share is not None and share > GOAL_SHARE else ""
        console.print(f"Muon adds {adds:.1f} ms on {ranks} rank(s){over}{missed}", highlight=False)
    tables.footer(found, console)
