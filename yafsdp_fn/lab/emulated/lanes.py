"""Runs a group's collectives in order: on the CPU a thread. See `cuda` for CUDA's streams."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_fn.dist.streams import HostEvent, HostStream
from yafsdp_fn.lab.emulated.links import Wire
from yafsdp_fn.planner.cluster import Phase


class Collective(NamedTuple):
    """One collective. work: leaves the contents; outs, inputs: its tensors; asynchronous: as the caller says"""

    name: str
    phases: Sequence[Phase]
    work: Sequence[Callable[[], object]]
    outs: list[Tensor]
    inputs: list[Tensor]
    asynchronous: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole vector, which travels in every phase."""
        return max(sum(x.numel() * x.element_size() for x in tensors) for tensors in (self.outs, self.inputs))


class Lane(Protocol):
    """Runs a group's collectives on one kind of device, in order."""

    def run(self, todo: Collective) -> dist.Work: ...

    def close(self) -> None:
        """Waits for collectives begun, and ends."""


class HostWork(dist.Work):
    """A collective of a host thread; `wait` blocks this thread."""

    def __init__(self, event: HostEvent, future: torch.futures.Future[list[Tensor]]) -> None:
        super().__init__()
        self._event, self._future = event, future

    def wait(self, timeout: object = None) -> bool:
        """Waits for the end of the collective; raises its error. It always ends, so the timeout is ignored."""
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class HostLane:
    """One thread. The caller itself runs a collective that it waits for anyway, if no other is under way.

    Copying the contents counts within the modelled time, unless it takes longer.
    """

    def __init__(self, wire: Wire, name: str, rank: int) -> None:
        self._wire = wire
        self._stream = HostStream(f"emulated-{name}", rank)
        self._last: HostWork | None = None  # of the thread's

    def run(self, todo: Collective) -> dist.Work:
        transfer = self._wire.submit(self, todo.phases)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def collective() -> None:
            try:
                for each in todo.work:
                    each()
                self._wire.wait(transfer)
            except BaseException as error:
                future.set_exception(error)  # type: ignore[arg-type]
                raise
            with torch.inference_mode(False):  # callbacks run here, and may make tensors
                future.set_result(todo.outs)

        event = HostEvent()
        work = HostWork(event, future)
        if todo.asynchronous or not (self._last is None or self._last.is_completed()):
            self._stream.submit(collective, (), event, f"emulated {todo.name}")
            self._last = work
        else:
            with torch.inference_mode():  # as the thread does
                collective()
            event.complete()
        return work

    def close(self) -> None:
        self._stream.close()
