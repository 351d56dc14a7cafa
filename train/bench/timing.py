"""Interleaved timing, of every bench.

round 0:  ours  fsdp2  ddp
round 1:  ddp   fsdp2  ours       odd rounds run backwards, so that nobody always follows the same one
round 2:  fsdp2 ddp    ours       and the start moves on
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


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
    start, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    if device.type == "cpu":
        result = work()
        seconds = time.perf_counter() - start
        return Sample(seconds, time.process_time() - cpu, time.thread_time() - thread), result
    event: Callable[..., Any] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
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
