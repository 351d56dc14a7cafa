"""`python -m train bench control`: a CPU cluster as a control of the planner. Ten steps, predicted before they run.

    for each cluster, so many ranks and a link:    calibrate
    for each step:                                 plan, and write down
    for each cluster:                              run its steps in turn; calibrate again

Clusters are this machine's cores: ranks are pinned, several to a core where there are more ranks than cores, and some
talk over a slower link, for which root may make a network namespace on Linux. A cluster is calibrated as it is used: as
many ranks at a time, on the same cores and the same link. Nothing is fitted to the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import yafsdp_fn as ya
from models import families, llama, mixtral
from train.bench import harness, names
from train.bench.contenders import Batch, Ours, adamw
from train.bench.options import SHAPES, Timed
from train.bench.report import Rows, apart, spread, table, write
from yafsdp_fn.planner import Cluster, Plan

CALIBRATIONS = 3
"""Calibrations of each cluster before the steps; of each figure the median counts."""
GOAL = 0.07
"""Goal of the median error."""
PRIORITY = "-19"


class Where(NamedTuple):
    """A cluster of this machine. ranks: processes; mbit: of the link that they share, Mbit/s; 0: the machine's own"""

    ranks: int
    mbit: int = 0

    def __str__(self) -> str:
        return f"{self.ranks} ranks{f', {self.mbit} Mbit/s' * bool(self.mbit)}"


class Step(NamedTuple):
    """A training step in fp32 with AdamW. schedule: as `python -m train bench --schedules` has it, 1F1B of it where
    there are stages; rows: of the batch of a rank, or of the ranks with the same place in each stage"""

    config: Any
    schedule: str
    where: Where
    rows: int = 1
    microbatches: int = 1
    stages: int = 1

    def parts(self, rank: int) -> tuple[Any, Any, Batch, dict[str, Any]]:
        """Loss, parameters, the batch of a rank, and the options of a step."""
        family, config = families.of(self.config), self.config
        made: Any = names.make(self.schedule, config.layers)
        made = ya.schedules.one_f_one_b(made) if self.stages > 1 else made
        generator = torch.Generator().manual_seed(rank if self.stages == 1 else 0)
        text = torch.randint(config.vocab, (self.rows, config.max_length + 1), generator=generator)
        batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
        options = {"schedule": made, "microbatches": self.microbatches}
        return family.loss(config), family.params(config), batch, options

    def plan(self, cluster: Cluster) -> Plan:
        *model, options = self.parts(0)
        options |= {"ranks": self.where.ranks, "stages": self.stages, "kernels": "eager", "device": "cpu"}
        replicate = names.mesh(self.schedule, self.where.ranks).get("replicate")
        return ya.planner.plan(*model, tx=adamw(), cluster=cluster, replicate=replicate, **options)

    def runs(self) -> Running:
        """The step in this process group."""
        (loss, params, batch, options), tx = self.parts(dist.get_rank()), adamw()
        sizes, more = names.mesh(self.schedule, self.where.ranks), dict[str, Any]()
        if self.stages > 1:
            trace = ya.planner.trace(loss, params, batch, microbatches=self.microbatches, tx=tx, device="cpu")
            sizes, more = {"stage": self.stages}, {"stages": ya.schedules.assign(trace, self.stages)}
        state = ya.init(params, tx, mesh=ya.mesh(device="cpu", **sizes), seed=0, **more)
        return Running(state, ya.train_step(loss, tx, **options), own=batch)


@dataclasses.dataclass
class Running(Ours):
    """A step with a batch of its own."""

    own: Batch = dataclasses.field(default_factory=dict)

    def step(self, batch: Batch) -> float:
        return super().step(self.own)


A = SHAPES["A"].llama()
DEEP = llama.Config(vocab=2048, embed=384, ffn=1024, layers=8, heads=6, kv_heads=2, head_dim=64, max_length=512)
WIDE = llama.Config(vocab=256, embed=768, ffn=2048, layers=4, heads=12, kv_heads=12, head_dim=64, max_length=128)
LIKE: dict[str, Any] = {"vocab": 512, "embed": 384, "ffn": 768, "layers": 4, "heads": 6, "kv_heads": 6, "head_dim": 64}
EXPERTS = mixtral.Config(**LIKE, max_length=256, experts=4)
TWO, FOUR, SLOW, SLOWER = Where(2), Where(4), Where(2, 2000), Where(2, 1000)
STEPS = {
    "zero3": Step(A, "zero3", TWO, rows=2),
    "replicas": Step(WIDE, "ddp", TWO, rows=4, microbatches=4),
    "1F1B": Step(A, "zero1", TWO, rows=4, microbatches=4, stages=2),
    "experts": Step(EXPERTS, "zero2", TWO, rows=4, microbatches=2),
    "four ranks": Step(DEEP, "zero3-remat", FOUR),
    "groups of two": Step(A, "hsdp", FOUR, rows=1),
    "kept layers": Step(WIDE, "zero3-resident2", FOUR, rows=2, microbatches=2),
    "slow link": Step(A, "zero3", SLOW, rows=2),
    "slow link, gradients once": Step(WIDE, "zero1", SLOW, rows=4, microbatches=4),
    "slower link": Step(DEEP, "zero2", SLOWER, rows=2, microbatches=2),
}


@dataclasses.dataclass(frozen=True)
class Control(Timed):
    """Predict ten steps from calibrations of this machine, run them, and compare."""

    only: tuple[str, ...] = ()
    """Some of the steps, by name; default all."""
    steps: int = 7
    """Timed rounds; the median counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.only:
            if name not in STEPS:
                raise ValueError(f"--only {name!r}: expected some of {', '.join(map(repr, STEPS))}")
        if not hasattr(os, "sched_setaffinity"):
            raise ValueError("bench control pins its ranks to cores, which this system cannot: run it on Linux")


# ---- On the ranks.


def pin(rank: int, ranks: int) -> None:
    """Pins all threads of this process to its part of the cores, neighbours sharing one where there are too few, ahead
    of other processes where the system allows that."""
    cores = sorted(os.sched_getaffinity(0))
    first = rank * len(cores) // ranks
    own = cores[first : max(first + 1, (rank + 1) * len(cores) // ranks)]
    for thread in os.listdir("/proc/self/task"):  # gloo's, too
        os.sched_setaffinity(int(thread), own)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, 0, int(PRIORITY))
        Path("/proc/self/autogroup").write_text(PRIORITY)  # what counts where sessions are scheduled as groups


def on_rank(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """Calibrations before the steps, or steps, and a calibration after them. schedule: which"""
    pin(dist.get_rank(), task.ranks)
    where, seconds = STEPS[task.everybody[0]].where, {}
    if task.schedule == "steps":
        seconds = harness.in_turn(task, {name: STEPS[name].runs() for name in task.contenders}, [{}], device)["seconds"]
    per_node, times = 1 if where.mbit else None, 1 if seconds else CALIBRATIONS
    clusters = [vars(ya.planner.calibrate(str(where), device="cpu", per_node=per_node)) for _ in range(times)]
    return {"clusters": clusters, "seconds": seconds}


# ---- The command.


@contextlib.contextmanager
def throttled(mbit: int) -> Iterator[list[str]]:
    """The beginning of commands that run in a network namespace whose only link, both ways together, carries `mbit`
    Mbit/s. Raises OSError or SubprocessError where there can be none."""
    name = f"slow-{os.getpid()}"
    shape = f"tc -n {name} qdisc add dev lo root tbf rate {mbit}mbit burst {max(256, mbit // 8)}kb latency 500ms"
    try:
        for command in (f"ip netns add {name}", f"ip -n {name} link set lo up", shape):
            subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
        yield ["ip", "netns", "exec", name]
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


def middle(clusters: list[dict[str, Any]]) -> Cluster:
    """The cluster of the medians of figures."""
    return Cluster(**{key: sorted(each[key] for each in clusters)[len(clusters) // 2] for key in clusters[0]})


def measure(options: Control, console: Console) -> dict[str, Any]:
    """Clusters, predictions and measurements; predictions are in --save before anything runs. Raises RankFailed."""
    wanted = {name: STEPS[name] for name in options.only or STEPS}
    clusters, skipped = dict[Where, list[dict[str, Any]]](), dict[str, str]()

    def run(what: str, where: Where) -> dict[str, Any]:
        mine = [name for name, step in wanted.items() if step.where == where]
        link: Any = throttled(where.mbit) if where.mbit else contextlib.nullcontext(())
        with console.status(f"{what} on {where}"), link as within:
            of = {"ranks": where.ranks, "schedule": what, "shape": SHAPES["tiny"]}  # each step has a shape of its own
            return harness.run(f"{__name__}:on_rank", mine, tuned=mine, within=within, **of, **options.turns)

    for where in dict.fromkeys(step.where for step in wanted.values()):
        try:
            clusters[where] = run("calibrations", where)["clusters"]
        except (OSError, subprocess.SubprocessError) as error:
            if not where.mbit:
                raise
            skipped[str(where)] = f"no link of {where.mbit} Mbit/s: {error}"
    steps: dict[str, Any] = {}
    for name, step in wanted.items():
        if step.where in clusters:
            plan = step.plan(middle(clusters[step.where]))
            steps[name] = {"where": str(step.where), "predicted_s": plan.step_s, "range_s": plan.range_s}
    found: dict[str, Any] = {
        "clusters": {str(where): each for where, each in clusters.items()},
        "skipped": skipped,
        "steps": steps,
    }
    found |= {"predicted": datetime.datetime.now(datetime.UTC).isoformat(), "after": {}}
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        write(options.save, found)
    for where in clusters:
        ran = run("steps", where)
        found["after"][str(where)] = ran["clusters"][0]
        for name, seconds in ran["seconds"].items():
            steps[name] |= {"measured": datetime.datetime.now(datetime.UTC).isoformat(), "measured_s": spread(seconds)}
    return found


def show(options: Control, found: dict[str, Any]) -> Iterable[str | Table]:
    """A row for each step; what calibrations were before and after."""
    rows, errors, figures = Rows(), [], ("matmul_flops", "attention_flops", "memory_bandwidth", "network_bandwidth")
    for name, each in found["steps"].items():
        step, (low, high), took = STEPS[name], each["range_s"], each["measured_s"]
        errors.append(each["predicted_s"] / took["median"] - 1)
        rows[name] = {
            "step": f"{step.schedule}{f' in {step.stages} stages' * (step.stages > 1)}",
            "microbatches": str(step.microbatches),
            "model": f"{step.config.layers} x {step.config.embed}, {step.rows} x {step.config.max_length} tokens",
            "on": each["where"],
            "predicted, s": f"{each['predicted_s']:.3f}",
            "range": f"{low:.2f} - {high:.2f}{'' if low <= took['median'] <= high else ' OUTSIDE'}",
            "measured, s": f"{took['median']:.3f}",
            "p10 - p90": apart(took),
            "error": f"{errors[-1]:+.1%}",
        }
    yield f"fp32, AdamW, medians of {options.steps} steps; predicted before any ran, {found['predicted']}"
    if rows:
        yield table("step", rows)
        error = statistics.median(map(abs, errors))
        yield f"median error {error:.1%}{' MISSED' * (error > GOAL)} (goal: {GOAL:.0%}, and all inside their range)"
    for where, before in found["clusters"].items():
        known, after = vars(middle(before)), found["after"][where]
        yield f"{where}: " + ", ".join(
            f"{key} {known[key]:.3g}, after {after[key] / known[key] - 1:+.0%}" for key in figures
        )
    yield from (f"skipped: {where}: {why}" for where, why in found["skipped"].items())
