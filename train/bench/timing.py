"""Interleaved timing.

round 0:  ours  fsdp2  ddp        a barrier before every step
round 1:  ddp   fsdp2  ours       odd rounds run backwards, so that nobody always follows the same one
round 2:  fsdp2 ddp    ours       and the start moves on

A contender that needs another environment than the rest, such as another malloc, is in rank processes of its own: a
second set, which sleeps while the first one works.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from train.bench.contenders import Batch, Stepper


def order(names: Sequence[str], round_: int) -> list[str]:
    """The order of turns in one round: rotated each second round, reversed in the odd ones."""
    k = (round_ // 2) % len(names)
    turns = [*names[k:], *names[:k]]
    return turns[::-1] if round_ % 2 else turns


class Sample(NamedTuple):
    """One timed step on one rank."""

    seconds: float
    cpu_seconds: float
    """CPU time of the whole process, all threads: what the step costs where cores are short, and steadier than
    `seconds` on a busy machine. Waiting in gloo is no CPU time."""
    thread_seconds: float
    """CPU time of the thread that steps, which on the CPU computes as well: without communication."""


def timed(device: torch.device, work: Callable[[], float]) -> tuple[Sample, float]:
    """`work`'s time and result, all streams included: on CUDA by events, with the device idle before and after."""
    start, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    if device.type == "cpu":
        result = work()
        seconds = time.perf_counter() - start
        return Sample(seconds, time.process_time() - cpu, time.thread_time() - thread), result
    event: Callable[..., Any] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    result = work()
    torch.cuda.synchronize()  # the end event stands behind every stream's work, not only this one's
    end.record()
    end.synchronize()
    seconds = float(begin.elapsed_time(end)) / 1e3
    return Sample(seconds, time.process_time() - cpu, time.thread_time() - thread), result


class Turns:
    """Whose turn it is, where contenders live in several sets of rank processes, of which one works at a time.

    pipes: by contender, where its set waits: a named pipe, one byte for each time that the set is next; {} for one set.
        Waiting costs no CPU time, of rank 0 in the pipe and of the others in the barrier before a step
    """

    def __init__(self, pipes: Mapping[str, str], rank: int) -> None:
        # read and write, so that opening waits for nobody and no end of file is ever read
        self._ends = {path: os.open(path, os.O_RDWR) for path in set(pipes.values())} if rank == 0 else {}
        self._pipes = pipes

    def take(self, before: str | None, name: str) -> None:
        """Waits until `before`, the last turn's contender, is done."""
        if self._ends and before is not None and self._pipes[before] != self._pipes[name]:
            os.read(self._ends[self._pipes[name]], 1)

    def give(self, name: str, after: str | None) -> None:
        """To `after`, the next turn's. Collective."""
        if after is not None and self._pipes.get(name) != self._pipes.get(after):
            dist.barrier()  # every rank has ended its step
            if self._ends:
                os.write(self._ends[self._pipes[after]], b".")


def interleave(
    contenders: Mapping[str, Stepper],
    batches: Sequence[Batch],
    turns: Turns,
    everybody: Sequence[str],
    *,
    warmup: int,
    steps: int,
    device: torch.device,
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """This rank's timed steps, and the last step's loss, by contender.

    everybody: the names of all contenders, those of other processes included
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    queue = [(round_, name) for round_ in range(warmup + steps) for name in order(everybody, round_)]
    frozen = False
    for at, (round_, name) in enumerate(queue):
        if name not in contenders:
            continue
        if round_ >= warmup and not frozen:
            gc.collect()
            gc.freeze()  # else a collection that walks everybody's modules lands in somebody's step
            frozen = True
        turns.take(queue[at - 1][1] if at else None, name)
        dist.barrier()
        step = functools.partial(contenders[name].step, batches[round_ % len(batches)])
        sample, losses[name] = timed(device, step)
        turns.give(name, queue[at + 1][1] if at + 1 < len(queue) else None)
        if round_ >= warmup:
            samples[name].append(sample)
    gc.unfreeze()
    return samples, losses


def slowest(per_rank: Sequence[Mapping[str, Sequence[Sample]]]) -> dict[str, list[Sample]]:
    """A step takes as long as its slowest rank: the maximum over ranks, step by step."""
    return {
        name: [
            Sample(*map(max, zip(*step, strict=True))) for step in zip(*(rank[name] for rank in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }
