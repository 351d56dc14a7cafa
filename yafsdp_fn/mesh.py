"""The device mesh: which ranks share one sharded state, and how.

    ("shard",)                          one copy of the state, cut over all ranks
    ("replicate", "shard")              a copy per replica, cut over the ranks of that replica
    ("node", "local")                   one copy; the shard axis split into nodes and the ranks of a node
    ("replicate", "node", "local")      both

Outermost axis first: neighbouring ranks are of one node, then of one replica. Shards are cut over the shard group, all
ranks of a replica: shard index = node * local ranks + local index.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE, SHARD, NODE, LOCAL = "replicate", "shard", "node", "local"
AXES = ((SHARD,), (REPLICATE, SHARD), (NODE, LOCAL), (REPLICATE, NODE, LOCAL))


def mesh(
    *,
    replicate: int | None = None,
    shard: int = -1,
    local: int | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta | None = None,
    registered: bool = False,
) -> DeviceMesh:
    """A mesh over all ranks, and the process group beneath it.

    Under torchrun (`RANK`, `WORLD_SIZE`) the process group is made if there is none, NCCL on CUDA and gloo on the CPU;
    without torchrun there is one rank. Every rank calls this once, at the start.

    replicate: copies of the state, over which gradients are all-reduced, on an axis `replicate` (which the mesh has if
        this is given); -1 for as many as the ranks allow: `replicate=-1, shard=1` is plain data parallelism
    shard: ranks that one copy is cut over; -1 for as many as the ranks allow
    local: ranks of a node, or of whatever shares fast links, where schedules and reductions are to tell them apart:
        the axis `shard` becomes `node` and `local`
    device: "cuda" or "cpu", default cuda where there is one
    timeout: after which a collective whose peers have stopped raises, ten minutes by default
    registered: slots and working copies of states on this mesh are allocated by NCCL and registered with its
        communicators, so that copy engines and switches can do its work; raises RuntimeError where NCCL, torch or the
        device cannot. Such memory is not given back when a state is dropped
    """
    kind = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu").type
    if not dist.is_initialized():
        _start(kind, timeout or timedelta(minutes=10))
    elif timeout is not None:
        raise ValueError("mesh(timeout=...): the process group exists already; give the timeout to init_process_group")
    _agree({"replicate": replicate, "shard": shard, "local": local, "device": kind, "registered": registered})
    replicas, ranks = _sizes(1 if replicate is None else replicate, shard, dist.get_world_size())
    axes = {} if replicate is None else {REPLICATE: replicas}
    if local is None:
        axes[SHARD] = ranks
    elif local < 1:
        raise ValueError(f"mesh(local={local}): expected a number of ranks per node, or None")
    elif ranks % local:
        raise ValueError(
            f"mesh(local={local}): a copy of the state is cut over {ranks} ranks, not a multiple of {local}; "
            "give the number of ranks per node (torchrun's --nproc-per-node), or leave local=None"
        )
    else:
        axes |= {NODE: ranks // local, LOCAL: local}
    made = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if registered:
        from yafsdp_fn.comm.communicators import communicators  # which are made of a mesh, and import this file

        communicators(made).register()
    return made


def _agree(arguments: dict[str, object]) -> None:
    """Raises unless all ranks ask for the same mesh: making groups would hang."""
    found: list[object] = [arguments] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, arguments)
    others = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if others:
        raise ValueError(
            f"mesh: ranks ask for different meshes: rank 0 for {found[0]}, rank {others[0]} for {found[others[0]]}; "
            "call ya.mesh with the same arguments on every rank"
        )


def _sizes(replicate: int, shard: int, world: int) -> tuple[int, int]:
    """`(replicas, ranks per replica)` of `world` ranks."""
    given = {"replicate": replicate, "shard": shard}
    asked = ", ".join(f"{name}={size}" for name, size in given.items() if (name, size) != (REPLICATE, 1))
    if any(size < 1 and size != -1 for size in given.values()):
        raise ValueError(f"mesh({asked}): sizes are positive, or -1 for as many as there are ranks for")
    if replicate == shard == -1:
        raise ValueError(
            "mesh(replicate=-1, shard=-1): at most one of them can follow from the number of ranks; "
            "for plain data parallelism give shard=1"
        )
    if -1 in given.values():
        other = max(replicate, shard)
        if world % other:
            raise ValueError(
                f"mesh({asked}): there are {world} ranks, not a multiple of {other}; "
                f"start {-(-world // other) * other} of them, or give a divisor of {world}"
            )
        return (world // other, shard) if replicate == -1 else (replicate, world // other)
    if (wanted := replicate * shard) != world:
        raise ValueError(
            f"mesh({asked}): there are {world} ranks; start {wanted} of them "
            f"(torchrun --nproc-per-node {wanted} ...), or leave shard=-1"
        )
    return replicate, shard


class Grid(NamedTuple):
    """The ranks of any mesh as [replicas, nodes, ranks of a node], and where this one stands.

    ranks: global ranks; an axis that the mesh has not is of size 1
    """

    ranks: torch.Tensor
    replica: int
    node: int
    local: int

    @property
    def shard_groups(self) -> list[list[int]]:
        """The ranks that a copy of the state is cut over: a group per copy. All four lists are alike on every rank."""
        return self.ranks.flatten(1).tolist()

    @property
    def replicate_groups(self) -> list[list[int]]:
        """The ranks with the same shard."""
        return self.ranks.flatten(1).T.tolist()

    @property
    def local_groups(self) -> list[list[int]]:
        """The ranks of one copy on one node."""
        return self.ranks.flatten(0, 1).tolist()

    @property
    def node_groups(self) -> list[list[int]]:
        """The ranks of one copy with the same local index."""
        return self.ranks.mT.flatten(0, 1).tolist()

    @property
    def shard_rank(self) -> int:
        """Which shard this rank has."""
        return self.node * self.ranks.shape[2] + self.local

    @property
    def world_rank(self) -> int:
        return self.replica * self.ranks[0].numel() + self.shard_rank


def grid(mesh: DeviceMesh) -> Grid:
    """`mesh` as a `Grid`. Raises TypeError for other axes than those of this module, naming them."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, as ya.mesh() makes, got {type(mesh).__name__}")
    names, sizes = mesh.mesh_dim_names or (), tuple(mesh.shape)
    if names == (REPLICATE,):
        raise TypeError(
            "mesh: a 1-D mesh is one copy of the state, cut over its ranks, and its axis is called 'replicate'; for "
            "copies alone give axes ('replicate', 'shard') with shard of size 1, as ya.mesh(replicate=-1, shard=1) does"
        )
    if mesh.ndim > 1 and names not in AXES:
        known = " or ".join(str(axes) for axes in AXES[1:])
        raise TypeError(
            f"mesh: expected a 1-D DeviceMesh, or axes {known}, got axes {names or 'without names'} of sizes {sizes}; "
            "take the dimensions to shard over, such as device_mesh['replicate', 'shard']"
        )
    place = mesh.get_coordinate()
    ranks = mesh.mesh.detach().cpu()
    if place is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not among its ranks {ranks.flatten().tolist()}")
    if bool((ranks.flatten().diff() <= 0).any()):
        # process groups number their members in ascending order, whatever a mesh says
        raise ValueError(f"mesh: ranks must ascend along its axes, got {ranks.tolist()}")
    axes = dict(zip(names, sizes, strict=True)) if mesh.ndim > 1 else {}
    coordinate = dict(zip(names, place, strict=True)) if mesh.ndim > 1 else {LOCAL: place[0]}
    copies, nodes = axes.get(REPLICATE, 1), axes.get(NODE, 1)
    return Grid(
        ranks.reshape(copies, nodes, -1),
        coordinate.get(REPLICATE, 0),
        coordinate.get(NODE, 0),
        coordinate.get(LOCAL, coordinate.get(SHARD, 0)),
    )


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


def mesh_axes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    """`(name, size)` of each mesh axis."""
    return tuple(zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
