"""The collectives of a mesh in order: the streams that they run on, waited for, and the steps that run on them.

    stream       its groups
    gather       gather_group, gather_local_group, stages_group
    reduce       reduce_group, reduce_local_group, reduce_nodes_group, metrics_group
    replicate    replicate_group, those of `share`; with replicas or stages
    metrics      metrics_group with stages; else that group belongs to the reduce stream
    send         message_groups of this stage, and
    receive      those of other stages; with stages
    others       made on request, such as copies to the host
    compute      those along axes inside blocks

Every rank issues in one total order over all streams.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.communication import flat, sums
from yafsdp_fn.communication.cuda_streams import CudaEvent, CudaStream, must_differ
from yafsdp_fn.communication.groups import Groups
from yafsdp_fn.communication.ranks import receive_numel, staging_numel
from yafsdp_fn.communication.streams import CommunicationError, HostEvent, HostStream
from yafsdp_fn.communication.watchdog import IN_ANOTHER_THREAD, OF_ANOTHER_PROCESS, Steps, Watchdog

WHERE = "Where ranks are:"


class OrderedGroups(Groups):
    """The process groups of one mesh, the streams of their collectives, and the steps that run.

    streams: by name; with one rank, which has no groups, only those that somebody asks for
    event: creates an event of any stream, the compute stream included
    steps: the running steps, for the watchdog
    states: numbers for the states on this mesh; unread: see params/one_state.py
    process: in which the mesh was made
    """

    unread: Any = None

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.process = os.getpid()
        self.steps = Steps()
        self.states = itertools.count(1)
        self.watchdog: Watchdog | None = None
        self.streams: dict[str, CudaStream | HostStream] = {}
        self.event: type[CudaEvent] | type[HostEvent] = CudaEvent if self.device.type == "cuda" else HostEvent
        staged = self.stages > 1
        names = [] if self.alone else ["gather", "reduce"]
        if self.replicas > 1 or staged:
            names.append("replicate")
        if staged:
            names += ["send", "receive", "metrics"]
        for name in names:
            self.stream(name)

    def stream(self, name: str) -> CudaStream | HostStream:
        """Returns the stream `name`, created at first use."""
        if name not in self.streams:
            made: CudaStream | HostStream
            if self.device.type == "cuda":
                made = CudaStream(self.device, self.world_rank, watched=self.timeout is not None)
                must_differ([*self.streams.values(), made])
            else:
                made = HostStream(name, self.world_rank)
            self.streams[name] = made
        return self.streams[name]

    def mark_used(self, memory: Tensor) -> None:
        """Marks `memory` as used by all streams: see `HostStream.mark_used`."""
        for stream in self.streams.values():
            stream.mark_used(memory)

    # ---- collectives in stream order, waited for: see `Ranks`

    def all_gather(self, shard: Tensor) -> Tensor:
        out = super().all_gather(shard)
        self.now("gather", partial(flat.gather_into, self, [out], [shard]), "all-gather")
        return out

    def reduce_scatter(
        self,
        full: Tensor,
        dtype: torch.dtype | None = None,
        accumulate: torch.dtype | None = None,
        *,
        replicas: bool = True,
    ) -> Tensor:
        out = super().reduce_scatter(full, dtype)
        shard = out.view(-1)
        wire = full.dtype
        n = out.numel()
        receive = full.new_empty(receive_numel(self, n, accumulate)).view(torch.uint8)
        job = partial(flat.reduce_into, self, [shard], [full.view(-1)], [False], [accumulate], receive=receive)
        self.now("reduce", job, "reduce-scatter")
        if replicas and self.replicas > 1:
            staging = full.new_empty(staging_numel(self, n, out.dtype, wire, accumulate))
            work = partial(sums.all_reduce_replicas, self, shard, staging, wire=wire, accumulate=accumulate)
            self.now("replicate", work, "all-reduce over replicas")
        return out

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        if self.ranks > 1:
            self.now("reduce", partial(self.reduce_group.exchange, received, sent), "exchange")

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sums over the shards of the first replica, for all replicas: a sum per replica could differ in the last bits,
        and replicas that clip by different norms drift apart. Each stage adds its own units."""
        if self.replica > 0:
            values.zero_()
        return self.all_reduce_sum(values)

    def from_stage(self, shard: Tensor, stage: int) -> Tensor:
        out = shard.clone(memory_format=torch.contiguous_format)
        self.now("gather", partial(self.stages_group.broadcast, out, stage), "broadcast from a stage")
        return out

    def of_rank_0(self, values: Tensor) -> Tensor:
        """Returns the `values` of the first rank of the mesh; those of the others, of its shape and dtype, are
        overwritten."""
        if not self.alone:
            work = partial(self.metrics_group.broadcast, values.view(-1).view(torch.uint8), 0)
            self.now(self.of_metrics, work, "broadcast from rank 0")
        return values

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        values = super().sum_over_replicas(values)
        if self.replicas > 1:
            work = partial(self.replicate_group.all_reduce, values, dist.ReduceOp.SUM)
            self.now("replicate", work, "all-reduce over replicas")
        return values

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return self._over_all(values, dist.ReduceOp.SUM, "all-reduce (sum)")

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return self._over_all(values, dist.ReduceOp.MAX, "all-reduce (max)")

    def _over_all(self, values: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Tensor:
        if not self.alone:
            self.now(self.of_metrics, partial(self.metrics_group.all_reduce, values, op), label)
        return values

    @property
    def of_metrics(self) -> str:
        """The stream of sums over all ranks. A stage that is early at such a sum must not block its own reductions."""
        return "metrics" if self.stages > 1 else "reduce"

    def now(self, stream: str, work: Callable[[], None], label: str) -> None:
        """Runs work on a stream, or on that of computes (""), and has the compute stream wait for it; on the CPU, this
        thread."""
        self.check()
        if self.alone or not stream:
            work()
            return
        before = self.event()
        after = self.event()
        before.complete()
        self.streams[stream].submit(work, (before,), after, label)
        try:
            after.wait()
        except CommunicationError as error:
            self.note_positions(error)
            raise

    # ---- steps, and whether they may run

    @property
    def lost(self) -> str | None:
        """Returns why the communicators can no longer be used, None if they can."""
        return self.steps.lost  # which those of split units share

    def must_be_of_this_process(self) -> None:
        """Raises RuntimeError in a fork of the process that made the mesh, which would train a copy of its own."""
        if self.process != os.getpid():
            raise RuntimeError(OF_ANOTHER_PROCESS)

    def check(self) -> None:
        """Raises CommunicationError if an earlier failure left the communicators out of step."""
        if self.lost is not None:
            raise CommunicationError(
                f"rank {self.world_rank}: the communicators are lost since {self.lost}; "
                "restart all ranks from a checkpoint"
            )

    @contextmanager
    def seen(self, look: Callable[[], str], after: str) -> Iterator[None]:
        """Registers a step for the watchdog while it runs; steps may nest. The watchdog's thread calls `look` for the
        position, in words.

        after: this rank's position once the step has ended
        """
        thread = threading.get_ident()
        if self.steps.looks and self.steps.thread != thread and not self.alone:
            raise RuntimeError(IN_ANOTHER_THREAD)
        self.steps.thread = thread
        self.steps.looks.append(look)
        try:
            yield
        except BaseException as error:
            after = f"after {type(error).__name__} in {look()}"
            raise
        finally:
            self.steps.after = after
            self.steps.looks.pop()

    @contextmanager
    def guarded(self, position: str) -> Iterator[None]:
        """Guards work between collectives: an exception in it must occur on all ranks, or the ranks are out of step."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"rank {self.world_rank} of {self.world}, {position}")
            self.abort(position, error)
            raise

    def abort(self, position: str, error: BaseException) -> None:
        """Cleans up after an exception."""
        raise NotImplementedError

    def note_positions(self, error: BaseException) -> None:
        """Adds the positions of all ranks to `error`, a failed communication, as a note."""
        said = any(note.startswith(WHERE) for note in getattr(error, "__notes__", ()))
        if self.watchdog is not None and not said:
            error.add_note(f"{WHERE}\n{self.watchdog.ask()}")
