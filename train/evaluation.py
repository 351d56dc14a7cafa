"""What a state is worth: its held-out loss, and whether it gives finite numbers at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

import yafsdp_fn as ya
from train.config import Settings
from train.data.mixed import at_most
from train.data.rows import Batch, Place, Rows, batches

LossFn = Callable[[Any, Batch], ya.Mean]


class Evaluation:
    """Of states of one run, on all ranks together."""

    def __init__(self, config: Settings, loss_fn: LossFn, heldout: Rows, here: Place) -> None:
        rows = config.data.batch * here.ranks
        self._batches = min(config.eval_batches, at_most(heldout) // rows) if config.eval_every else 0
        self._read: Callable[[], Iterator[tuple[Batch, Any]]] = lambda: batches(
            heldout, 0, config.data.batch, here, seed=0
        )
        self._step = ya.eval_step(_counted(loss_fn), has_aux=True)

    def loss(self, state: ya.ShardedState) -> float:
        """The mean over the targets of the first batches of the held-out text."""
        found = [self._step(state, batch) for batch, _ in islice(self._read(), self._batches)]
        losses, targets = (torch.stack([each[key].double() for each in found]) for key in ("loss", "aux"))
        return float((losses * targets).sum() / targets.sum())

    def sound(self, state: ya.ShardedState, batch: Batch) -> bool:
        """Whether the state deserves a checkpoint: the loss of a step is that of the weights before its update, which
        may have ruined them. Costs a forward."""
        numbers = [self._step(state, batch)["loss"].float(), ya.global_norm(state.params).float()]
        return bool(torch.stack(numbers).isfinite().all())


def _counted(loss_fn: LossFn) -> Callable[[Any, Batch], tuple[ya.Mean, ya.Sum]]:
    """The loss, and how many targets it is of."""

    def loss(params: Any, batch: Batch) -> tuple[ya.Mean, ya.Sum]:
        mean = loss_fn(params, batch)
        return mean, ya.Sum(torch.as_tensor(mean.weight))

    return loss
