"""`python -m train bench saves`: steps beside a save that a thread writes, and what saves and loads take.

    plain      steps, one after the other
    beside     `Saver.save`, and steps until the files are written and published
    memory     `PeerMemory.save`, the same
    save       `checkpoint.save`, which waits
    load       `checkpoint.load`, digests compared; recover: `PeerMemory.load`

Rounds take the first three in turn. Files are written to the folder of temporary files, `$TMPDIR`.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import yafsdp_fn as ya
from models.llama import model as llama
from train.bench import launch, report, schedules, tables
from train.bench.contenders import ADAMW, LEARNING_RATE, Ours
from train.bench.options import Shape
from train.bench.variants import Variants
from yafsdp_fn import checkpoint

GOAL = 1.05
"""Of a step beside a save, over a plain one."""
WAYS = ("plain", "beside", "memory")


@dataclasses.dataclass(frozen=True)
class Saves(Variants):
    """Time steps beside saves, and saves and loads alone."""

    ranks: int = 2
    """Rank processes, with gloo."""
    steps: int = 4
    """Rounds."""


def build(shape: Shape, schedule: str, *, seed: int, device: torch.device) -> Ours:
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    mesh = ya.mesh(device=device.type, **schedules.mesh(schedule, dist.get_world_size()))
    state = ya.init(llama.params(shape.llama()), tx, mesh=mesh, seed=seed)
    made = schedules.make(schedule, shape.layers)
    return Ours(state, ya.train_step(llama.loss(shape.llama()), tx, schedule=made))


def run(task: Any, device: torch.device, batches: Sequence[Any]) -> dict[str, Any]:
    """On one rank: seconds of steps by way, of the saves, and of what they wrote."""
    (schedule,) = task.contenders
    ours = build(task.shape, schedule, seed=task.seed, device=device)
    folder = Path(task.result).parent / "saves"  # temporary, and every rank's
    host = tempfile.TemporaryDirectory(dir="/dev/shm")  # of each rank: every rank is a host
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    others: dict[str, list[float]] = {"copy": [], "written": [], "save": [], "load": [], "recover": []}

    def clocked(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def step() -> float:
        return clocked(lambda: ours.step(batches[ours.state.step % len(batches)]))

    with host, checkpoint.Saver(folder / "disk", keep_last=1) as disk, checkpoint.PeerMemory(host.name) as memory:
        for round_ in range(-task.warmup, task.steps):
            found = {"plain": [step() for _ in range(2)]}
            for way, saver in (("beside", disk), ("memory", memory)):
                begun = time.perf_counter()
                copy = clocked(partial(saver.save, ours.state))
                took = [copy + step()]
                while _busy(saver):
                    took.append(step())
                saver.wait()
                found[way] = [sum(took) / len(took)]
                if round_ >= 0 and way == "beside":
                    others["copy"].append(copy)
                    others["written"].append(time.perf_counter() - begun)
            if round_ >= 0:
                for way, each in found.items():
                    seconds[way].append(sum(each) / len(each))
        for _ in range(task.steps):
            others["save"].append(clocked(lambda: checkpoint.save(folder / "waits", ours.state, keep_last=1)))
            like = ours.state.copy()
            others["load"].append(clocked(partial(checkpoint.load, folder / "waits", like)))
            like = ours.state.copy()
            others["recover"].append(clocked(partial(memory.load, like)))
        nbytes = sum(path.stat().st_size for path in (folder / "disk").rglob("*") if path.is_file())
    return {"seconds": seconds, "others": others, "bytes": nbytes}


def _busy(saver: checkpoint.Saver) -> bool:
    """Whether some rank still writes: all of them take the next step, or none does."""
    flag = torch.tensor([saver.busy], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def measure(options: Saves, command: str, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed."""
    with console.status(f"saving beside steps on {options.ranks} rank(s)"):
        found = launch.run("saves", (options.schedule,), options.bench(options.ranks))
    plain = found["seconds"]["plain"]
    return {
        **report.heading(command),
        "config": options.config,
        "ranks": options.ranks,
        "schedule": options.schedule,
        "rounds": options.steps,
        "bytes": found["bytes"],
        "step_ms": {way: 1e3 * statistics.median(each) for way, each in found["seconds"].items()},
        "over_plain": {way: report.ratios(each, plain) for way, each in found["seconds"].items()},
        "ms": {what: 1e3 * statistics.median(each) for what, each in found["others"].items()},
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Steps, then what else was timed."""
    console.print(
        f"config {found['config']}, {found['ranks']} rank(s), {found['schedule']}, fp32; {found['rounds']} rounds, "
        f"medians; a checkpoint has {tables.mib(found['bytes'])} MiB",
        highlight=False,
        soft_wrap=True,
    )
    rows: tables.Rows = {}
    for way, over in found["over_plain"].items():
        missed = " MISSED" if way == "beside" and over["median"] > GOAL else ""
        rows[way] = {
            "step ms": f"{found['step_ms'][way]:.1f}",
            "ratio": f"{over['median']:.3f}{missed}",
            "p10 - p90": f"{over['p10']:.3f} - {over['p90']:.3f}",
        }
    console.print(tables.table("steps", rows))
    ms = found["ms"]
    console.print(
        f"the step waits {ms['copy']:.1f} ms for the copy; it is on the disk after {ms['written']:.1f} ms. A save that "
        f"waits: {ms['save']:.1f} ms, a load: {ms['load']:.1f} ms, from memory {ms['recover']:.1f} ms",
        highlight=False,
        soft_wrap=True,
    )
    tables.footer(found, console)
