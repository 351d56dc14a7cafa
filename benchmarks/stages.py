"""`python -m benchmarks stages`: a step across pipeline stages against torch.distributed.pipelining, in turn.

    1f1b                 ours, one segment a stage         torch-1f1b           Schedule1F1B
    interleaved          ours, two segments a stage        torch-interleaved    ScheduleInterleaved1F1B
    1f1b-shard2          ours, two ranks a stage           torch-1f1b-fsdp2     Schedule1F1B of segments with FSDP2

All train one Llama on one batch, in the same microbatches of one sequence: the same blocks, cut at the same layers, and
AdamW. Each of ours is followed by the peer that it is compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import yafsdp_fn as ya
from benchmarks import harness, names
from benchmarks.contenders import (
    Batch,
    Llama,
    Ours,
    Part,
    adamw,
    materialize,
    peer_optimizer,
    shard_fsdp2,
)
from benchmarks.options import ConfigName, Timed
from benchmarks.report import Rows, apart, check_losses, mib, ratios, spread, table
from benchmarks.shapes import SHAPES, Shape
from models.llama import model as llama
from models.llama.config import Config
from train import schedule_names
from yafsdp_fn.schedules import cut

GOAL = 1.0
"""Goal of a step, over the peer's."""


class Way(NamedTuple):
    """A stage's number of segments, and of ranks; peer: what it is compared with"""

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
class Stages(Timed):
    """Time steps across pipeline stages, ours and torch's, interleaved, with their memory."""

    config: ConfigName = "A"
    """The model, as in `python -m benchmarks`."""
    schedule: str = "zero1"
    """Schedule of each stage, ours, as in `python -m benchmarks --schedules`. zero1 gathers weights and reduces
    gradients once a step, as FSDP2 does in torch's stages; with one rank a stage there is nothing to choose."""
    ranks: tuple[int, ...] = (2, 4)
    """Rank processes, with gloo: one run for each number, as many stages; 1f1b-shard2 has half as many."""
    microbatches: int = 2
    """Sequences for each rank, each a microbatch: as many microbatches as stages, times this."""
    steps: int = 10
    """Timed rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ranks:
            raise ValueError("--ranks: expected at least one number of ranks")
        visits = SHAPES[self.config].layers + 2
        for ranks in self.ranks:
            if ranks % 2 or 2 * ranks > visits:
                raise ValueError(
                    f"--ranks {ranks} with --config {self.config}: expected an even number of ranks, and no more than "
                    f"{visits // 2}, since interleaved stages have two segments of its {visits} visits"
                )
            names.check(self.schedule, ranks=ranks, layers=visits - 2)
        if self.microbatches < 1:
            raise ValueError(f"--microbatches {self.microbatches}: expected at least 1")


class Pipelined:
    """A step of torch's own schedule, with `torch.optim.AdamW(fused=True)`.

    segments: (first, end) of the visits of each; homes: the stage of each; several of a stage make it interleaved
    shard: ranks of a stage, between which FSDP2 cuts its weights
    """

    def __init__(
        self,
        config: Config,
        params: Any,
        segments: Sequence[tuple[int, int]],
        homes: Sequence[int],
        *,
        microbatches: int,
        shard: int,
        device: torch.device,
    ) -> None:
        ranks = max(homes) + 1
        mesh = init_device_mesh(device.type, (ranks, shard), mesh_dim_names=("stage", "shard"))
        here = mesh["stage"].get_local_rank()
        group = mesh["stage"].get_group()
        stages: list[Any] = []
        self._modules = nn.ModuleList()
        for number, (ends, home) in enumerate(zip(segments, homes, strict=True)):
            if home == here:
                module = Llama(config, params, first=ends[0], end=ends[1])
                if shard > 1:
                    shard_fsdp2(module, mesh["shard"], reshard=False)
                self._modules.append(module)
                stages.append(PipelineStage(module, number, len(segments), device, group=group))
        self._first = here == homes[0]
        self._last = here == homes[-1]
        self._stages, self._microbatches = ranks, microbatches
        options: Any = {"loss_fn": lambda loss, _: loss / microbatches, "scale_grads": False}
        self._schedule: Any
        if len(stages) == 1:
            self._schedule = Schedule1F1B(stages[0], microbatches, **options)
        else:
            self._schedule = ScheduleInterleaved1F1B(stages, microbatches, **options)
        self._optimizer = peer_optimizer(self._modules.parameters())

    def step(self, batch: Batch) -> float:
        """The mean over stages is the loss: only the last one knows it."""
        self._optimizer.zero_grad(set_to_none=True)
        tokens = (batch["tokens"],) if self._first else ()
        losses: list[Tensor] | None = [] if self._last else None
        more = {"target": batch["targets"], "targets": batch["targets"]} if self._last else {}
        self._schedule.step(*tokens, losses=losses, return_outputs=False, **more)
        self._optimizer.step()
        return self._stages * sum(loss.item() for loss in losses or ())

    def program(self) -> None:
        return None


def build(name: str, schedule: str, shape: Shape, *, seed: int, device: torch.device) -> Part:
    """One contender; all begin with the same weights. shape: of the whole batch"""
    way, of = next((way, of) for way, of in WAYS.items() if name in (way, of.peer))
    ranks = dist.get_world_size()
    config = shape.llama()
    stages = ranks // of.shard
    microbatches = shape.batch // of.shard
    loss = llama.loss(config)
    params = llama.params(config)
    tokens = torch.zeros(1, shape.seq, dtype=torch.int64)
    trace = ya.planner.trace(loss, params, {"tokens": tokens, "targets": tokens})
    assignment = ya.schedules.assign(trace, stages, per_stage=of.per_stage)
    part = dist.get_rank() % of.shard, of.shard
    if name == of.peer:
        split = cut(trace, assignment).split
        assert split is not None
        whole = materialize(config, seed=seed, device=device)
        more: Any = {"microbatches": microbatches, "shard": of.shard, "device": device}
        return Part(Pipelined(config, whole, split.segments, split.homes, **more), *part)
    tx = adamw()
    state = ya.init(params, tx, mesh=ya.mesh(device=device.type, stage=stages), seed=seed, stages=assignment)
    order = ya.schedules.interleaved if way == "interleaved" else ya.schedules.one_f_one_b
    made: Any = order(schedule_names.make(schedule, shape.layers))
    step = ya.train_step(loss, tx, schedule=made, microbatches=microbatches, skip_nonfinite=False)
    return Part(Ours(state, step), *part)


def rank(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """All ranks have one batch, of which contenders take their rank's part."""

    def built(name: str, task: harness.Task, device: torch.device) -> Part:
        return build(name, task.schedule, task.shape, seed=task.seed, device=device)

    return harness.compared(task, built, task.batches(device, rank=0), device)


def measure(options: Stages, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed and LossesDiffer."""
    by_ranks: dict[str, Any] = {}
    for ranks in options.ranks:
        them = contenders(ranks)
        shape = dataclasses.replace(SHAPES[options.config], batch=ranks * options.microbatches)
        with console.status(f"timing {', '.join(them)} in turn on {ranks} ranks"):
            found = harness.run(
                "benchmarks.stages:rank", them, ranks=ranks, shape=shape, schedule=options.schedule, **options.turns
            )
        check_losses(found["losses"])
        seconds = found["seconds"]
        peaks = found["peak_bytes"]
        by_ranks[str(ranks)] = {
            name: {
                "step_ms": spread([1e3 * s for s in seconds[name]]),
                "cpu_ms": spread([1e3 * s for s in found["cpu_seconds"][name]]),
                "peak_bytes": peaks[name],
            }
            for name in them
        }
        for name, way in WAYS.items():
            if name in them:
                by_ranks[str(ranks)][name] |= {
                    "over_peer": ratios(seconds[name], seconds[way.peer]),
                    "peak_over_peer": peaks[name] / peaks[way.peer],
                }
    return {"ranks": by_ranks}


def show(options: Stages, found: dict[str, Any]) -> Iterator[str | Table]:
    """A table for each number of ranks."""
    yield (
        f"config {options.config}, fp32, AdamW; microbatches of one sequence of {SHAPES[options.config].seq} tokens, "
        f"{options.microbatches} times the ranks in all; ours: {options.schedule} in each stage; "
        f"{options.steps} interleaved steps, medians. Ratios: over the line below. Memory: the most live tensors of a "
        "rank"
    )
    for ranks, ways in found["ranks"].items():
        rows: Rows = {}
        for name, each in ways.items():
            over = each.get("over_peer")
            missed = " MISSED" if over and over["median"] > GOAL else ""
            rows[name] = {
                "step ms": f"{each['step_ms']['median']:.1f}",
                "ratio": f"{over['median']:.3f}{missed}" if over else "",
                "p10 - p90": apart(over) if over else "",
                "CPU ms": f"{each['cpu_ms']['median']:.1f}",
                "memory MiB": mib(each["peak_bytes"]),
                "ratio ": f"{each['peak_over_peer']:.3f}" if over else "",
            }
        yield table(f"{ranks} ranks", rows)
