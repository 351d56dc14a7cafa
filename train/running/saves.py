"""The checkpoints of a run: written beside the training, said when they are on the disk, tried again when they are not.

save(state, extra)       copies the state, and returns; a thread of the library writes
settle(step)             some steps later: what became of it, and whether to save again now
back(state)              the newest one

Steps whose loss or gradient is not finite, or far above the others' (`Spikes`), are skipped; after too many in a row
(`Skips`) the run goes back to its newest checkpoint.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from train.running.report import Record, Report
from train.settings import Settings
from yafsdp_fn import checkpoint
from yafsdp_fn.checkpoint.folder import folder_name

PAUSES = (1.0, 4.0)
"""Seconds between tries of the checkpoint that a run ends with."""


class Saves:
    """Checkpoints in `folder`, by its saver. One that cannot be written is a warning: older ones stay, and a quarter of
    --checkpoint-every later the next one is tried. Every rank calls all of it alike."""

    def __init__(self, saver: checkpoint.Saver, folder: Path, report: Report, config: Settings) -> None:
        self._saver, self._folder, self._report = saver, folder, report
        self._settles = max(1, config.checkpoint_every // 4)
        self._under_way: int | None = None  # the step whose checkpoint is being written

    def accepts(self, step: int, sound: bool, ends: bool) -> bool:
        """Tells whether a state is saved: a ruined one would take the place of one that is not. Where the run ends with
        it, raises Diverged."""
        if sound:
            return True
        what = f"step {step}: its update ruined the weights, their loss is not finite: they are not saved"
        if ends:
            raise Diverged(f"{what}. {ADVICE}")
        self._report.warn(what)
        return False

    def save(self, state: ya.ShardedState, extra: Mapping[str, Any], ends: bool) -> None:
        """Begins the checkpoint of this state, when the one before it has come to an end.

        ends: the run ends with it: waits until it is there, and raises CheckpointError where it cannot be written
        """
        self._end()
        self._under_way = state.step
        self._saver.save(state, extra)
        for pause in PAUSES if ends else ():
            if self._end():
                return
            time.sleep(pause)
            self._under_way = state.step
            self._saver.save(state, extra)
        if ends:
            self._done(state.step)

    def settle(self, step: int) -> bool:
        """Tells whether to save again now, after `step`: the checkpoint begun some steps ago could not be written."""
        return self._under_way is not None and step >= self._under_way + self._settles and not self._end()

    def back(self, like: ya.ShardedState, why: str) -> ya.ShardedState:
        """The state of the newest checkpoint. Raises Diverged where there is none."""
        self._end()
        try:
            state, _ = load(self._folder, like, self._report.warn)
        except checkpoint.CheckpointError as error:
            raise Diverged(f"{why}, and there is nothing to go back to: {error}. {ADVICE}") from error
        self._report.rewind(state.step, why)
        return state

    def _end(self) -> bool:
        """Waits for the checkpoint that is being written. Whether there was none, or it is on the disk now."""
        step = self._under_way
        self._under_way = None
        if step is None:
            return True
        try:
            self._done(step)
        except checkpoint.CheckpointError as error:
            self._report.warn(
                f"no checkpoint of step {step}: {error}. Training goes on; the checkpoints before it stay"
            )
            return False
        return True

    def _done(self, step: int) -> None:
        """Waits for the checkpoint of `step`, and says where it is."""
        self._saver.wait()
        self._report.checkpoint(step, self._folder / folder_name(step))


def load(folder: Path, like: ya.ShardedState, warn: Callable[[str], None]) -> tuple[ya.ShardedState, dict[str, Any]]:
    """`checkpoint.load`; `warn` is told of damaged checkpoints that were passed over."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        loaded = checkpoint.load(folder, like, donate=True)
    for warning in told:
        warn(str(warning.message))
    return loaded


class Diverged(RuntimeError):
    """Too many steps in a row were skipped, and going back did not help. Raised on every rank alike."""


ADVICE = "Lower --optim.learning-rate, or look at the data"


class Skips:
    """Counts skipped steps in a row, which all ranks see alike, and how often the run went back for them."""

    def __init__(self, most: int, rollbacks: int) -> None:
        self._most, self._rollbacks = most, rollbacks
        self._records: list[Record] = []

    def see(self, record: Record) -> None:
        self._records = [*self._records, record] if record.skipped else []

    @property
    def too_many(self) -> bool:
        return len(self._records) >= self._most

    def go_back(self) -> str:
        """Says why the run goes back to its last checkpoint. Raises Diverged where it went back too often."""
        first = self._records[0]
        last = self._records[-1]
        what = (
            f"steps {first.step} to {last.step}, the last with loss {last.loss}, gradient norm {last.grad_norm}: their "
            "updates were skipped"
        )
        if not self._rollbacks:
            raise Diverged(f"{what}, and the run went back to a checkpoint as often as it may. {ADVICE}")
        self._rollbacks = self._rollbacks - 1
        self._records = []
        return what


WINDOW = 128


class Spikes:
    """`skip` of `ya.train_step`. What it remembers is on the device of the metrics: the host waits for nothing.

    z = (value - mean) / standard deviation, over the last `WINDOW` steps with finite numbers; a spike is z > sigmas

    Skipped steps count among the last ones: where a run moves to another level for good, it is not skipped for ever. As
    in OLMo's `SkipStepOptimizer` (allenai/OLMo-core), which chose both the window and the half of it that comes first.
    """

    def __init__(self, sigmas: float) -> None:
        self._sigmas = sigmas
        # losses and gradient norms, the last step's at the end: their order, and so every bit, survives a resume
        self._seen = torch.zeros(2, WINDOW, dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.int64)

    def __call__(self, metrics: Mapping[str, Tensor]) -> Tensor:
        """A flag: whether the step with these metrics is a spike. Takes it among the last ones."""
        now = torch.stack([metrics["loss"].double(), metrics["grad_norm"].double()])[:, None]
        seen = self._seen.to(now.device)
        count = self._count.to(now.device)
        there = torch.arange(WINDOW, device=now.device) >= WINDOW - count
        mean = (seen * there).sum(1, keepdim=True) / count
        deviation = (((seen - mean) ** 2 * there).sum(1, keepdim=True) / (count - 1)).sqrt()
        spike = ((now > mean + self._sigmas * deviation) & (count >= WINDOW // 2)).any()
        finite = now.isfinite().all()
        self._seen = torch.where(finite, torch.cat([seen[:, 1:], now], 1), seen)
        self._count = (count + finite).clamp(max=WINDOW)
        return spike

    def kept(self) -> list[list[float]]:
        """The values that a checkpoint keeps, the oldest step first; waits for the device."""
        found: list[list[float]] = self._seen.T[WINDOW - int(self._count) :].tolist()
        return found

    def restore(self, kept: Sequence[Sequence[float]]) -> None:
        for index, values in enumerate(kept, WINDOW - len(kept)):
            self._seen[:, index] = torch.tensor(values, dtype=torch.float64)
        self._count.fill_(len(kept))
