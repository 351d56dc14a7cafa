"""One rank of one run: `python -m train.bench.worker TASK.json`, started by `launch`, never by hand.

A task times all contenders in turn, or one beside its pure computations, or counts what one of them does. Rank 0
writes the result.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from train.bench import lora, optimizers, saves, stages, variants
from train.bench.contenders import Batch, Stepper, all_reducing, build, make_batches
from train.bench.counting import count, tensor_peak
from train.bench.floor import Pure
from train.bench.options import Device, Kind, Shape
from train.bench.processes import write
from train.bench.reading import Calls
from train.bench.sets import Turns
from train.bench.timing import Sample, interleave, slowest, timed

BATCHES = 8
"""Batches made in advance; steps go round them."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What the processes of one run do. Paths are of a temporary directory that lives as long as the command."""

    kind: Kind
    contenders: tuple[str, ...]
    everybody: tuple[str, ...]
    """Those of all sets of rank processes, in the order that turns are made of."""
    pipes: dict[str, str]
    """By contender, as `Turns` takes them."""
    shape: Shape
    ranks: int
    microbatches: int
    steps: int
    warmup: int
    device: Device
    threads: int
    seed: int
    timeout: float
    store: str
    result: str

    @classmethod
    def read(cls, path: Path) -> Task:
        fields = json.loads(path.read_text())
        several = {key: tuple(fields[key]) for key in ("contenders", "everybody")}
        return cls(**{**fields, **several, "shape": Shape(**fields["shape"])})


def gathered(value: Any, ranks: int) -> list[Any]:
    """`value` of every rank, in rank order."""
    out: list[Any] = [None] * ranks
    dist.all_gather_object(out, value)
    return out


def run_time(task: Task, device: torch.device) -> dict[str, Any]:
    """Seconds per step (wall, CPU, the main thread's CPU) of the slowest rank, and the mean of the ranks' losses."""
    contenders: dict[str, Stepper] = {
        name: build(name, task.shape, microbatches=task.microbatches, seed=task.seed, device=device)
        for name in task.contenders
    }
    batches = make_batches(task.shape, BATCHES, seed=task.seed, rank=dist.get_rank(), device=device)
    seconds, losses = in_turn(task, contenders, task.everybody, batches, device)
    return {
        **seconds,
        "losses": losses,
        "programs": {name: contender.program() for name, contender in contenders.items()},
    }


def run_growth(task: Task, device: torch.device) -> dict[str, Any]:
    """The same seconds of one contender and, as `pure`, of its computations alone."""
    (name,) = task.contenders
    contenders: dict[str, Stepper] = {
        name: build(name, task.shape, microbatches=1, seed=task.seed, device=device),
        "pure": Pure(task.shape, ranks=task.ranks, seed=task.seed, device=device),
    }
    batches = make_batches(task.shape, BATCHES, seed=task.seed, rank=dist.get_rank(), device=device)
    return in_turn(task, contenders, tuple(contenders), batches, device)[0]


def run_variants(of: Any, task: Task, device: torch.device) -> dict[str, Any]:
    """Those seconds of the contenders that the section `of` builds; and bytes, of the rank that needs most memory."""
    batches = make_batches(task.shape, BATCHES, seed=task.seed, rank=dist.get_rank(), device=device)

    def planned(contender: Any) -> dict[str, int]:
        return variants.planned(contender, batches[0])

    return compared(of, of.CONTENDERS, batches, task, device, planned)


def run_stages(task: Task, device: torch.device) -> dict[str, Any]:
    """The same of pipelines. All ranks have one batch, of which contenders take their rank's part."""
    batches = make_batches(task.shape, BATCHES, seed=task.seed, rank=0, device=device)
    return compared(stages, stages.contenders(task.ranks), batches, task, device, lambda _: {})


def compared(
    of: Any,
    names: Sequence[str],
    batches: Sequence[Batch],
    task: Task,
    device: torch.device,
    planned: Callable[[Any], dict[str, int]],
) -> dict[str, Any]:
    """Contenders in turn, then each alone for its memory. planned: bytes that one tells before its first step"""
    (schedule,) = task.contenders

    def made(name: str) -> Stepper:
        contender: Stepper = of.build(name, schedule, task.shape, seed=task.seed, device=device)
        return contender

    def stepper(name: str) -> Callable[[int], float]:
        contender = made(name)
        return lambda i: contender.step(batches[i % len(batches)])

    found = {name: made(name) for name in names}
    nbytes = {name: planned(contender) for name, contender in found.items()}
    seconds, losses = in_turn(task, found, names, batches, device)
    found.clear()
    for name, each in nbytes.items():
        peak = tensor_peak(functools.partial(stepper, name), device, task.warmup)
        each["peak_bytes"] = max(gathered(peak, task.ranks))
    return {**seconds, "losses": losses, "bytes": nbytes}


def in_turn(
    task: Task,
    contenders: Mapping[str, Stepper],
    everybody: Sequence[str],
    batches: Sequence[Batch],
    device: torch.device,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    """Seconds by clock and contender, of the slowest rank; and the mean of the ranks' losses by contender."""
    turns, losses = Turns(task.pipes, contenders, dist.get_rank()), dict[str, float]()

    def turn(name: str, round_: int) -> Sample | None:
        if not turns.mine(name):
            return None
        step = functools.partial(contenders[name].step, batches[round_ % len(batches)])
        sample, losses[name] = timed(device, step)
        return sample

    samples = interleave(everybody, turn, warmup=task.warmup, rounds=task.steps)
    per_rank = gathered((samples, losses), task.ranks)
    steps = slowest([rank_samples for rank_samples, _ in per_rank])
    seconds = {
        clock: {name: [getattr(sample, clock) for sample in found] for name, found in steps.items()}
        for clock in Sample._fields
    }
    return seconds, {name: sum(l[name] for _, l in per_rank) / task.ranks for name in contenders}


def run_count(task: Task, device: torch.device) -> dict[str, Any]:
    """The rank that needs most memory speaks for all; the other counts are rank 0's, and equal by construction."""
    shape, rank = task.shape, dist.get_rank()
    (name,) = task.contenders
    batches = make_batches(shape, BATCHES, seed=task.seed, rank=rank, device=device)

    def build_step() -> Any:
        contender = build(name, shape, microbatches=task.microbatches, seed=task.seed, device=device)
        return lambda i: contender.step(batches[i % len(batches)])

    scratch = Path(task.result).with_suffix(f".{rank}.trace.json")
    counts = dataclasses.asdict(count(build_step, device, scratch, task.warmup, all_reducing(name, task.ranks)))
    every = gathered(counts, task.ranks)
    worst = {key: max(c[key] for c in every) for key in ("peak_memory_bytes", "peak_tensor_bytes")}
    return {**counts, **worst}


def run_reading(task: Task, device: torch.device) -> dict[str, Any]:
    """Calls of a step after warm-up, on rank 0."""
    calls = Calls()  # before the contender, whose threads it is to see
    (batch,) = make_batches(task.shape, 1, seed=task.seed, rank=dist.get_rank(), device=device)
    contender = build(task.contenders[0], task.shape, microbatches=1, seed=task.seed, device=device)
    for _ in range(task.warmup):
        contender.step(batch)
    calls.count(lambda: contender.step(batch))
    return calls.found()


def run_saves(task: Task, device: torch.device) -> dict[str, Any]:
    """Seconds of the slowest rank."""
    batches = make_batches(task.shape, BATCHES, seed=task.seed, rank=dist.get_rank(), device=device)
    found = saves.run(task, device, batches)
    every = gathered(found, task.ranks)
    worst = {
        key: {
            name: [max(times) for times in zip(*(each[key][name] for each in every), strict=True)]
            for name in found[key]
        }
        for key in ("seconds", "others")
    }
    return {**worst, "bytes": found["bytes"]}


RUNS = {
    "time": run_time,
    "count": run_count,
    "growth": run_growth,
    "reading": run_reading,
    "saves": run_saves,
    "stages": run_stages,
}
RUNS |= {"lora": functools.partial(run_variants, lora), "optimizers": functools.partial(run_variants, optimizers)}


def main() -> None:
    task = Task.read(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(task.threads)
    device = torch.device("cpu")
    if task.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store: Store = dist.FileStore(task.store, task.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if task.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=task.ranks,
        timeout=datetime.timedelta(seconds=task.timeout),
        device_id=device if task.device == "cuda" else None,
    )
    result = RUNS[task.kind](task, device)
    if rank == 0:
        write(Path(task.result), result)
    leave(store, rank, task.ranks)


def leave(store: Store, rank: int, ranks: int) -> NoReturn:
    """Ends this process once every rank is done, without the interpreter's teardown.

    Torn down in Python's order, gloo's threads outlive what they use and abort the process now and then, after the
    work is done. The ranks meet in the store, because a gloo barrier needs the connections that a fast rank closes.
    """
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
