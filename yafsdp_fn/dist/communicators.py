"""The communicators of a mesh: its process groups, and the ordered streams their collectives run on.

    stream       its groups
    gather       gather_group, gather_local_group, stages_group
    reduce       reduce_group, reduce_local_group, reduce_nodes_group, metrics_group
    replicate    replicate_group, those of `share`; with replicas or stages
    metrics      metrics_group with stages; else that group belongs to the reduce stream
    send         message_groups of this stage, and
    receive      those of other stages; with stages
    others       made on request, such as copies to the host

Every rank issues in one total order over all streams. Consistency checks use groups of their own. Failures: failing.py.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.dist import flat
from yafsdp_fn.dist.cuda_streams import CudaEvent, CudaStream, must_differ
from yafsdp_fn.dist.failing import Failing
from yafsdp_fn.dist.streams import CommunicationError, Event, HostEvent, HostStream, Stream
from yafsdp_fn.dist.watchdog import RankPosition, Watch
from yafsdp_fn.util.torch_private import default_group


class Communicators(Failing):
    """The process groups and streams of one mesh.

    event: creates an event of any stream, the compute stream included
    memory: context in which to allocate what collectives read and write; memory that belongs together is one block
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.event: type[CudaEvent] | type[HostEvent] = CudaEvent if self.device.type == "cuda" else HostEvent
        self.memory: Callable[[], AbstractContextManager[None]] = nullcontext
        staged = self.stages > 1
        optional = {"replicate": self.replicas > 1 or staged, "send": staged, "receive": staged, "metrics": staged}
        for name in () if self.alone else ("gather", "reduce", *(name for name, there in optional.items() if there)):
            self.stream(name)
        if self.device.type == "cuda":
            self._meet()
        self.start_watchdog(weakref.WeakMethod(self.under_way))

    def stream(self, name: str) -> Stream:
        """Returns the stream `name`, created at first use."""
        if name not in self.streams:
            cuda = self.device.type == "cuda"
            self.streams[name] = self._cuda_stream(name) if cuda else HostStream(name, self.world_rank)
            must_differ(tuple(self.streams.values()))
        return self.streams[name]

    def _cuda_stream(self, name: str) -> Stream:
        if self._watch is None and self.timeout is not None and not self.alone:
            self._watch = Watch(self.world_rank, self.timeout, self.abort_late)
        add = None if self._watch is None else partial(self._watch.add, name)
        return CudaStream(self.device, self.world_rank, add)

    def _meet(self) -> None:
        """Exchanges a first message with every stage. NCCL connects two ranks at their first message and blocks both
        hosts, so all ranks do it here, in one order."""
        token = torch.zeros(1, device=self.device)
        for sender in range(len(self.message_groups)):
            for receiver in range(self.stages):
                if sender == self.stage != receiver:
                    self._now("send", self.send(token, receiver), "first message")
                elif receiver == self.stage != sender:
                    self._now("receive", self.receive(token, sender), "first message")

    def allocate_in(self, allocator: Callable[[], AbstractContextManager[None]]) -> None:
        """Sets `memory` to `allocator`. All ranks call it, before any state exists."""
        if self.memory is nullcontext:  # else by an equal mesh; states may use its memory
            self.memory = allocator

    def keep(self, memory: Tensor) -> None:
        """Marks `memory` as used by all streams: see `Stream.keep`."""
        for stream in self.streams.values():
            stream.keep(memory)

    # ---- collectives in stream order, waited for: see `Ranks`

    def all_gather(self, shard: Tensor) -> Tensor:
        out = super().all_gather(shard)
        self._now("gather", partial(flat.gather_into, self, [out], [shard]), "all-gather")
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
        shard, wire, n = out.view(-1), full.dtype, out.numel()
        receive = full.new_empty(flat.receive_numel(self, n, accumulate))
        job = partial(flat.reduce_into, self, [shard], [full.view(-1)], receive)
        self._now("reduce", partial(job, adds=[False], accumulate=accumulate), "reduce-scatter")
        if replicas and self.replicas > 1:
            staging = full.new_empty(flat.staging_numel(self, n, out.dtype, wire, accumulate))
            work = partial(flat.all_reduce_replicas, self, shard, staging, wire=wire, accumulate=accumulate)
            self._now("replicate", work, "all-reduce over replicas")
        return out

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        if self.ranks > 1:
            self._now("reduce", partial(self.reduce_group.exchange, received, sent), "exchange")

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sums over the shards of the first replica, for all replicas: a sum per replica could differ in the last bits,
        and replicas that clip by different norms drift apart. Each stage adds its own units."""
        if self.replica > 0:
            values.zero_()
        return self.all_reduce_sum(values)

    def from_stage(self, shard: Tensor, stage: int) -> Tensor:
        out = shard.clone(memory_format=torch.contiguous_format)
        self._now("gather", partial(self.stages_group.broadcast, out, stage), "broadcast from a stage")
        return out

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        values = super().sum_over_replicas(values)
        if self.replicas > 1:
            work = partial(self.replicate_group.all_reduce, values, dist.ReduceOp.SUM)
            self._now("replicate", work, "all-reduce over replicas")
        return values

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        if (event := self.start_sum(values)) is not None:
            self._wait(event)
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        if not self.alone:
            work = partial(self.metrics_group.all_reduce, values, dist.ReduceOp.MAX)
            self._now(self._of_metrics, work, "all-reduce (max)")
        return values

    def start_sum(self, values: Tensor) -> Event | None:
        """Starts `all_reduce_sum`; the event waits for it. None with one rank."""
        if self.alone:
            return None
        work = partial(self.metrics_group.all_reduce, values, dist.ReduceOp.SUM)
        return self._start(self._of_metrics, work, "all-reduce (sum)")

    @property
    def _of_metrics(self) -> str:
        """The stream of sums over all ranks. A stage that is early at such a sum must not block its own reductions."""
        return "metrics" if self.stages > 1 else "reduce"

    def _now(self, stream: str, work: Callable[[], None], label: str) -> None:
        self._wait(self._start(stream, work, label))

    def _wait(self, event: Event) -> None:
        try:
            event.wait()
        except CommunicationError as error:
            self.note_positions(error)
            raise

    def _start(self, name: str, work: Callable[[], None], label: str) -> Event:
        self.check()
        before, event = self.event(), self.event()
        before.complete()
        self.streams[name].submit(work, (before,), event, label)
        return event

    # ---- health

    def check(self) -> None:
        """Raises CommunicationError if an earlier failure left the communicators out of step."""
        if self.lost is not None:
            raise CommunicationError(
                f"rank {self.world_rank}: the communicators are lost since {self.lost}; "
                "restart all ranks from a checkpoint"
            )

    @contextmanager
    def seen(self, look: Callable[[], RankPosition], after: str) -> Iterator[None]:
        """Registers a step for the watchdog while it runs; steps may nest. The watchdog's thread calls `look` for the
        position.

        after: this rank's position once the step has ended
        """
        self.steps.thread = threading.get_ident()
        self.steps.looks.append(look)
        try:
            yield
        except BaseException as error:
            after, self.steps.failed = f"after {type(error).__name__} in {look().place}", True
            raise
        finally:
            self.steps.after = after
            self.steps.looks.pop()


OWNED = "_yafsdp_communicators"  # attribute of a mesh


def communicators(mesh: DeviceMesh) -> Communicators:
    """Returns the communicators of `mesh`. They are created once, owned by the mesh, and end with its last holder.

    Raises TypeError for a mesh whose axes no state can use.
    """
    found: Communicators | None = getattr(mesh, OWNED, None)
    if found is None or found.parent is not default_group():  # a mesh may outlive a restart of the process group
        found = Communicators(mesh)
        setattr(mesh, OWNED, found)
        weakref.finalize(mesh, found.close).atexit = False  # streams end at exit on their own
    return found
