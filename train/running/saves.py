"""The checkpoints of a run: written beside the training, said when they are on the disk, tried again when they are not.

save(state, extra)       copies the state, and returns; a thread of the library writes
settle(step)             some steps later: what became of it, and whether to save again now
back(state)              the newest one
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yafsdp_fn as ya
from train.config import Settings
from train.running.report import Report
from train.running.skips import ADVICE, Diverged
from yafsdp_fn import checkpoint

PAUSES = (1.0, 4.0)
"""Seconds between tries of the checkpoint that a run ends with."""


class Saves:
    """Checkpoints in `folder`. One that cannot be written is a warning: older ones stay, and a quarter of
    --checkpoint-every later the next one is tried. Every rank calls all of it alike."""

    def __init__(self, folder: Path, report: Report, config: Settings) -> None:
        self._folder, self._report = folder, report
        self._settles = max(1, config.checkpoint_every // 4)
        self._saver = checkpoint.Saver(folder, keep_last=config.keep, keep_every=config.keep_every or None)
        self._under_way: int | None = None  # the step whose checkpoint is being written

    def __enter__(self) -> Saves:
        self._saver.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._saver.__exit__(kind, value, tb)

    def accepts(self, step: int, sound: bool, ends: bool) -> bool:
        """Whether a state is saved: a ruined one would take the place of one that is not. Where the run ends with it,
        raises Diverged."""
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
            self._report.checkpoint(state.step, self._done())

    def settle(self, step: int) -> bool:
        """Whether to save again now, after `step`: the checkpoint begun some steps ago could not be written."""
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
        step, self._under_way = self._under_way, None
        if step is None:
            return True
        try:
            self._report.checkpoint(step, self._done())
        except checkpoint.CheckpointError as error:
            self._report.warn(
                f"no checkpoint of step {step}: {error}. Training goes on; the checkpoints before it stay"
            )
            return False
        return True

    def _done(self) -> Path:
        path = self._saver.wait()
        assert path is not None, "a checkpoint was begun"
        return path


def load(folder: Path, like: ya.ShardedState, warn: Callable[[str], None]) -> tuple[ya.ShardedState, dict[str, Any]]:
    """`checkpoint.load`; `warn` is told of damaged checkpoints that were passed over."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        loaded = checkpoint.load(folder, like)
    for warning in told:
        warn(str(warning.message))
    return loaded
