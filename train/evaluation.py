"""What a state is worth: its held-out loss, and whether it gives finite numbers at all."""

from __future__ import annotations

import torch

import yafsdp_fn as ya
from models import llama
from train.config import Config
from train.data import Batch, Corpus, Place, batch_at


class Evaluation:
    """Of states of one run, on all ranks together."""

    def __init__(self, config: Config, model: llama.Config, heldout: Corpus, here: Place) -> None:
        self._size, self._rows, self._heldout, self._here = (
            config.data.batch,
            config.data.batch * here.ranks,
            heldout,
            here,
        )
        self._batches = min(config.eval_batches, heldout.windows // self._rows)
        self._step = ya.eval_step(llama.loss(model))

    def loss(self, state: ya.ShardedState) -> float:
        """The mean over the first batches of the held-out text."""
        parts = (batch_at(self._heldout, i * self._rows, self._size, self._here, seed=0) for i in range(self._batches))
        return float(torch.stack([self._step(state, part)["loss"] for part in parts]).mean())

    def sound(self, state: ya.ShardedState, batch: Batch) -> bool:
        """Whether the state deserves a checkpoint: the loss of a step is that of the weights before its update, which
        may have ruined them. Costs a forward."""
        numbers = [self._step(state, batch)["loss"].float(), ya.global_norm(state.params).float()]
        return bool(torch.stack(numbers).isfinite().all())
