"""Reads ahead: a thread makes the next batches while a step computes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from train.data.rows import Batch, Place, Position, Rows, batches

AHEAD = 2
"""Batches made before they are asked for."""


class Reader:
    """The batches from a position on."""

    def __init__(self, rows: Rows, position: Position, size: int, place: Place, *, seed: int) -> None:
        self.position = position
        """Behind the batches handed out, whatever has been read ahead: what a checkpoint keeps."""
        self._batches = batches(rows, position, size, place, seed=seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")  # one: batches come in their order
        self._ahead: deque[Future[tuple[Batch, Position]]] = deque()
        for _ in range(AHEAD):
            self._submit()

    def _submit(self) -> None:
        self._ahead.append(self._thread.submit(next, self._batches))

    def next(self) -> Batch:
        batch, self.position = self._ahead.popleft().result()
        self._submit()
        return batch

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
