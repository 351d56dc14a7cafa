"""emulate: makes this process one rank of a cluster that does not exist.

with emulate("a100-80g", ranks=64):
    mesh = ya.mesh(device="cpu")          # or init_device_mesh, fully_shard, DistributedDataParallel
    ...                                   # collectives take the modelled time
"""

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from benchmarks.emulated.group import EmulatedGroup
from benchmarks.emulated.lanes import HostLane, Lane, Wire
from yafsdp_fn.communication.groups import EMULATED
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.cluster import cluster as named


class Emulation:
    """A running emulation. It ends with the `with` block, or by `close`."""

    def __init__(self, cluster: Cluster, ranks: int, rank: int, move_bytes: bool) -> None:
        self.cluster, self.ranks, self.rank, self._move_bytes = cluster, ranks, rank, move_bytes
        self._wire = Wire()
        self._groups: list[EmulatedGroup] = []
        self._cuda: Any = None
        self._open = True
        dist.Backend.register_backend(EMULATED, self._group, extended_api=True, devices=["cpu", "cuda"])
        dist.init_process_group(EMULATED, store=c10d.HashStore(), rank=rank, world_size=ranks)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.ranks} on {self.cluster.name}, emulated{'' if self._open else ', ended'}>"

    def close(self) -> None:
        """Waits for all collectives begun, and destroys the process group."""
        if not self._open:
            return
        self._open = False
        if dist.is_initialized() and dist.get_backend() == EMULATED:
            dist.destroy_process_group()
        for group in self._groups:
            group.close()

    def __enter__(self) -> "Emulation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _group(self, options: Any, backend_options: object) -> EmulatedGroup:
        """Makes a process group of this rank, called by torch; an empty list of members means all ranks."""
        self._must_be_open()
        members = list(options.global_ranks_in_group) or list(range(self.ranks))
        group = EmulatedGroup(self.cluster, members, options.group_rank, self._lane)
        self._groups.append(group)
        return group

    def _must_be_open(self) -> None:
        if not self._open:
            raise RuntimeError("the emulation has ended: begin another with emulate(...)")

    def _lane(self, kind: str) -> Lane:
        self._must_be_open()
        if kind == "cpu":
            return HostLane(self._wire, str(len(self._groups)), self.rank)
        from benchmarks.emulated.cuda import CudaLane, CudaWire

        self._cuda = self._cuda or CudaWire(move_bytes=self._move_bytes)
        return CudaLane(self._cuda)


def emulate(cluster: str | Cluster, ranks: int = 64, rank: int = 0, *, move_bytes: bool = False) -> Emulation:
    """Makes this process rank `rank` of `ranks` on `cluster`, until the `with` block ends or `close` is called.

    It makes the default process group, with a backend of its own; every program that takes its process groups from
    torch runs on it unmodified. A collective takes the time of `Cluster.ring` or `all_to_all`, by the nodes of its
    ranks (neighbouring ranks share one). Groups that use a link at the same time share it, and collectives of one group
    follow each other. Results: other ranks hold this rank's data (`emulated.group`).

    On the CPU compute takes its real time, in the thread that issues: `simulate` such runs with
    `cluster.replace(host_computes=True)`.

    move_bytes: on CUDA, kernels also copy as many bytes through memory as travel, so that contention with compute is
        real; needs CUDA and triton. On the CPU only the contents are copied

    Raises RuntimeError if there is a process group already, ValueError for a rank outside the ranks.

    >>> def rank_3_of_64():
    ...     with emulate("a100-80g", ranks=64, rank=3):
    ...         return torch.distributed.get_rank(), torch.distributed.get_world_size()
    >>> ya.launch(rank_3_of_64, ranks=1)                       # in a process of its own
    [(3, 64)]
    """
    where = named(cluster)
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"emulate: rank {rank} of {ranks}; expected 0 <= rank < ranks, such as rank=0, ranks=64")
    if move_bytes and not torch.cuda.is_available():
        raise ValueError("emulate(move_bytes=True) needs CUDA: on the CPU the contents are copied, and nothing else")
    if dist.is_initialized():
        raise RuntimeError(
            f"emulate: this process has a process group already ({dist.get_backend()}, {dist.get_world_size()} ranks); "
            "emulate in a process of its own, or destroy that group first"
        )
    return Emulation(where, ranks, rank, move_bytes)
