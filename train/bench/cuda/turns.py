"""Turns of steps that the host runs ahead of.

    for round in range(rounds):
        for contender in order(round):                  # `train.bench.timing`
            device idle; contender.turn(); one step     # the host gets ahead, streams are as in a long run
            event; `each` steps; event                  # the sample: the time between the events, over `each`

Nothing inside waits for the device: a step returns its loss as a tensor, read when all is over. On the CPU one step is
a sample, and over when its loss is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from train.bench.cuda.setting import Batch, Setting
from train.bench.report import spread
from train.bench.timing import Sample, interleave, timed

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
    device, losses = torch.device(setting.device), dict[str, Tensor]()

    def steps(name: str, count: int) -> Tensor:
        for _ in range(count):
            loss = contenders[name].step(batch)
        if device.type == "cpu":
            loss.item()
        return loss

    def turn(name: str, round_: int) -> Sample:
        setting.synchronize()
        contenders[name].turn()
        if device.type == "cpu" or round_ < 0:
            sample, losses[name] = timed(device, lambda: steps(name, 1))
            return sample
        contenders[name].step(batch)
        sample, losses[name] = timed(device, lambda: steps(name, each), ahead=True)
        return sample._replace(seconds=sample.seconds / each)

    samples = interleave(list(contenders), turn, warmup=warmup, rounds=rounds)
    for name, loss in losses.items():
        if not math.isfinite(float(loss)):
            raise RuntimeError(f"{name}: the loss of the last step is {float(loss)}, so its times are not reported")
    return {name: [sample.seconds for sample in found] for name, found in samples.items()}


def shown(samples: Sequence[float]) -> dict[str, Any]:
    """Milliseconds: median, p10, p90 and all."""
    milliseconds = [1e3 * s for s in samples]
    return {**{key: round(value, 4) for key, value in spread(milliseconds).items()}, "all": milliseconds}
