"""The communicators of a mesh: ordered streams and process groups for gathers, reductions, and sums over replicas.

    stream       its groups
    gather       gather_group (the shard group), gather_local_group (this rank's node)
    reduce       reduce_group (the shard group), reduce_local_group, reduce_nodes_group, the one of metrics
    replicate    replicate_group (the ranks with the same shard); where there are replicas

One communicator serialises its collectives whatever the streams, so that no two streams share one; every rank issues
in one total order over all of them. Another, small one on the CPU carries agreements between all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.comm import agreement, collectives, flat
from yafsdp_fn.comm.local_sum import Scratch
from yafsdp_fn.comm.registered import Registered
from yafsdp_fn.comm.streams import (
    ADVICE,
    CommunicationError,
    CudaEvent,
    CudaStream,
    Event,
    HostEvent,
    HostStream,
    Stream,
    must_differ,
)
from yafsdp_fn.mesh import device_of, grid

EMULATED = "emulated"
"""The backend of `ya.emulate`: where the default process group has it, all groups do."""

ABORT_TIMEOUT = timedelta(seconds=30)
"""How long a failed rank waits for the others to fail at the same place before it calls the communicators lost."""


class Communicators:
    """What one mesh communicates with, and where this rank stands.

    ranks, rank: the shard group, that a copy of the state is cut over, and the index in it
    replicas, replica: copies of the state, and which one this is; nodes, local_ranks, local_rank: of the shard group
    world, world_rank: all ranks of the mesh; alone: there is one, and there are no streams and no groups
    """

    gather: Stream
    reduce: Stream
    replicate: Stream

    def __init__(self, mesh: DeviceMesh) -> None:
        places = grid(mesh)
        self.replicas, self.nodes, self.local_ranks = places.ranks.shape
        self.replica, self.node, self.local_rank = places.replica, places.node, places.local
        self.ranks, self.rank = self.nodes * self.local_ranks, places.shard_rank
        self.world, self.world_rank = self.replicas * self.ranks, places.world_rank
        self.alone = self.world == 1
        self.device = device_of(mesh)
        self.parent = _default_group()
        self.lost: str | None = None  # why they can no longer be used, if so
        self.reduce_scratch, self.replicate_scratch = Scratch(self.device), Scratch(self.device)
        self._registered: Registered | None = None
        self.streams: tuple[Stream, ...] = ()
        if self.alone:
            return
        # several axes have groups of their own, made with torch's timeout whatever that of the process group is
        timeout = _timeout(mesh.get_group() if mesh.ndim == 1 else self.parent, self.device)
        short = ABORT_TIMEOUT if timeout is None else min(timeout, ABORT_TIMEOUT)
        backend, control = "nccl" if self.device.type == "cuda" else "gloo", "gloo"
        if self.parent.name() == EMULATED:
            backend = control = EMULATED
        copies, everyone = places.shard_groups, [places.ranks.flatten().tolist()]
        self.gather_group = _group(copies, timeout, backend, "gather")
        self.reduce_group = self._metrics_group = _group(copies, timeout, backend, "reduce")
        self.gather_local_group = self.gather_group
        if self.nodes > 1:
            self.gather_local_group = _group(places.local_groups, timeout, backend, "gather in a node")
            self.reduce_local_group = _group(places.local_groups, timeout, backend, "reduce in a node")
            self.reduce_nodes_group = _group(places.node_groups, timeout, backend, "reduce between nodes")
        if self.replicas > 1:
            self.replicate_group = _group(places.replicate_groups, timeout, backend, "replicate")
            self._metrics_group = _group(everyone, timeout, backend, "metrics")
        self.control_group = _group(everyone, timeout, control, "control")
        self._abort_group = _group(everyone, short, control, "abort")
        self.gather, self.reduce = self._stream("gather"), self._stream("reduce")
        self.streams = (self.gather, self.reduce)
        if self.replicas > 1:
            self.replicate = self._stream("replicate")
            self.streams = (*self.streams, self.replicate)
        must_differ(self.streams)

    def register(self) -> None:
        """From here on, what is allocated in `memory` is registered with NCCL. All ranks do it, before any state.

        Raises RuntimeError, on all ranks alike, where that is not possible.
        """
        if self.alone:
            raise RuntimeError("mesh(registered=True): one rank has no communicator to register memory with")
        if self._registered is not None:  # by an equal mesh; states may use its pools
            return
        names = ("gather", "gather_local", "reduce", "reduce_local", "reduce_nodes", "replicate")
        groups = [getattr(self, f"{name}_group", None) for name in names]
        self._registered = Registered([group for group in groups if group is not None], self.device)

    def memory(self) -> AbstractContextManager[None]:
        """Where to allocate what collectives read and write: all of it that belongs together in one block."""
        return nullcontext() if self._registered is None else self._registered.memory()

    def _stream(self, name: str) -> Stream:
        return CudaStream(self.device) if self.device.type == "cuda" else HostStream(name, self.world_rank)

    @cached_property
    def offload(self) -> Stream:
        """Copies to the host and back, of this rank alone; made where a program has some."""
        stream = self._stream("offload")
        must_differ((*self.streams, stream))
        self.streams = (*self.streams, stream)
        return stream

    def compute_event(self) -> Event:
        """An event of the compute stream."""
        return CudaEvent() if self.device.type == "cuda" else HostEvent()

    def all_gather(self, shard: Tensor) -> Tensor:
        """A gather over the shard group in stream order, waited for: [n, ...] -> [R * n, ...]."""
        out = shard.new_empty(shard.shape[0] * self.ranks, *shard.shape[1:])
        self._now(self.gather, lambda: flat.gather_into(self, out, shard), "all-gather")
        return out

    def reduce_scatter(
        self,
        full: Tensor,
        dtype: torch.dtype | None = None,
        accumulate: torch.dtype | None = None,
        *,
        replicas: bool = True,
    ) -> Tensor:
        """The sum over all ranks of the mesh, in stream order, waited for: [R * n, ...] -> [n, ...], in `dtype`.

        accumulate: as in `flat.reduce_into`; the dtype of `full` is the wire's; replicas: False sums over the shard
        group alone
        """
        out = full.new_empty(full.shape[0] // self.ranks, *full.shape[1:], dtype=dtype or full.dtype)
        shard, wire, n = out.view(-1), full.dtype, out.numel()
        receive = full.new_empty(flat.receive_numel(self, n, accumulate))
        self._now(
            self.reduce,
            lambda: flat.reduce_into(self, shard, full.view(-1), receive, add=False, accumulate=accumulate),
            "reduce-scatter",
        )
        if replicas and self.replicas > 1:
            staging = full.new_empty(flat.staging_numel(self, n, out.dtype, wire, accumulate))
            self._now(
                self.replicate,
                lambda: flat.all_reduce_replicas(self, shard, staging, wire=wire, accumulate=accumulate),
                "all-reduce over replicas",
            )
        return out

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sums over the shard group in place what each rank has for its own shard; the same bits on every rank.

        That is the sum of the first replica for all of them: sums of their own could differ in the last bits, since
        groups may add in different orders, and replicas that clip by different norms drift apart.
        """
        if self.replica > 0:
            values.zero_()
        return self.all_reduce_sum(values)

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """`values` summed over the replicas of this rank's shard: a new tensor, where there are replicas."""
        if self.replicas > 1:
            values = values.clone(memory_format=torch.contiguous_format)
            work = partial(collectives.all_reduce_sum, values, self.replicate_group)
            self._now(self.replicate, work, "all-reduce over replicas")
        return values

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all ranks of the mesh in place; the same bits on every rank."""
        if not self.alone:
            self._now(self.reduce, lambda: collectives.all_reduce_sum(values, self._metrics_group), "all-reduce (sum)")
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        if not self.alone:
            self._now(self.reduce, lambda: collectives.all_reduce_max(values, self._metrics_group), "all-reduce (max)")
        return values

    def check(self) -> None:
        """Raises where a failure on one rank has left the communicators out of step."""
        if self.lost is not None:
            raise CommunicationError(
                f"rank {self.world_rank}: the communicators are lost since {self.lost}; "
                "restart all ranks from a checkpoint"
            )

    def start_sum(self, values: Tensor) -> Event | None:
        """`all_reduce_sum` that has happened when the event is waited for; None where there is nothing to do."""
        if self.alone:
            return None
        work = partial(collectives.all_reduce_sum, values, self._metrics_group)
        return self._start(self.reduce, work, "all-reduce (sum)")

    def _now(self, stream: Stream, work: Callable[[], None], label: str) -> None:
        self._start(stream, work, label).wait()

    def _start(self, stream: Stream, work: Callable[[], None], label: str) -> Event:
        self.check()
        before = self.compute_event()
        before.complete()
        event: Event = stream.event()
        stream.submit(work, (before,), event, label)
        return event

    def same_on_all(self, text: str, what: str) -> bool:
        """Whether all ranks pass the same text. Host only: call it in the same order on all ranks."""
        if self.alone:
            return True
        try:
            return agreement.same_on_all(text, self.control_group)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.world_rank}: {what}: ranks could not compare notes ({error}). {ADVICE}"
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
        for stream in self.streams:
            stream.drain()

    @contextmanager
    def guarded(self, place: str) -> Iterator[None]:
        """Work between collectives: an exception in it must be one of all ranks, or the ranks are out of step."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"rank {self.world_rank} of {self.world}, {place}")
            self.abort(place, error)
            raise

    def abort(self, place: str, error: BaseException) -> None:
        """After an exception. Where all ranks failed at one place the communicators stay good, else they are lost."""
        self.drain()
        if self.alone or self.lost is not None:
            return
        broken = isinstance(error, CommunicationError)
        text = f"rank {self.world_rank} lost" if broken else f"{place}: {type(error).__name__}"
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


def _group(groups: list[list[int]], timeout: timedelta | None, backend: str, name: str) -> ProcessGroup:
    """Makes all of `groups`, each of global ranks, and returns the one that this rank is in."""
    # torch numbers groups, so all ranks make all of them in one order. Where the mesh is only a part of the ranks, the
    # others take no part: names are then made of the members and of how many groups each of them is in
    local = sum(map(len, groups)) < dist.get_world_size()
    mine: ProcessGroup | None = None
    for members in groups:
        made = dist.new_group(
            members, timeout=timeout, backend=backend, use_local_synchronization=local, group_desc=f"yafsdp {name}"
        )
        mine = made if dist.get_rank() in members else mine
    assert mine is not None
    return mine


def _default_group() -> ProcessGroup:
    group: ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


_BY_MESH: dict[DeviceMesh, Communicators] = {}


def communicators(mesh: DeviceMesh) -> Communicators:
    """The communicators of `mesh`, made once: process groups are a process-wide resource, shared by its states.

    Raises TypeError for what is no mesh for a state.
    """
    found = _BY_MESH.get(mesh)
    if found is None or found.parent is not _default_group():  # meshes are equal across a restart of the process group
        found = _BY_MESH[mesh] = Communicators(mesh)
    return found
