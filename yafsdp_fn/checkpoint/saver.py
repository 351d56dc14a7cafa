"""`Saver`: saves beside the next steps; only their updates wait until the state is copied.

    with Saver("checkpoints", keep_last=2) as saver:
        for ...:
            state, metrics = step(state, batch)
            if due:
                saver.save(state, {"position": position})

A thread on each rank writes from the copy, and the threads use a process group of their own. The copy, one of the state
in the memory of the host, is reused by every save.
"""

import os
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.checkpoint import io
from yafsdp_fn.checkpoint.folder import AllRanks, Directory
from yafsdp_fn.communication.cuda_streams import begin_thread
from yafsdp_fn.communication.groups import make_group
from yafsdp_fn.communication.streams import Work
from yafsdp_fn.runtime.state import ShardedState
from yafsdp_fn.util.torch_private import default_group, timeout_of


class Saver:
    """Saves into `directory` as `checkpoint.save` does, one save at a time. Every rank of a state makes it, saves and
    waits alike. Warns of a failure if nobody waits: when it is dropped, or beside an exception that leaves `with`.

    >>> with ya.checkpoint.Saver(folder, keep_last=2) as saver:
    ...     saver.save(state, {"position": 17})                # copies the state, and writes beside the next steps
    >>> ya.checkpoint.latest(folder).name
    'step-00000000'
    """

    def __init__(self, directory: Directory, *, keep_last: int | None = None, keep_every: int | None = None) -> None:
        self._directory = Path(directory).absolute()  # whatever the working directory is at a save
        self._keep = (keep_last, keep_every)
        self._group: ProcessGroup | None = None  # of the ranks that save, from the first time on
        self._memory: dict[str, Tensor] = {}
        # of the last save. Not `join`: a thread whose join was interrupted passes for ended from then on
        self._ended = threading.Event()
        self._ended.set()
        self._folder: Path | None = None
        self._errors: list[BaseException] = []  # of the last save, one at most
        weakref.finalize(self, _warn_of, self._errors)

    def save(self, state: ShardedState, extra: Mapping[str, Any] | None = None) -> None:
        """Waits for the previous save, starts to copy `state`, and returns; the next step may take the state.

        Raises as `wait` if the previous save failed, and does not start.
        """
        self.wait()
        job = io.prepare(self._directory, state, extra, *self._keep)
        self._meet(state.mesh)
        self._memory = copies = {name: self._like(name, part) for name, part in job.parts.items()}
        copied = self._copy(state, [(copies[name], part) for name, part in job.parts.items()])
        job = job._replace(parts=copies)
        ended = threading.Event()
        arguments = job, copied, state.memory.comms.device, ended
        threading.Thread(target=self._write, args=arguments, name="yafsdp-save").start()
        self._ended = ended

    def _meet(self, mesh: DeviceMesh) -> None:
        """Makes the group of this mesh's ranks, unless it exists."""
        ranks = mesh.mesh.flatten().tolist()
        if len(ranks) > 1 and (self._group is None or dist.get_process_group_ranks(self._group) != ranks):
            self._leave()
            timeout = timeout_of(default_group(), torch.device("cpu"))
            self._group = make_group([ranks], timeout, "gloo", "save").process_group

    def _leave(self) -> None:
        # a group of only some ranks stays: torch names new groups by their count
        if self._group is not None and self._group.size() == dist.get_world_size():
            dist.destroy_process_group(self._group)
        self._group = None

    @torch.no_grad()
    def _copy(self, state: ShardedState, pairs: Sequence[tuple[Tensor, Tensor]]) -> Work:
        """Copies each second tensor into the first; returns a function that waits for the end."""
        memory = state.memory
        comms = memory.comms
        done = torch.cuda.Event() if comms.device.type == "cuda" else None  # type: ignore[no-untyped-call]

        def copy() -> None:
            for to, part in pairs:
                to.copy_(part, non_blocking=True)
            if done is not None:
                done.record()

        if not comms.streams:  # one rank: with a stream of ours, every op of later steps would have events
            with memory.using(io.reads(state)):
                copy()
            return done.synchronize if done is not None else lambda: None
        stream = comms.stream("save")
        ready = comms.event()
        over = comms.event()
        ready.complete()
        for _, part in pairs:
            stream.mark_used(part)
        waits = [ready, *memory.board.use(over, "save", io.reads(state), ())]
        stream.submit(copy, waits, over, f"copy of step {state.step} for its checkpoint")
        return over.wait if done is None else done.synchronize

    @property
    def busy(self) -> bool:
        """True while this rank still writes; others may differ."""
        return not self._ended.is_set()

    def wait(self) -> Path | None:
        """Waits for the last save and returns its folder; None before the first. Raises CheckpointError, on every rank
        and once, if it failed on one: earlier checkpoints are unchanged, and the state may be saved again."""
        self._ended.wait()
        if self._errors:
            raise self._errors.pop()
        return self._folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        self._ended.wait()
        _warn_of(self._errors)
        self._leave()

    def _like(self, name: str, part: Tensor) -> Tensor:
        """Returns memory for a copy, which is kept."""
        memory = self._memory.get(name)
        if memory is not None and (memory.shape, memory.dtype) == (part.shape, part.dtype):
            return memory
        return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=part.device.type == "cuda")

    def _write(self, job: io.Job, copied: Work, device: torch.device, ended: threading.Event) -> None:
        """Writes a save on its thread, when the state is copied."""
        try:
            begin_thread(device)
            with suppress(AttributeError, OSError):  # on Linux for this thread alone: steps come first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            copied()
            self._folder = job.write(AllRanks(self._group))
        except BaseException as error:  # raised where the main thread waits
            self._errors.append(error.with_traceback(None))  # its frames hold this saver, which is to be dropped
        finally:
            ended.set()


def _warn_of(errors: list[BaseException]) -> None:
    """Warns of a save that failed, and that nobody waits for any more."""
    for error in errors:
        warnings.warn(f"the last save failed, and nobody waited for it: {error}", stacklevel=2)
