"""Interleaved timing.

round 0:  ours  fsdp2  ddp        a barrier before every step
round 1:  ddp   fsdp2  ours       odd rounds run backwards, so that nobody always follows the same one
round 2:  fsdp2 ddp    ours       and the start moves on
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from train.bench.contenders import Batch, Stepper


def order(names: Sequence[str], round_: int) -> list[str]:
    """The order of turns in one round: rotated each second round, reversed in the odd ones."""
    k = (round_ // 2) % len(names)
    turns = [*names[k:], *names[:k]]
    return turns[::-1] if round_ % 2 else turns


def timed(device: torch.device, work: Callable[[], float]) -> tuple[float, float]:
    """`(seconds, work's result)`, all streams included: on CUDA by events, with the device idle before and after."""
    if device.type == "cpu":
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result
    event: Callable[..., Any] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    result = work()
    torch.cuda.synchronize()  # the end event stands behind every stream's work, not only this one's
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3, result


def interleave(
    contenders: Mapping[str, Stepper], batches: Sequence[Batch], *, warmup: int, steps: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of this rank's timed steps, and the last step's loss, by contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    names = list(contenders)
    for round_ in range(warmup + steps):
        if round_ == warmup:
            gc.collect()
            gc.freeze()  # else a collection that walks everybody's modules lands in somebody's step
        batch = batches[round_ % len(batches)]
        for name in order(names, round_):
            contender = contenders[name]
            dist.barrier()
            took, losses[name] = timed(device, lambda contender=contender, batch=batch: contender.step(batch))  # type: ignore[misc]
            if round_ >= warmup:
                seconds[name].append(took)
    gc.unfreeze()
    return seconds, losses


def slowest(per_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """A step takes as long as its slowest rank: the maximum over ranks, step by step."""
    return {name: [max(step) for step in zip(*(rank[name] for rank in per_rank), strict=True)] for name in per_rank[0]}
