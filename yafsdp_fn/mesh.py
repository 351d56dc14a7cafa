"""The device mesh: which ranks share one sharded state."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXIS = "shard"


def mesh(*, shard: int = -1, device: str | torch.device | None = None, timeout: timedelta | None = None) -> DeviceMesh:
    """A 1-D mesh with axis `shard` over all ranks, and the process group beneath it.

    Under torchrun (`RANK`, `WORLD_SIZE`) the process group is made if there is none, NCCL on CUDA and gloo on the CPU;
    without torchrun there is one rank. Every rank calls this once, at the start.

    shard: number of ranks, -1 for all of them; device: "cuda" or "cpu", default cuda where there is one
    timeout: after which a collective whose peers have stopped raises, ten minutes by default
    """
    kind = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu").type
    if not dist.is_initialized():
        _start(kind, timeout or timedelta(minutes=10))
    elif timeout is not None:
        raise ValueError("mesh(timeout=...): the process group exists already; give the timeout to init_process_group")
    ranks = dist.get_world_size()
    if shard not in (-1, ranks):
        raise ValueError(
            f"mesh(shard={shard}): there are {ranks} ranks; start {shard} of them "
            f"(torchrun --nproc-per-node {shard} ...), or leave shard=-1"
        )
    return init_device_mesh(kind, (ranks,), mesh_dim_names=(AXIS,))


def _start(kind: str, timeout: timedelta) -> None:
    backend = "cuda:nccl,cpu:gloo" if kind == "cuda" else "gloo"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout
        )


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
