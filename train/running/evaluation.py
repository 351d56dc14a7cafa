"""What a state is worth: its held-out loss, and whether it gives finite numbers at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from train.config import Settings
from train.data.mixed import at_most
from train.data.rows import Batch, Place, Rows, batches

LossAndMore = Callable[[Any, Batch], tuple[ya.Mean, dict[str, Any]]]
"""With what the model tells beside its loss."""


class Evaluation:
    """Of states of one run, on all ranks together."""

    def __init__(self, config: Settings, loss_fn: LossAndMore, heldout: Rows, here: Place) -> None:
        rows = config.data.batch * here.ranks
        self._batches = min(config.eval_batches, at_most(heldout) // rows) if config.eval_every else 0
        self._read: Callable[[], Iterator[tuple[Batch, Any]]] = lambda: batches(
            heldout, 0, config.data.batch, here, seed=0
        )
        self._step = ya.eval_step(_counted(loss_fn), has_aux=True)

    def loss(self, state: ya.ShardedState) -> tuple[float, dict[str, float]]:
        """The mean over the targets of the first batches of the held-out text, and what else the model tells of them,
        its largest element: of a model with experts the router's loss, and `expert_load`, how much more the busiest
        expert of any layer has to do than all have on average."""
        found = [self._step(state, batch) for batch, _ in islice(self._read(), self._batches)]
        losses, targets = torch.stack([each["loss"].double() for each in found]), _column(found, "targets")
        told = {name: _column(found, name) for name in found[0]["aux"] if name != "targets"}
        return float((losses * targets).sum() / targets.sum()), {
            name: float(torch.tensordot(targets / targets.sum(), values, 1).max()) for name, values in told.items()
        }

    def sound(self, state: ya.ShardedState, batch: Batch) -> bool:
        """Whether the state deserves a checkpoint: the loss of a step is that of the weights before its update, which
        may have ruined them. Costs a forward."""
        numbers = [self._step(state, batch)["loss"].float(), ya.global_norm(state.params).float()]
        return bool(torch.stack(numbers).isfinite().all())


def _column(found: Sequence[Any], name: str) -> Tensor:
    """[batches, ...], what each told."""
    return torch.stack([each["aux"][name].double() for each in found])


def _counted(loss_fn: LossAndMore) -> LossAndMore:
    """With how many targets the loss is of."""

    def loss(params: Any, batch: Batch) -> tuple[ya.Mean, dict[str, Any]]:
        mean, aux = loss_fn(params, batch)
        return mean, {**aux, "targets": ya.Sum(torch.as_tensor(mean.weight))}

    return loss
