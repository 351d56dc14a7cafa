"""`Saver`: saves that a step waits for only as long as its state is copied.

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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_fn.checkpoint import io
from yafsdp_fn.checkpoint.agree import AllRanks
from yafsdp_fn.checkpoint.box import copied_to, held
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
        """Waits for the save before, copies `state`, and returns; the next step may take the state.

        Raises as `wait` where the save before failed: then this one is not begun.
        """
        self.wait()
        job = io.prepare(self._directory, state, extra, *self._keep)
        with state.memory.using(io.reads(state)), torch.no_grad():
            job = job._replace(tensors={key: self._copied(key, tensor) for key, tensor in job.tensors.items()})
            copied: torch.cuda.Event | None = None
            if state.mesh.device_type == "cuda":
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
        self._thread = threading.Thread(target=self._write, args=(job, copied), name="yafsdp-save")
        self._thread.start()

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

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        source, _ = held(tensor)
        memory = self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (source.shape, source.dtype):
            pin = source.device.type == "cuda"
            memory = self._memory[key] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pin)
        return copied_to(memory, tensor)

    def _store(self, job: io.Job, ranks: AllRanks) -> Path:
        return job.write(ranks)

    def _write(self, job: io.Job, copied: torch.cuda.Event | None) -> None:
        with suppress(AttributeError, OSError):  # Linux: of this thread alone, which has time, while steps have none
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            if copied is not None:
                copied.synchronize()
            self._folder = self._store(job, AllRanks(self._group))
        except BaseException as error:  # raised where the main thread waits
            self._error = error
