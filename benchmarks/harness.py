"""The one harness of all benches: contenders in rank processes, which take turns.

    run(work, contenders, ...)               # starts R rank processes, each `python -m benchmarks.worker TASK.json`
        on_rank: work(task, device)          # a function of a section, in each of them
            in_turn(task, contenders, ...)   # seconds of the slowest rank, and losses
            compared(task, build, ...)       # the same; then each contender alone, for its memory

round 0:  ours  fsdp2  ddp
round 1:  ddp   fsdp2  ours       odd rounds run backwards, so that nobody always follows the same one
round 2:  fsdp2 ddp    ours       and the start moves on
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from benchmarks.contenders import Batch, Stepper, make_batches
from benchmarks.counting import tensor_peak
from benchmarks.options import MALLOC_TUNED, Device
from benchmarks.report import write
from benchmarks.shapes import Shape
from train.machine import ROOT
from yafsdp_fn.util import local_ranks

T = TypeVar("T")
BATCHES = 8
"""Batches made in advance."""


def order(names: Sequence[str], round_: int) -> list[str]:
    """The order of turns in one round: rotated each second round, reversed in the odd ones."""
    k = (round_ // 2) % len(names)
    turns = [*names[k:], *names[:k]]
    return turns[::-1] if round_ % 2 else turns


class Sample(NamedTuple):
    """One timed turn on one rank."""

    seconds: float
    cpu_seconds: float
    """CPU time of the whole process, all threads: what the step costs where cores are short, and steadier than
    `seconds` on a busy machine. Waiting in gloo is no CPU time."""
    thread_seconds: float
    """CPU time of the thread that steps, which on the CPU computes as well: without communication."""


def interleave(
    names: Sequence[str], turn: Callable[[str, int], Sample | None], *, warmup: int, rounds: int
) -> dict[str, list[Sample]]:
    """The samples of every contender, one per round.

    turn: `(name, round)` -> the sample; rounds below 0 warm up, and their samples are dropped. None: the contender is
        not in this process
    """
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for round_ in range(-warmup, rounds):
        if round_ == 0:
            gc.collect()
            gc.freeze()  # else a collection that walks everybody's modules lands in somebody's step
        for name in order(names, round_):
            sample = turn(name, round_)
            if round_ >= 0 and sample is not None:
                samples[name].append(sample)
    gc.unfreeze()
    return {name: found for name, found in samples.items() if found}


def timed(device: torch.device, work: Callable[[], T], *, ahead: bool = False) -> tuple[Sample, T]:
    """`work`'s time and result: on CUDA by events, all streams included, with the device idle before and after.

    ahead: on CUDA, the device is at work already and nobody waits for it, as in a long run, where the host is ahead
    """
    start = time.perf_counter()
    cpu = time.process_time()
    thread = time.thread_time()
    if device.type == "cpu":
        result = work()
        seconds = time.perf_counter() - start
        return Sample(seconds, time.process_time() - cpu, time.thread_time() - thread), result
    event: Callable[..., Any] = torch.cuda.Event
    begin = event(enable_timing=True)
    end = event(enable_timing=True)
    if not ahead:
        torch.cuda.synchronize()
    begin.record()
    result = work()
    if not ahead:
        torch.cuda.synchronize()  # the end event stands behind every stream's work, not only this one's
    end.record()
    end.synchronize()
    seconds = float(begin.elapsed_time(end)) / 1e3
    return Sample(seconds, time.process_time() - cpu, time.thread_time() - thread), result


def slowest(per_rank: Sequence[Mapping[str, Sequence[Sample]]]) -> dict[str, list[Sample]]:
    """A step takes as long as its slowest rank: the maximum over ranks, step by step."""
    return {
        name: [
            Sample(*map(max, zip(*step, strict=True))) for step in zip(*(rank[name] for rank in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


class Process:
    """`python -m benchmarks.worker FOLDER/NAME.json`, in a session of its own: what it starts, compilers say, ends
    with it. It reads a task and writes a result, JSON both; what it prints goes to a log. task: `call`, and its fields
    """

    def __init__(self, task: Mapping[str, Any], folder: Path, name: str, env: Mapping[str, str]) -> None:
        file = folder / f"{name}.json"
        self.log = folder / f"{name}.log"
        file.write_text(json.dumps(task))
        path = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH")) if p)
        with self.log.open("wb") as sink:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", str(file)],
                env={**env, "PYTHONPATH": path, "KINETO_LOG_LEVEL": "5"},  # else every profiled step prints a line
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """Kills it, and what it started, if they have not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def tail(self, lines: int = 30) -> str:
        """The last lines that it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) or "(nothing)"


class Turns:
    """This set's part, where contenders live in several sets of rank processes, of which one works at a time.

    A contender that needs another environment than the rest, such as another malloc, is in rank processes of its own.
    All sets count through the same turns; a set sleeps while others work, its rank 0 in a named pipe, which gets one
    byte when the set is next, and its other ranks in the barrier before a step: neither costs CPU time.

    pipes: by contender, the pipe that its set waits in; {} where there is one set
    mine: contenders of this set
    """

    def __init__(self, pipes: Mapping[str, str], mine: Mapping[str, object], rank: int) -> None:
        # read and write, so that opening waits for nobody and no end of file is ever read
        self._ends = {path: os.open(path, os.O_RDWR) for path in set(pipes.values())} if rank == 0 else {}
        self._pipes, self._mine = pipes, mine
        self._working: bool | None = None  # None: before the first turn

    def mine(self, name: str) -> bool:
        """Begins the turn of `name`: waits until its set may work, if that is this one, else wakes it. Collective."""
        if name in self._mine:
            if self._working is False and self._ends:
                os.read(self._ends[self._pipes[name]], 1)
            self._working = True
            dist.barrier()
            return True
        if self._working:
            dist.barrier()  # every rank has ended its step
            if self._ends:
                os.write(self._ends[self._pipes[name]], b".")
        self._working = False
        return False


class RankFailed(RuntimeError):
    """A rank process ended with an error or did not end in time."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of the processes of one run. Paths are of a temporary directory that lives as long as the command."""

    work: str
    """`module:function`, of `(task, device)`, whose result on rank 0 is that of the run."""
    everybody: tuple[str, ...]
    """Contenders of all sets, in the order that turns are made of."""
    shape: Shape
    ranks: int
    steps: int
    warmup: int
    timeout: float
    schedule: str = ""
    microbatches: int = 1
    device: Device = "cpu"
    threads: int = 1
    seed: int = 0
    contenders: tuple[str, ...] = ()
    """Contenders of this set of rank processes."""
    pipes: dict[str, str] = dataclasses.field(default_factory=dict)
    """The pipes by contender, as `Turns` takes them."""
    store: str = ""
    result: str = ""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Task:
        """Builds a task from JSON."""
        several = {key: tuple(fields[key]) for key in ("contenders", "everybody")}
        return cls(**{**fields, **several, "shape": Shape(**fields["shape"])})

    def batches(self, device: torch.device, rank: int | None = None) -> list[Batch]:
        """Made in advance; steps go round them. rank: whose, by default this one's"""
        rank = dist.get_rank() if rank is None else rank
        return make_batches(self.shape, BATCHES, seed=self.seed, rank=rank, device=device)


def run(work: str, contenders: Sequence[str], *, tuned: Collection[str] = (), **settings: Any) -> dict[str, Any]:
    """Runs one task in a fresh process for each rank, and returns what rank 0 wrote. Contenders with malloc tuned have
    processes of their own beside the others'.

    tuned: contenders whose processes have malloc tuned; settings: fields of `Task`

    Raises RankFailed, which says which rank failed and how.
    """
    whole = Task(work, tuple(contenders), **settings)
    sets = {on: tuple(name for name in contenders if (name in tuned) is on) for on in (False, True)}
    module, _, kind = work.rpartition(":")
    kind = module.rpartition(".")[2] if kind == "rank" else kind  # a section has one, as a rule
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        pipes = {name: str(folder / f"turns-{on}") for on, mine in sets.items() for name in mine}
        for pipe in set(pipes.values()):
            os.mkfifo(pipe)
        processes: list[Process] = []
        results: list[Path] = []
        try:
            for on, mine in ((on, mine) for on, mine in sets.items() if mine):
                results.append(folder / f"result-{on}.json")
                store = str(folder / f"store-{on}")
                result = str(results[-1])
                task = dataclasses.replace(whole, contenders=mine, pipes=pipes, store=store, result=result)
                for rank in range(task.ranks):
                    env = environment(rank, task.ranks, task.threads, on)
                    task_fields = {"call": "benchmarks.harness:on_rank", **dataclasses.asdict(task)}
                    processes.append(Process(task_fields, folder, f"{on}-rank{rank}", env))
            wait(processes, whole.ranks, whole.timeout, f"{kind} run of {', '.join(contenders)}")
        finally:
            for process in processes:
                process.end()
        found = [json.loads(result.read_text()) for result in results]
    return functools.reduce(lambda a, b: {key: {**a[key], **b[key]} for key in a}, found)  # of two sets, by contender


def environment(rank: int, ranks: int, threads: int, tuned: bool) -> dict[str, str]:
    """The environment that torchrun would set, and malloc's settings where asked for."""
    kept = {name: value for name, value in os.environ.items() if name not in MALLOC_TUNED}  # untuned has to mean it
    told = local_ranks.environment(rank, ranks, port=0)  # they meet in a file
    return {**kept, **told, "OMP_NUM_THREADS": str(threads), **(MALLOC_TUNED if tuned else {})}


GRACE = 0.5
"""Seconds in which others write down, too, why they end."""


def wait(processes: list[Process], ranks: int, timeout: float, what: str) -> None:
    """Returns when every process ended well; raises as soon as one did not. Processes are set by set, rank by rank."""
    end = time.monotonic() + timeout

    def pause() -> None:
        time.sleep(local_ranks.LOOK)
        left = [at for at, process in enumerate(processes) if process.popen.poll() is None]
        if left and time.monotonic() > end:
            raise RankFailed(
                f"ranks {[at % ranks for at in left]} of the {what} did not end within {timeout:.0f} s (--timeout); "
                f"rank {left[0] % ranks}'s last lines:\n{processes[left[0]].tail()}"
            )

    failed = local_ranks.wait([process.popen for process in processes], GRACE, pause)
    for at, process in enumerate(processes):
        if process.popen is failed:
            code = failed.returncode
            said = f"rank {at % ranks} of the {what} ended with code {code}; its last lines:\n{process.tail()}"
            raise RankFailed(said)


def on_rank(fields: dict[str, Any]) -> None:
    """One rank of one run; rank 0 writes the result.

    Ends once every rank is done: gloo's threads need the connections that a fast rank would close. The ranks meet in
    the store, since a gloo barrier needs those connections, too.
    """
    task = Task.of(fields)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(task.threads)
    device = torch.device("cpu")
    if task.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store: Any = dist.FileStore(task.store, task.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if task.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=task.ranks,
        timeout=datetime.timedelta(seconds=task.timeout),
        device_id=device if task.device == "cuda" else None,
    )
    result = function(task.work)(task, device)
    if rank == 0:
        write(Path(task.result), result)
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(task.ranks)])


def function(path: str) -> Callable[..., Any]:
    """`module:name`, imported."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def gathered(value: Any, ranks: int) -> list[Any]:
    """`value` of every rank, in rank order."""
    out: list[Any] = [None] * ranks
    dist.all_gather_object(out, value)
    return out


def in_turn(
    task: Task, contenders: Mapping[str, Stepper], batches: Sequence[Batch], device: torch.device
) -> dict[str, Any]:
    """Seconds by clock (wall, CPU, the main thread's CPU) and contender, of the slowest rank; and as `losses` the mean
    of the ranks' last ones."""
    turns, losses = Turns(task.pipes, contenders, dist.get_rank()), dict[str, float]()

    def turn(name: str, round_: int) -> Sample | None:
        if not turns.mine(name):
            return None
        step = functools.partial(contenders[name].step, batches[round_ % len(batches)])
        sample, losses[name] = timed(device, step)
        return sample

    samples = interleave(task.everybody, turn, warmup=task.warmup, rounds=task.steps)
    per_rank = gathered((samples, losses), task.ranks)
    steps = slowest([rank_samples for rank_samples, _ in per_rank])
    seconds = {
        clock: {name: [getattr(sample, clock) for sample in found] for name, found in steps.items()}
        for clock in Sample._fields
    }
    return seconds | {"losses": {name: sum(l[name] for _, l in per_rank) / task.ranks for name in contenders}}


def compared(
    task: Task,
    build: Callable[[str, Task, torch.device], Stepper],
    batches: Sequence[Batch],
    device: torch.device,
) -> dict[str, Any]:
    """Contenders in turn; then each alone for its `peak_bytes`, of the rank that needs most memory."""

    def stepper(name: str) -> Callable[[int], float]:
        contender = build(name, task, device)
        return lambda i: contender.step(batches[i % len(batches)])

    contenders = {name: build(name, task, device) for name in task.contenders}
    found = in_turn(task, contenders, batches, device)
    contenders.clear()
    peaks = {}
    for name in task.contenders:
        peak = tensor_peak(functools.partial(stepper, name), device, task.warmup)
        peaks[name] = max(gathered(peak, task.ranks))
    return {**found, "peak_bytes": peaks}
