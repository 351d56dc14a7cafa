"""`python -m train bench stages`: a step across pipeline stages against torch.distributed.pipelining, in turn.

    1f1b                 ours, one segment a stage         torch-1f1b           Schedule1F1B
    interleaved          ours, two segments a stage        torch-interleaved    ScheduleInterleaved1F1B
    1f1b-shard2          ours, two ranks a stage           torch-1f1b-fsdp2     Schedule1F1B of segments with FSDP2

All train one Llama on one batch, in the same microbatches of one sequence: the same blocks, cut at the same layers, and
AdamW. Each of ours is followed by the peer that it is compared with.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

import yafsdp_fn as ya
from models.llama import model as llama
from train.bench import launch, report, schedules, tables
from train.bench.contenders import ADAMW, LEARNING_RATE, Batch, Ours, Stepper
from train.bench.options import Bench, Shape
from train.bench.peer_model import materialize
from train.bench.stage_peer import Pipelined
from yafsdp_fn.schedules.stages.cut import cut

GOAL = 1.0
"""Of a step, over the peer's."""


class Way(NamedTuple):
    """How many segments a stage has, and how many ranks; peer: what it is compared with"""

    peer: str
    per_stage: int = 1
    shard: int = 1


WAYS = {
    "1f1b": Way("torch-1f1b"),
    "interleaved": Way("torch-interleaved", per_stage=2),
    "1f1b-shard2": Way("torch-1f1b-fsdp2", shard=2),
}


def contenders(ranks: int) -> tuple[str, ...]:
    """Ours, each with its peer, that so many ranks can be."""
    return tuple(name for way, of in WAYS.items() if ranks >= 2 * of.shard for name in (way, of.peer))


@dataclasses.dataclass(frozen=True)
class Stages:
    """Time steps across pipeline stages, ours and torch's, interleaved, with their memory."""

    config: Literal["A", "B", "C", "tiny"] = "A"
    """The model, as in `python -m train bench`."""
    schedule: str = "zero1"
    """Of each stage, ours, as in `python -m train bench --schedules`. zero1 gathers weights and reduces gradients once
    a step, as FSDP2 does in torch's stages; with one rank a stage there is nothing to choose."""
    ranks: tuple[int, ...] = (2, 4)
    """Rank processes, with gloo: one run for each number, as many stages; 1f1b-shard2 has half as many."""
    microbatches: int = 2
    """Sequences for each rank, each a microbatch: as many microbatches as stages, times this."""
    steps: int = 10
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
        for ranks in self.ranks:
            visits = self.bench(ranks).shape.layers + 2
            if ranks % 2 or 2 * ranks > visits:
                raise ValueError(
                    f"--ranks {ranks} with --config {self.config}: expected an even number of ranks, and no more than "
                    f"{visits // 2}, since interleaved stages have two segments of its {visits} visits"
                )
        if not self.ranks:
            raise ValueError("--ranks: expected at least one number of ranks")

    def bench(self, ranks: int) -> Bench:
        return Bench(
            config=self.config,
            schedules=(self.schedule,),
            peers=("ddp",),  # not built: a `Bench` wants two
            batch=self.microbatches,
            microbatches=self.microbatches,
            ranks=ranks,
            steps=self.steps,
            warmup=self.warmup,
            timeout=self.timeout,
        )


@dataclasses.dataclass
class Part:
    """A contender that takes its part of a batch, of so many ranks of a stage."""

    of: Stepper
    rank: int
    ranks: int

    def step(self, batch: Batch) -> float:
        return self.of.step({key: leaf.chunk(self.ranks)[self.rank] for key, leaf in batch.items()})


def build(name: str, schedule: str, shape: Shape, *, seed: int, device: torch.device) -> Part:
    """One contender; all begin with the same weights. shape: of the whole batch"""
    way, of = next((way, of) for way, of in WAYS.items() if name in (way, of.peer))
    ranks, config = dist.get_world_size(), shape.llama()
    stages, microbatches = ranks // of.shard, shape.batch // of.shard
    loss, params = llama.loss(config), llama.params(config)
    tokens = torch.zeros(1, shape.seq, dtype=torch.int64)
    trace = ya.trace(loss, params, {"tokens": tokens, "targets": tokens})
    assignment = ya.assign(trace, stages, per_stage=of.per_stage)
    part = dist.get_rank() % of.shard, of.shard
    if name == of.peer:
        split = cut(trace, assignment).split
        assert split is not None
        whole = materialize(config, seed=seed, device=device)
        more: Any = {"microbatches": microbatches, "shard": of.shard, "device": device}
        return Part(Pipelined(config, whole, split.segments, split.homes, **more), *part)
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    state = ya.init(params, tx, mesh=ya.mesh(device=device.type, stage=stages), seed=seed, stages=assignment)
    order = ya.schedules.interleaved if way == "interleaved" else ya.schedules.one_f_one_b
    made: Any = order(schedules.make(schedule, shape.layers))
    step = ya.train_step(loss, tx, schedule=made, microbatches=microbatches, skip_nonfinite=False)
    return Part(Ours(state, step), *part)


def measure(options: Stages, command: str, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed and LossesDiffer."""
    by_ranks: dict[str, Any] = {}
    for ranks in options.ranks:
        bench, names = options.bench(ranks), contenders(ranks)
        shape = dataclasses.replace(bench.shape, batch=ranks * options.microbatches)
        with console.status(f"timing {', '.join(names)} in turn on {ranks} ranks"):
            found = launch.run("stages", (options.schedule,), bench, shape)
        report.check_losses(found["losses"])
        by_ranks[str(ranks)] = {
            name: {
                "step_ms": report.spread([1e3 * s for s in found["seconds"][name]]),
                "cpu_ms": report.spread([1e3 * s for s in found["cpu_seconds"][name]]),
                **found["bytes"][name],
                **({} if name not in WAYS else _over(WAYS[name].peer, name, found)),
            }
            for name in names
        }
    return {
        **report.heading(command),
        "config": options.config,
        "shape": dataclasses.asdict(options.bench(2).shape),
        "schedule": options.schedule,
        "microbatches_per_stage": options.microbatches,
        "steps": options.steps,
        "ranks": by_ranks,
    }


def _over(peer: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "over_peer": report.ratios(found["seconds"][name], found["seconds"][peer]),
        "peak_over_peer": found["bytes"][name]["peak_bytes"] / found["bytes"][peer]["peak_bytes"],
    }


def show(found: dict[str, Any], console: Console) -> None:
    """A table for each number of ranks."""
    console.print(
        f"config {found['config']}, fp32, AdamW; microbatches of one sequence of {found['shape']['seq']} tokens, "
        f"{found['microbatches_per_stage']} times the ranks in all; ours: {found['schedule']} in each stage; "
        f"{found['steps']} interleaved steps, medians. Ratios: over the line below. Memory: the most live tensors of a "
        "rank",
        highlight=False,
        soft_wrap=True,
    )
    for ranks, ways in found["ranks"].items():
        rows: tables.Rows = {}
        for name, each in ways.items():
            over = each.get("over_peer")
            missed = " MISSED" if over and over["median"] > GOAL else ""
            rows[name] = {
                "step ms": f"{each['step_ms']['median']:.1f}",
                "ratio": f"{over['median']:.3f}{missed}" if over else "",
                "p10 - p90": f"{over['p10']:.3f} - {over['p90']:.3f}" if over else "",
                "CPU ms": f"{each['cpu_ms']['median']:.1f}",
                "memory MiB": tables.mib(each["peak_bytes"]),
                "ratio ": f"{each['peak_over_peer']:.3f}" if over else "",
            }
        console.print(tables.table(f"{ranks} ranks", rows))
    tables.footer(found, console)
