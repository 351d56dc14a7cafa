"""Interleaved timing.

round 0:  ours  fsdp2  ddp        a barrier before every step
round 1:  ddp   fsdp2  ours       odd rounds run backwards, so that nobody always follows the same one
round 2:  fsdp2 ddp    ours       and the start moves on
"""

from __future__ import annotations

import functools
import gc
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


def timed(device: torch.device, work: Callable[[], float]) -> tuple[Sample, float]:
    """`work`'s time and result, all streams included: on CUDA by events, with the device idle before and after."""
    cpu = time.process_time()
    if device.type == "cpu":
        start = time.perf_counter()
        result = work()
        return Sample(time.perf_counter() - start, time.process_time() - cpu), result
    event: Callable[..., Any] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    result = work()
    torch.cuda.synchronize()  # the end event stands behind every stream's work, not only this one's
    end.record()
    end.synchronize()
    return Sample(float(begin.elapsed_time(end)) / 1e3, time.process_time() - cpu), result


def interleave(
    contenders: Mapping[str, Stepper], batches: Sequence[Batch], *, warmup: int, steps: int, device: torch.device
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """This rank's timed steps, and the last step's loss, by contender."""
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    names = list(contenders)
    for round_ in range(warmup + steps):
        if round_ == warmup:
            gc.collect()
            gc.freeze()  # else a collection that walks everybody's modules lands in somebody's step
        batch = batches[round_ % len(batches)]
        for name in order(names, round_):
            dist.barrier()
            sample, losses[name] = timed(device, functools.partial(contenders[name].step, batch))
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
