"""`python -m benchmarks saves`: steps beside a save that a thread writes, and what saves and loads take.

    plain      steps, one after the other
    beside     `Saver.save`, and steps until the files are written and published
    save       `checkpoint.save`, which waits
    load       `checkpoint.load`, digests compared

Rounds take the first two in turn. Files are written to the folder of temporary files, `$TMPDIR`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import harness, names
from benchmarks.contenders import adamw, ours
from benchmarks.options import OfModel
from benchmarks.report import Rows, apart, mib, ratios, table
from models.llama import model as llama
from yafsdp_fn import checkpoint

GOAL = 1.05
"""Goal of a step beside a save, over a plain one."""
WAYS = ("plain", "beside")


@dataclasses.dataclass(frozen=True)
class Saves(OfModel):
    """Time steps beside saves, and saves and loads alone."""

    schedule: str = "zero3"
    """Ours, as in `python -m benchmarks --schedules`."""
    ranks: int = 2
    """Rank processes, with gloo."""
    steps: int = 4
    """Rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names.check(self.schedule, ranks=self.ranks, layers=self.shape.layers)


def rank(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """Seconds of steps by way, of the saves, and of what they wrote: those of the slowest rank."""
    tx, batches = adamw(), task.batches(device)
    params = llama.params(task.shape.llama())
    contender = ours(task.schedule, task.shape, params, tx, seed=task.seed, device=device, skip_nonfinite=True)
    folder = Path(task.result).parent / "saves"  # temporary, and every rank's
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    others: dict[str, list[float]] = {"copy": [], "written": [], "save": [], "load": []}

    def clocked(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def step() -> float:
        return clocked(lambda: contender.step(batches[contender.state.step % len(batches)]))

    with checkpoint.Saver(folder / "disk", keep_last=1) as saver:
        for round_ in range(-task.warmup, task.steps):
            found = {"plain": [step() for _ in range(2)]}
            begun = time.perf_counter()
            copy = clocked(partial(saver.save, contender.state))
            took = [copy + step()]
            while _busy(saver):
                took.append(step())
            saver.wait()
            found["beside"] = [sum(took) / len(took)]
            if round_ >= 0:
                others["copy"].append(copy)
                others["written"].append(time.perf_counter() - begun)
                for way, each in found.items():
                    seconds[way].append(sum(each) / len(each))
        for _ in range(task.steps):
            others["save"].append(clocked(lambda: checkpoint.save(folder / "waits", contender.state, keep_last=1)))
            others["load"].append(clocked(partial(checkpoint.load, folder / "waits", contender.state.copy())))
        nbytes = sum(path.stat().st_size for path in (folder / "disk").rglob("*") if path.is_file())
    every = harness.gathered({**seconds, **others}, task.ranks)
    worst = {name: [max(each) for each in zip(*(one[name] for one in every), strict=True)] for name in every[0]}
    return {
        "seconds": {way: worst[way] for way in seconds},
        "others": {what: worst[what] for what in others},
        "bytes": nbytes,
    }


def _busy(saver: checkpoint.Saver) -> bool:
    """Tells whether some rank still writes: all of them take the next step, or none does."""
    flag = torch.tensor([saver.busy], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def measure(options: Saves, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed."""
    with console.status(f"saving beside steps on {options.ranks} rank(s)"):
        found = harness.run(
            "benchmarks.saves:rank",
            ("saves",),
            ranks=options.ranks,
            shape=options.shape,
            schedule=options.schedule,
            **options.turns,
        )
    plain = found["seconds"]["plain"]
    return {
        "bytes": found["bytes"],
        "step_ms": {way: 1e3 * statistics.median(each) for way, each in found["seconds"].items()},
        "over_plain": {way: ratios(each, plain) for way, each in found["seconds"].items()},
        "ms": {what: 1e3 * statistics.median(each) for what, each in found["others"].items()},
    }


def show(options: Saves, found: dict[str, Any]) -> Iterator[str | Table]:
    """Steps, then what else was timed."""
    yield (
        f"config {options.config}, {options.ranks} rank(s), {options.schedule}, fp32; {options.steps} rounds, "
        f"medians; a checkpoint has {mib(found['bytes'])} MiB"
    )
    rows: Rows = {}
    for way, over in found["over_plain"].items():
        missed = " MISSED" if way == "beside" and over["median"] > GOAL else ""
        rows[way] = {
            "step ms": f"{found['step_ms'][way]:.1f}",
            "ratio": f"{over['median']:.3f}{missed}",
            "p10 - p90": apart(over),
        }
    yield table("steps", rows)
    ms = found["ms"]
    yield (
        f"the step waits {ms['copy']:.1f} ms for the copy; it is on the disk after {ms['written']:.1f} ms. A save that "
        f"waits: {ms['save']:.1f} ms, a load: {ms['load']:.1f} ms"
    )
