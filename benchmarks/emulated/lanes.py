"""The links of the emulated cluster, and the lanes in which groups use them: a group's collectives run in order.

    transfer = wire.submit(group, phases)     # behind the group's earlier ones: a group does one at a time
    wire.wait(transfer)                       # this thread, until the model says that it has ended

As in `simulate`, k collectives that use a link at a time get a k-th of it each, and latencies are not shared. A group's
next collective begins exactly when the model ends the one before, however late threads wake up. On the CPU a lane is a
thread; see `cuda` for CUDA's streams.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_fn.communication.streams import HostEvent, HostStream
from yafsdp_fn.planner.cluster import Phase
from yafsdp_fn.planner.simulate import LINKS

# ---- The links: the progress of each group's collective.


class Transfer:
    """A collective under way. left: remaining seconds of its current phase, if it were alone"""

    __slots__ = ("ended", "left", "phases")

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = [phase for phase in reversed(phases) if phase.seconds > 0]
        self.left = self.phases[-1].seconds if self.phases else 0.0
        self.ended: float | None = None


class Links:
    """The model, on a clock that `advance` moves. now: seconds"""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._queues: dict[Hashable, deque[Transfer]] = {}

    def submit(self, group: Hashable, phases: Sequence[Phase]) -> Transfer:
        """Returns a transfer that begins now, or when the group's earlier ones have ended."""
        transfer = Transfer(phases)
        self._queues.setdefault(group, deque()).append(transfer)
        return transfer

    def next_end(self) -> float:
        """Returns when the first of the current phases ends; infinity if nothing is under way."""
        rates = self._rates()
        return self.now + min((transfer.left / rate for transfer, rate in rates), default=math.inf)

    def advance(self, to: float) -> None:
        """Runs the model until the time `to`, each event at its own time."""
        while (end := self.next_end()) <= to:
            self._pass(end)
            for group, queue in list(self._queues.items()):
                self._settle(queue)
                if not queue:
                    del self._queues[group]
        self._pass(max(to, self.now))

    def _pass(self, to: float) -> None:
        for transfer, rate in self._rates():
            transfer.left -= (to - self.now) * rate
        self.now = to

    def _settle(self, queue: deque[Transfer]) -> None:
        """Ends the phase of the first transfer if it is over. The next transfer begins now, at the next event."""
        first = queue[0]
        if first.left <= 1e-12 * max(1.0, self.now):
            if first.phases:
                first.phases.pop()
            if first.phases:
                first.left = first.phases[-1].seconds
            else:
                first.ended = self.now
                queue.popleft()

    def _rates(self) -> list[tuple[Transfer, float]]:
        first = [queue[0] for queue in self._queues.values()]
        using = [transfer.phases[-1].resource for transfer in first if transfer.phases]
        return [
            (t, 1.0 / using.count(t.phases[-1].resource) if t.phases and t.phases[-1].resource in LINKS else 1.0)
            for t in first
        ]


class Wire:
    """The model in real time, for threads."""

    def __init__(self) -> None:
        self._links = Links(time.perf_counter())
        self._changed = threading.Condition()

    def submit(self, group: Hashable, phases: Sequence[Phase]) -> Transfer:
        """Begins a transfer of `group` now, or behind its earlier ones."""
        with self._changed:
            self._links.advance(time.perf_counter())
            transfer = self._links.submit(group, phases)
            self._changed.notify_all()  # its end may be the next event, which changes the shares of the others
            return transfer

    def wait(self, transfer: Transfer) -> None:
        """Blocks this thread until `transfer` has ended."""
        with self._changed:
            while True:
                self._links.advance(time.perf_counter())
                if transfer.ended is not None:
                    return
                self._changed.wait(max(0.0, self._links.next_end() - time.perf_counter()))


# ---- The lanes.


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
        return max(sum(x.nbytes for x in tensors) for tensors in (self.outs, self.inputs))


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
