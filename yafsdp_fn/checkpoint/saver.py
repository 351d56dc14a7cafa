"""`Saver`: saves that go on beside the next steps, of which only the updates wait until the state is copied.

    with Saver("checkpoints", keep_last=2) as saver:
        for ...:
            state, metrics = step(state, batch)
            if due:
                saver.save(state, {"position": position})

A thread on each rank writes from the copy, and the threads agree over a process group of their own. The copy, one of
the state in the memory of the host, is kept from save to save.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_fn.checkpoint import io
from yafsdp_fn.checkpoint.agree import AllRanks
from yafsdp_fn.checkpoint.box import Box, held, in_place_of
from yafsdp_fn.state import ShardedState
from yafsdp_fn.torch_private import default_group, timeout_of


class Saver:
    """Saves into `directory` as `checkpoint.save` does, one at a time. Every rank makes it, saves and waits alike."""

    def __init__(self, directory: io.Directory, *, keep_last: int | None = None, keep_every: int | None = None) -> None:
        self._directory, self._keep = directory, (keep_last, keep_every)
        timeout = timeout_of(default_group(), torch.device("cpu"))
        self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="yafsdp save")
        self._memory: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None
        self._error: BaseException | None = None

    def save(self, state: ShardedState, extra: Mapping[str, Any] | None = None) -> None:
        """Waits for the save before, begins to copy `state`, and returns; the next step may take the state.

        Raises as `wait` where the save before failed: then this one is not begun.
        """
        self.wait()
        job = io.prepare(self._directory, state, extra, *self._keep)
        copies = {key: self._like(key, source) for key, source in job.tensors.items()}
        copied = self._copy(state, [(copies[key], source) for key, source in job.tensors.items()])
        job = job._replace(tensors=copies)
        self._thread = threading.Thread(target=self._write, args=(job, copied), name="yafsdp-save")
        self._thread.start()

    @torch.no_grad()
    def _copy(self, state: ShardedState, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copies each second tensor, or box, into the first one; returns what waits for the end of it."""
        memory, comms = state.memory, state.memory.comms
        done = torch.cuda.Event() if comms.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        shards = [(held(to), source.shard) for to, source in pairs if isinstance(source, Box)]

        def copy() -> None:
            for to, shard in shards:
                to.copy_(shard, non_blocking=True)
            if done is not None:
                done.record()

        for to, source in pairs:  # an optimizer's count, say, which no buffer stands for: before the next step is begun
            if not isinstance(source, Box):
                to.copy_(source, non_blocking=True)
        if not comms.streams:
            with memory.using(io.reads(state)):
                copy()
            return done.synchronize if done is not None else lambda: None
        stream, ready, over = comms.stream("save"), comms.event(), comms.event()
        ready.complete()
        for _, shard in shards:
            stream.keep(shard)
        waits = [ready, *memory.board.use(over, "save", io.reads(state), ())]
        stream.submit(copy, waits, over, f"copy of step {state.step} for its checkpoint")
        return over.wait if done is None else done.synchronize

    @property
    def busy(self) -> bool:
        """Whether this rank still writes. Others may be done, or not yet."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Path | None:
        """The folder of the last save, when it is complete; None before the first. Raises CheckpointError, on every
        rank and once, where it failed on one: the checkpoints before it are as they were, and the state may be saved
        again."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()
        dist.destroy_process_group(self._group)

    def _like(self, key: str, tensor: Tensor) -> Tensor:
        """A tensor, or a box, for the copy, in memory that is kept."""
        source = held(tensor)
        memory = self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (source.shape, source.dtype):
            pin = source.device.type == "cuda"
            memory = self._memory[key] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pin)
        return in_place_of(tensor, memory)

    def _store(self, job: io.Job, ranks: AllRanks) -> Path:
        return job.write(ranks)

    def _write(self, job: io.Job, copied: Callable[[], None]) -> None:
        with suppress(AttributeError, OSError):  # Linux: of this thread alone, which has time, while steps have none
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            copied()
            self._folder = self._store(job, AllRanks(self._group))
        except BaseException as error:  # raised where the main thread waits
            self._error = error
