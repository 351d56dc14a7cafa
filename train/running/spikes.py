"""Steps whose loss or gradient norm is far above what it was: their updates are left out.

z = (value - mean) / standard deviation, over the last `WINDOW` steps with finite numbers; a spike is z > sigmas

Skipped steps count among the last ones: where a run moves to another level for good, it is not skipped for ever. As in
OLMo's `SkipStepOptimizer` (allenai/OLMo-core), which chose both the window and the half of it that comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

WINDOW = 128


class Spikes:
    """`skip` of `ya.train_step`. What it remembers is on the device of the metrics: the host waits for nothing."""

    def __init__(self, sigmas: float) -> None:
        self._sigmas = sigmas
        # losses and gradient norms, the last step's at the end: their order, and so every bit, survives a resume
        self._seen = torch.zeros(2, WINDOW, dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.int64)

    def __call__(self, metrics: Mapping[str, Tensor]) -> Tensor:
        """A flag: whether the step with these metrics is a spike. Takes it among the last ones."""
        now = torch.stack([metrics["loss"].double(), metrics["grad_norm"].double()])[:, None]
        seen, count = self._seen.to(now.device), self._count.to(now.device)
        there = torch.arange(WINDOW, device=now.device) >= WINDOW - count
        mean = (seen * there).sum(1, keepdim=True) / count
        deviation = (((seen - mean) ** 2 * there).sum(1, keepdim=True) / (count - 1)).sqrt()
        spike = ((now > mean + self._sigmas * deviation) & (count >= WINDOW // 2)).any()
        finite = now.isfinite().all()
        self._seen = torch.where(finite, torch.cat([seen[:, 1:], now], 1), seen)
        self._count = (count + finite).clamp(max=WINDOW)
        return spike

    def kept(self) -> list[list[float]]:
        """What a checkpoint keeps, the oldest step first; waits for the device."""
        found: list[list[float]] = self._seen.T[WINDOW - int(self._count) :].tolist()
        return found

    def restore(self, kept: Sequence[Sequence[float]]) -> None:
        for index, values in enumerate(kept, WINDOW - len(kept)):
            self._seen[:, index] = torch.tensor(values, dtype=torch.float64)
        self._count.fill_(len(kept))
