"""The communicators of a mesh: one ordered stream and one process group each for gathers and for reductions.

One communicator serialises its collectives whatever the streams, so each kind has its own; every rank issues in one
total order over both. A third, small one on the CPU carries agreements between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.comm import agreement, collectives
from yafsdp_fn.comm.streams import (
    ADVICE,
    CommunicationError,
    CudaEvent,
    CudaStream,
    Event,
    HostEvent,
    HostStream,
    Stream,
)
from yafsdp_fn.mesh import device_of

ABORT_TIMEOUT = timedelta(seconds=30)
"""How long a failed rank waits for the others to fail at the same place before it calls the communicators lost."""


class Communicators:
    """What one mesh communicates with. `ranks` is 1 without any of it."""

    gather: Stream
    reduce: Stream

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks: int = mesh.size()
        self.rank: int = mesh.get_local_rank()
        self.device = device_of(mesh)
        self.parent = mesh.get_group()
        self.lost: str | None = None  # why they can no longer be used, if so
        if self.ranks == 1:
            return
        members = dist.get_process_group_ranks(self.parent)
        timeout = _timeout(self.parent, self.device)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self.gather_group = _group(members, timeout, backend, "yafsdp gather")
        self.reduce_group = _group(members, timeout, backend, "yafsdp reduce")
        self.control_group = _group(members, timeout, "gloo", "yafsdp control")
        short = ABORT_TIMEOUT if timeout is None else min(timeout, ABORT_TIMEOUT)
        self._abort_group = _group(members, short, "gloo", "yafsdp abort")
        if self.device.type == "cuda":
            self.gather, self.reduce = CudaStream(self.device), CudaStream(self.device)
        else:
            self.gather, self.reduce = HostStream("gather", self.rank), HostStream("reduce", self.rank)

    def compute_event(self) -> Event:
        """An event of the compute stream."""
        return CudaEvent() if self.device.type == "cuda" else HostEvent()

    def all_gather(self, shard: Tensor) -> Tensor:
        """A gather in stream order, waited for: [n, ...] -> [R * n, ...]."""
        out = shard.new_empty(shard.shape[0] * self.ranks, *shard.shape[1:])
        self._now(self.gather, lambda: collectives.all_gather(out, shard, self.gather_group), "all-gather")
        return out

    def reduce_scatter(self, full: Tensor) -> Tensor:
        """A reduction in stream order, waited for: [R * n, ...] -> [n, ...]."""
        out = full.new_empty(full.shape[0] // self.ranks, *full.shape[1:])
        self._now(self.reduce, lambda: collectives.reduce_scatter(out, full, self.reduce_group), "reduce-scatter")
        return out

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums `values` over ranks in place; the same bits on every rank."""
        if self.ranks > 1:
            self._now(self.reduce, lambda: collectives.all_reduce_sum(values, self.reduce_group), "all-reduce (sum)")
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        if self.ranks > 1:
            self._now(self.reduce, lambda: collectives.all_reduce_max(values, self.reduce_group), "all-reduce (max)")
        return values

    def check(self) -> None:
        """Raises where a failure on one rank has left the communicators out of step."""
        if self.lost is not None:
            raise CommunicationError(
                f"rank {self.rank}: the communicators are lost since {self.lost}; restart all ranks from a checkpoint"
            )

    def _now(self, stream: Stream, work: Callable[[], None], label: str) -> None:
        self.check()
        before = self.compute_event()
        before.complete()
        event = stream.event()
        stream.submit(work, (before,), event, label)
        event.wait()

    def same_on_all(self, text: str, what: str) -> bool:
        """Whether all ranks pass the same text. Host only: call it in the same order on all ranks."""
        if self.ranks == 1:
            return True
        try:
            return agreement.same_on_all(text, self.control_group)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank}: {what}: ranks could not compare notes ({error}). {ADVICE}"
            ) from error

    def must_agree(self, what: str, parts: Mapping[str, str], place: str = "") -> None:
        """Raises RanksDisagree on every rank unless all pass the same `parts`; it shows the first that differs.

        place: where this rank is, for the error when the others cannot be reached
        """
        if not self.same_on_all(repr(parts), place or f"comparing {what}"):
            differs = agreement.first_difference(parts, self.control_group)
            raise agreement.RanksDisagree(f"ranks disagree on {what}; {differs}")

    def drain(self) -> None:
        """Blocks the host until all streams are idle, the compute stream included."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self.ranks > 1:
            self.gather.drain()
            self.reduce.drain()

    @contextmanager
    def guarded(self, place: str) -> Iterator[None]:
        """Work between collectives: an exception in it must be one of all ranks, or the ranks are out of step."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"rank {self.rank} of {self.ranks}, {place}")
            self.abort(place, error)
            raise

    def abort(self, place: str, error: BaseException) -> None:
        """After an exception. Where all ranks failed at one place the communicators stay good, else they are lost."""
        self.drain()
        if self.ranks == 1 or self.lost is not None:
            return
        broken = isinstance(error, CommunicationError)
        text = f"rank {self.rank} lost" if broken else f"{place}: {type(error).__name__}"
        try:
            together = agreement.same_on_all(text, self._abort_group)
        except RuntimeError:
            together = False
        if not together:
            alone = "communication failed" if broken else "this rank failed alone, or elsewhere than the others"
            self.lost = f"{alone} ({place})"


def _timeout(group: ProcessGroup, device: torch.device) -> timedelta | None:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def _group(members: list[int], timeout: timedelta | None, backend: str, name: str) -> ProcessGroup:
    group: ProcessGroup = dist.new_group(members, timeout=timeout, backend=backend, group_desc=name)
    return group


_BY_MESH: dict[DeviceMesh, Communicators] = {}


def communicators(mesh: DeviceMesh) -> Communicators:
    """The communicators of `mesh`, made once: process groups are a process-wide resource, shared by its states."""
    found = _BY_MESH.get(mesh)
    if found is None or found.parent is not mesh.get_group():  # meshes are equal across a restart of the process group
        found = _BY_MESH[mesh] = Communicators(mesh)
    return found
