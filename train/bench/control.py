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
from train.bench.report import Rows, spread, table, write
from yafsdp_fn.planner import Cluster, Plan

CALIBRATIONS = 3
"""Of each cluster before the steps; of each figure the median counts."""
GOAL = 0.07
"""Goal of the median error."""
PRIORITY = -19


class Where(NamedTuple):
    """A cluster of this machine. ranks: processes; mbit: of the link that they share, Mbit/s; 0: the machine's own"""

    ranks: int
    mbit: int = 0

    def __str__(self) -> str:
        return f"{self.ranks} ranks{f', {self.mbit} Mbit/s' * bool(self.mbit)}"

    def within(self) -> contextlib.AbstractContextManager[list[str]]:
        """The place of its ranks, as `harness.run` takes it."""
        return throttled(self.mbit) if self.mbit else contextlib.nullcontext([])


class Step(NamedTuple):
    """A training step in fp32 with AdamW. schedule: as `python -m train bench --schedules` has it, 1F1B of it where
    there are stages; rows: of the batch of a rank, or of the ranks with the same place in each stage"""

    config: Any
    schedule: str
    where: Where
    rows: int = 1
    microbatches: int = 1
    stages: int = 1

    def _made(self) -> Any:
        made: Any = names.make(self.schedule, self.config.layers)
        return ya.schedules.one_f_one_b(made) if self.stages > 1 else made

    def plan(self, cluster: Cluster) -> Plan:
        family = families.of(self.config)
        mesh = names.mesh(self.schedule, self.where.ranks)
        return ya.planner.plan(
            family.loss(self.config),
            family.params(self.config),
            self.batch(0),
            tx=adamw(),
            ranks=self.where.ranks,
            cluster=cluster,
            schedule=self._made(),
            microbatches=self.microbatches,
            stages=self.stages,
            replicate=mesh.get("replicate"),
            kernels="eager",
            device="cpu",
        )

    def batch(self, rank: int) -> Batch:
        """The tokens of a rank: random ones."""
        generator = torch.Generator().manual_seed(rank)
        text = torch.randint(self.config.vocab, (self.rows, self.config.max_length + 1), generator=generator)
        return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}

    def runs(self) -> Running:
        """The step in this process group."""
        family, tx, batch = families.of(self.config), adamw(), self.batch(dist.get_rank() if self.stages == 1 else 0)
        loss, params, more = family.loss(self.config), family.params(self.config), dict[str, Any]()
        if self.stages > 1:
            trace = ya.planner.trace(loss, params, batch, microbatches=self.microbatches, tx=tx, device="cpu")
            more = {"stages": ya.schedules.assign(trace, self.stages)}
        sizes = names.mesh(self.schedule, self.where.ranks) | ({"stage": self.stages} if self.stages > 1 else {})
        state = ya.init(params, tx, mesh=ya.mesh(device="cpu", **sizes), **more)
        return Running(Ours(state, ya.train_step(loss, tx, schedule=self._made(), microbatches=self.microbatches)), batch)


class Running(NamedTuple):
    """A step with a batch of its own, behind the interface of contenders."""

    of: Ours
    own: Batch

    def step(self, batch: Batch) -> float:
        return self.of.step(self.own)

    def program(self) -> dict[str, Any]:
        return self.of.program()


A = SHAPES["A"].llama()
DEEP = llama.Config(vocab=2048, embed=384, ffn=1024, layers=8, heads=6, kv_heads=2, head_dim=64, max_length=512)
WIDE = llama.Config(vocab=256, embed=768, ffn=2048, layers=4, heads=12, kv_heads=12, head_dim=64, max_length=256)
EXPERTS = mixtral.Config(
    vocab=512, embed=384, ffn=768, layers=4, heads=6, kv_heads=6, head_dim=64, max_length=256, experts=4, chosen=2
)
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
        os.setpriority(os.PRIO_PGRP, 0, PRIORITY)
        Path("/proc/self/autogroup").write_text(str(PRIORITY))  # what counts where sessions are scheduled as groups


def _calibrated(where: Where) -> dict[str, Any]:
    return vars(ya.planner.calibrate(str(where), device="cpu", per_node=1 if where.mbit else None))


def calibrate(task: harness.Task, device: torch.device) -> dict[str, Any]:
    pin(dist.get_rank(), task.ranks)
    return {"clusters": [_calibrated(STEPS[task.everybody[0]].where) for _ in range(CALIBRATIONS)]}


def step(task: harness.Task, device: torch.device) -> dict[str, Any]:
    pin(dist.get_rank(), task.ranks)
    contenders = {name: STEPS[name].runs() for name in task.contenders}
    found = harness.in_turn(task, contenders, [{}], device)
    return {"seconds": found["seconds"], "after": _calibrated(STEPS[task.everybody[0]].where)}


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


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def middle(clusters: list[dict[str, Any]]) -> Cluster:
    """The cluster of the medians of figures."""
    figures = {key: [each[key] for each in clusters] for key in clusters[0]}
    return Cluster(**{key: of[0] if len(set(of)) == 1 else statistics.median(of) for key, of in figures.items()})


def measure(options: Control, console: Console) -> dict[str, Any]:
    """Clusters, predictions and measurements; predictions are in --save before anything runs. Raises RankFailed."""
    wanted = {name: STEPS[name] for name in options.only or STEPS}
    found: dict[str, Any] = {"clusters": {}, "skipped": {}}

    def run(work: str, where: Where) -> dict[str, Any]:
        mine = [name for name, step in wanted.items() if step.where == where]
        with console.status(f"{work} on {where}"), where.within() as within:
            malloc = {"tuned": mine, "within": within}
            more = {"ranks": where.ranks, "shape": SHAPES["tiny"], **malloc, **options.turns}  # each has its own shape
            return harness.run(f"{__name__}:{work}", mine, **more)

    for where in dict.fromkeys(step.where for step in wanted.values()):
        try:
            found["clusters"][where] = run("calibrate", where)["clusters"]
        except (OSError, subprocess.SubprocessError) as error:
            found["skipped"][str(where)] = f"no link of {where.mbit} Mbit/s: {error}"
    clusters = {where: middle(each) for where, each in found["clusters"].items()}
    found["steps"] = {
        name: {"where": str(step.where), **predicted(step.plan(clusters[step.where]))}
        for name, step in wanted.items()
        if step.where in clusters
    }
    found |= {"predicted": _now(), "clusters": {str(where): each for where, each in found["clusters"].items()}}
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        write(options.save, found)
    found["after"] = {}
    for where in clusters:
        ran = run("step", where)
        found["after"][str(where)] = ran["after"]
        for name, seconds in ran["seconds"].items():
            found["steps"][name] |= {"measured": _now(), "measured_s": spread(seconds)}
    return found


def predicted(plan: Plan) -> dict[str, Any]:
    return {"predicted_s": plan.step_s, "range_s": plan.range_s, "work": plan.work._asdict()}


def errors(found: dict[str, Any]) -> dict[str, float]:
    """How much longer each step was predicted to take than it did, relative to that."""
    return {name: each["predicted_s"] / each["measured_s"]["median"] - 1 for name, each in found["steps"].items()}


def show(options: Control, found: dict[str, Any]) -> Iterable[str | Table]:
    """A row for each step; what calibrations were before and after."""
    rows: Rows = {}
    for name, error in errors(found).items():
        each, step = found["steps"][name], STEPS[name]
        low, high = each["range_s"]
        took = each["measured_s"]
        inside = "" if low <= took["median"] <= high else " OUTSIDE"
        rows[name] = {
            "step": f"{step.schedule}, {step.microbatches} microbatches{f', {step.stages} stages' * (step.stages > 1)}",
            "model": f"{step.config.layers} x {step.config.embed}, {step.rows} x {step.config.max_length} tokens",
            "on": each["where"],
            "predicted s": f"{each['predicted_s']:.3f}",
            "range": f"{low:.3f} - {high:.3f}{inside}",
            "measured s": f"{took['median']:.3f}",
            "p10 - p90": f"{took['p10']:.3f} - {took['p90']:.3f}",
            "error": f"{error:+.1%}",
        }
    yield f"fp32, AdamW, a thread a rank; all predicted at {found['predicted']}, before the first ran; {options.steps} steps each"
    if rows:
        yield table("step", rows)
        middle_error = statistics.median(map(abs, errors(found).values()))
        yield f"median error {middle_error:.1%}{' MISSED' * (middle_error > GOAL)} (goal: {GOAL:.0%}, and all inside their range)"
    shown = ("matmul_flops", "attention_flops", "memory_bandwidth", "network_bandwidth")
    for where, before in found["clusters"].items():
        known, after = vars(middle(before)), found["after"][where]
        yield f"{where}: " + ", ".join(f"{key} {known[key]:.3g}, after {after[key] / known[key] - 1:+.0%}" for key in shown)
    yield from (f"skipped: {where}: {why}" for where, why in found["skipped"].items())
