"""One rank of several on the fake device: the emulated cluster's groups, whose collectives run on the current stream.

    with rank_of(4, {"shard": 4}) as mesh:
        state = ya.init(params, tx, mesh=mesh)

Other ranks hold what this one holds (`emulated.contents`); what is read and written is what NCCL would read and write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.harness.fake_cuda.tensors import CUDA, DEVICE
from yafsdp_fn.dist import groups
from yafsdp_fn.lab.emulated.emulate import Emulation
from yafsdp_fn.lab.emulated.lanes import Collective
from yafsdp_fn.planner.cluster import cluster
from yafsdp_fn.runtime import arguments


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


class Ranks(Emulation):
    def _lane(self, kind: str) -> Any:
        return Inline()


@contextmanager
def rank_of(axes: dict[str, int], device: torch.device = CUDA) -> Iterator[DeviceMesh]:
    """A mesh of `axes` on `device`, of which this process is rank 0. It has no other process group."""
    emulation = Ranks(cluster("a100-80g"), math.prod(axes.values()), 0, False)
    with emulation, pytest.MonkeyPatch.context() as patch:
        for user in (groups, arguments):
            patch.setattr(user, "device_of", lambda mesh: device)
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@contextmanager
def saves_alone() -> Iterator[None]:
    """torch's checkpoints are of this rank's part: nobody else's is there to write."""
    says = default_planner._validate_global_plan.__annotations__["return"]
    well: Any = True if says is bool else []  # torch 2.11 says whether all is well, 2.13 what is not
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_planner, "_validate_global_plan", lambda *args: well)
        yield
