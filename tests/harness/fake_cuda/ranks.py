"""One rank of several on the fake device: the emulated cluster's groups, whose collectives run on the current stream.

    with rank_of({"stage": 2, "shard": 2}, rank=3) as mesh:
        state = ya.init(params, tx, mesh=mesh)

Other ranks hold what this one holds (`emulated.group`), and messages are zeros; what is read and written is what
NCCL would read and write. The log has what each communicator launches, and when it is connected: as NCCL's, it is made
at its first use, and connected at the first one of each kind, which blocks the hosts of all members and may wait for
the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import default_planner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.emulated.emulate import Emulation
from benchmarks.emulated.group import EmulatedGroup, data
from benchmarks.emulated.lanes import Collective
from tests.harness.fake_cuda.log import HOST, Launch
from tests.harness.fake_cuda.tensors import CUDA, DEVICE, CudaTensor
from yafsdp_fn.communication import communicators, groups
from yafsdp_fn.planner.cluster import cluster
from yafsdp_fn.runtime import batch


class Done(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Inline:
    """Collectives of one group, done by whoever issues them."""

    def run(self, todo: Collective) -> dist.Work:
        before = len(DEVICE.launched)
        with torch.no_grad():
            for each in todo.work:
                each()
        DEVICE.launched[before:] = ["collective"]
        return Done()

    def close(self) -> None: ...


KINDS = {"all_gather": "ring", "reduce_scatter": "ring", "broadcast": "ring"}
"""Collectives that share their connections."""


class NcclGroup(EmulatedGroup):
    """A group that tells the log what it launches."""

    def __init__(self, members: list[int], rank: int, lane: Any) -> None:
        super().__init__(cluster("a100-80g"), members, rank, lane)
        self._members = members
        self._connected = set[tuple[str, tuple[int, ...]]]()

    def _launch(self, kind: str, members: tuple[int, ...]) -> None:
        name = self.group_desc if len(members) == len(self._members) else f"{self.group_desc}, {members}"
        for new in ("communicator", KINDS.get(kind, kind)):
            of = tuple(self._members) if new == "communicator" else members
            if (new, of) not in self._connected:
                self._connected.add((new, of))
                DEVICE.waits(f"the first {new} of {self.group_desc}")
                DEVICE.log.launch("meet", HOST, Launch(self.group_desc if of != members else name, of, new))
        DEVICE.log.launch("launch", DEVICE.stream, Launch(name, members, kind))

    def connect(self) -> None:
        """Makes the communicator, as `make_communicator` does."""
        if ("communicator", tuple(self._members)) not in self._connected:
            self._connected.add(("communicator", tuple(self._members)))
            DEVICE.log.launch("meet", HOST, Launch(self.group_desc, tuple(self._members), "communicator"))

    def _run(self, name: str, phases: Any, work: Any, outs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        if any(isinstance(x, CudaTensor) for x in (*outs, *inputs)) and len(self._members) > 1:
            self._launch(name, tuple(self._members))
        return super()._run(name, phases, work, outs, inputs, opts)

    def alltoall(self, outs: list[Tensor], mine: list[Tensor], opts: Any = None) -> dist.Work:
        """Zeros, of other lengths than what is sent."""
        return self._run("all_to_all", (), [data(out).zero_ for out in outs], outs, mine, opts)

    def _message(self, tensors: list[Tensor], other: int, work: Any) -> dist.Work:
        pair = self._members[other], self._members[self.rank()]
        self.issued["message"] += 1
        self._launch("message", (min(pair), max(pair)))
        with torch.no_grad():
            for x in tensors:
                work(x)
        return Done()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return self._message(tensors, to, torch.clone)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self._message(tensors, source, torch.zero_)


class Ranks(Emulation):
    def _lane(self, kind: str) -> Any:
        return Inline()

    def _group(self, options: Any, backend_options: object) -> EmulatedGroup:
        members = list(options.global_ranks_in_group) or list(range(self.ranks))
        self._groups.append(NcclGroup(members, options.group_rank, self._lane))
        return self._groups[-1]


@contextmanager
def rank_of(axes: dict[str, int], device: torch.device = CUDA, rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh of `axes` on `device`, of which this process is one rank. It has no other process group."""
    emulation = Ranks(cluster("a100-80g"), math.prod(axes.values()), rank, False)
    with emulation, pytest.MonkeyPatch.context() as patch:
        for user in (groups, batch):
            patch.setattr(user, "device_of", lambda mesh: device)
        patch.setattr(communicators, "make_communicator", lambda group, device: group.connect())
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@contextmanager
def saves_alone() -> Iterator[None]:
    """torch's checkpoints are of this rank's part: nobody else's is there to write."""
    says = default_planner._validate_global_plan.__annotations__["return"]
    well: Any = True if says is bool else []  # torch 2.11 says whether all is well, 2.13 what is not
    with mock.patch.object(default_planner, "_validate_global_plan", lambda *args: well):
        yield
