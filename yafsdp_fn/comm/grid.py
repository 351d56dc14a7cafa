"""A device mesh as numbers: the ranks as [stages, replicas, nodes, ranks of a node], and where this one stands.

    ("shard",)                          one copy of the state, cut over all ranks
    ("replicate", "shard")              a copy per replica, cut over the ranks of that replica
    ("node", "local")                   one copy; the shard axis split into nodes and the ranks of a node
    ("replicate", "node", "local")      both
    ("stage", ...)                      each of these, for each stage of a pipeline

Outermost axis first: neighbouring ranks are of one node, then of one replica, then of one stage. Shards are cut over
the shard group, all ranks of a replica of a stage: shard index = node * local ranks + local index.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.comm.ranks import AXES, NODE, REPLICATE, SHARD, STAGE


class Grid(NamedTuple):
    """ranks: global ranks [stages, replicas, nodes, ranks of a node]; an axis that the mesh has not is of size 1"""

    ranks: torch.Tensor
    stage: int
    replica: int
    node: int
    local: int

    @property
    def shard_groups(self) -> list[list[int]]:
        """The ranks that a copy of a stage is cut over: a group per copy. All five lists are alike on every rank."""
        return rearrange(self.ranks, "stage copy node local -> (stage copy) (node local)").tolist()

    @property
    def replicate_groups(self) -> list[list[int]]:
        """The ranks with the same shard."""
        return rearrange(self.ranks, "stage copy node local -> (stage node local) copy").tolist()

    @property
    def stage_groups(self) -> list[list[int]]:
        """The ranks with the same place in each stage, by stage."""
        return rearrange(self.ranks, "stage copy node local -> (copy node local) stage").tolist()

    @property
    def local_groups(self) -> list[list[int]]:
        """The ranks of one copy on one node."""
        return rearrange(self.ranks, "stage copy node local -> (stage copy node) local").tolist()

    @property
    def node_groups(self) -> list[list[int]]:
        """The ranks of one copy with the same local index."""
        return rearrange(self.ranks, "stage copy node local -> (stage copy local) node").tolist()

    @property
    def shard_rank(self) -> int:
        """Which shard this rank has."""
        return self.node * self.ranks.shape[3] + self.local

    @property
    def batch_ranks(self) -> int:
        """Ranks that batches are dealt to: of one stage, since all stages see the same batches."""
        return self.ranks[0].numel()

    @property
    def batch_rank(self) -> int:
        """Which of them this rank is, in its stage."""
        return self.replica * self.ranks[0, 0].numel() + self.shard_rank

    @property
    def world_rank(self) -> int:
        return self.stage * self.batch_ranks + self.batch_rank


def grid(mesh: DeviceMesh) -> Grid:
    """`mesh` as a `Grid`. Raises TypeError for other axes than those of this module, naming them."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, as ya.mesh() makes, got {type(mesh).__name__}")
    names, sizes = mesh.mesh_dim_names or (), tuple(mesh.shape)
    if names == (STAGE,):
        raise TypeError(
            "mesh: a 1-D mesh is one copy of the state, cut over its ranks, and its axis is called 'stage'; for stages "
            "alone give axes ('stage', 'shard') with shard of size 1, as ya.mesh(stage=..., shard=1) does"
        )
    if names == (REPLICATE,):
        raise TypeError(
            "mesh: a 1-D mesh is one copy of the state, cut over its ranks, and its axis is called 'replicate'; for "
            "copies alone give axes ('replicate', 'shard') with shard of size 1, as ya.mesh(replicate=-1, shard=1) does"
        )
    if mesh.ndim > 1 and names not in AXES:
        known = " or ".join(map(str, AXES[1:]))
        raise TypeError(
            f"mesh: expected a 1-D DeviceMesh, or axes {known}, got axes {names or 'without names'} of sizes {sizes}; "
            "take the dimensions to shard over, such as device_mesh['replicate', 'shard']"
        )
    place, ranks = mesh.get_coordinate(), mesh.mesh.detach().cpu()
    if place is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not among its ranks {ranks.flatten().tolist()}")
    if bool((ranks.flatten().diff() <= 0).any()):
        # process groups number their members in ascending order, whatever a mesh says
        raise ValueError(f"mesh: ranks must ascend along its axes, got {ranks.tolist()}")
    outer = names[:-1]  # of a 1-D mesh the name does not matter
    size, at = dict(zip(outer, sizes, strict=False)), dict(zip(outer, place, strict=False))
    ranks = ranks.reshape(size.get(STAGE, 1), size.get(REPLICATE, 1), size.get(NODE, 1), -1)
    return Grid(ranks, at.get(STAGE, 0), at.get(REPLICATE, 0), at.get(NODE, 0), place[-1])


def mesh_axes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    """`(name, size)` of each mesh axis."""
    return tuple(zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
