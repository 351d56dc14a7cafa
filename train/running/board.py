"""TensorBoard events: the numbers of metrics.jsonl once more, given up with a warning where they cannot be written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class Board:
    """Events in `folder`; those after step `first` are taken back. warn: called once, with why it gave up"""

    def __init__(self, folder: Path, first: int, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._writer: SummaryWriter | None = None
        self._hook = threading.excepthook
        threading.excepthook = self._in_thread  # tensorboard writes in a thread, whose failure would be a traceback
        self.rewind(first)

    def add(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            try:
                self._writer.add_scalar(name, value, step)
            except OSError as error:
                self._give_up(error)

    def rewind(self, step: int) -> None:
        self._close()
        try:
            self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self._close()
        threading.excepthook = self._hook

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: BaseException | None) -> None:
        self._writer = None
        self._warn(f"{self._folder}: {error}; no more TensorBoard events of this start, metrics.jsonl has the numbers")

    def _in_thread(self, failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.exc_value, OSError):  # else the next `add` meets it
            self._hook(failure)
