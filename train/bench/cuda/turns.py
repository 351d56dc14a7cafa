"""Interleaved timing of steps that the host runs ahead of.

    for round in range(rounds):
        for contender in order(round):                  # as in `train.bench.timing`
            device idle; contender.turn(); one step     # the host gets ahead, streams are as in a long run
            event; `each` steps; event                  # the sample: the time between the events, over `each`

Nothing inside waits for the device: a step returns its loss as a tensor, read when all is over. On the CPU one step is
a sample, and over when its loss is read.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from train.bench.cuda.setting import Batch, Setting
from train.bench.report import spread
from train.bench.timing import order

EACH = 2


class Contender(Protocol):
    def turn(self) -> None:
        """Before its steps: sets what contenders that share memory set differently."""

    def step(self, batch: Batch) -> Tensor:
        """A training step; the loss, on the device."""


def turns(
    contenders: Mapping[str, Contender],
    batch: Batch,
    setting: Setting,
    *,
    rounds: int,
    warmup: int = 3,
    each: int = EACH,
) -> dict[str, list[float]]:
    """Seconds per step of each contender, one sample per round. Raises RuntimeError for a loss that is not finite."""
    names, losses = list(contenders), dict[str, Tensor]()
    for name in names:
        contenders[name].turn()
        for _ in range(warmup):
            losses[name] = contenders[name].step(batch)
        setting.synchronize()
    gc.collect()
    gc.freeze()  # else a collection that walks everybody's modules lands in somebody's step
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in order(names, round_):
            contender = contenders[name]
            setting.synchronize()
            contender.turn()
            if setting.device == "cuda":
                contender.step(batch)
            seconds, losses[name] = _timed(contender, batch, setting, each)
            samples[name].append(seconds)
    gc.unfreeze()
    for name, loss in losses.items():
        if not math.isfinite(float(loss)):
            raise RuntimeError(f"{name}: the loss of the last step is {float(loss)}, so its times are not reported")
    return samples


def _timed(contender: Contender, batch: Batch, setting: Setting, each: int) -> tuple[float, Tensor]:
    loss = None
    if setting.device == "cpu":
        start = time.perf_counter()
        loss = contender.step(batch)
        loss.item()
        return time.perf_counter() - start, loss
    event: Callable[..., Any] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    for _ in range(each):
        loss = contender.step(batch)
    end.record()
    end.synchronize()
    assert loss is not None
    return float(begin.elapsed_time(end)) / 1e3 / each, loss


def shown(samples: Sequence[float]) -> dict[str, Any]:
    """Milliseconds: median, p10, p90 and all."""
    milliseconds = [1e3 * s for s in samples]
    return {**{key: round(value, 4) for key, value in spread(milliseconds).items()}, "all": milliseconds}
