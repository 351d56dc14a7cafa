"""A device mesh as numbers, and its process groups, one or more for each kind of collective.

    gather_group, gather_local_group        the shard group; this rank's node
    reduce_group, reduce_local_group, reduce_nodes_group, metrics_group
    replicate_group                         the ranks with the same shard; with replicas
    stages_group                            the ranks with the same coordinates in each stage; with stages
    message_groups[s]                       the same ranks, for messages that stage s sends
    along[axis]                             the ranks that differ on an axis inside blocks alone
    control_group, abort_group              all ranks, on the CPU: consistency checks
    stage_control_group                     the ranks of this stage, for the same

A communicator serialises its collectives whatever the streams, so no two streams share one; those along axes belong to
the compute stream. For that reason messages between stages have one communicator per sender: a rank sends in its own
and receives in those of others, each on one stream. A communicator then serialises only what its stream orders anyway:
a receive that waits for its sender blocks no send, and simultaneous messages of two stages to each other use two
communicators. Within one, messages between two ranks arrive in the order in which they were sent.
"""

import os
from datetime import timedelta
from functools import partial
from typing import Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.gloo import GlooGroup
from yafsdp_fn.communication.micro_shards import Scratch, micro_shards_of
from yafsdp_fn.communication.ranks import Axis, Ranks, hierarchical
from yafsdp_fn.communication.store import new_group
from yafsdp_fn.communication.streams import Work
from yafsdp_fn.util.mesh_axes import AXES, NODE, OUTSIDE, REPLICATE, SHARD, STAGE, MeshAxes, inside_of
from yafsdp_fn.util.torch_private import default_group, serves, timeout_of

EMULATED = "emulated"
"""The backend of `benchmarks.emulated`. If the default process group has it, all groups do."""

ABORT_TIMEOUT = timedelta(seconds=30)
"""A failed rank waits this long for the others to fail at the same place; then the communicators are lost."""

GRACE = timedelta(seconds=60)
"""NCCL's own watchdog ends the process this much later than ours names the collective that hangs (watchdog.py)."""


# ---- A device mesh as numbers: its ranks as [stages, replicas, nodes, ranks of a node], and this rank's coordinates.
#
#     ("shard",)                          one copy of the state, cut over all ranks
#     ("replicate", "shard")              a copy per replica, cut over the ranks of that replica
#     ("node", "local")                   one copy; the shard axis split into nodes and the ranks of a node
#     ("replicate", "node", "local")      both
#     ("stage", ...)                      each of these, for each stage of a pipeline
#     (..., "expert", "tensor")           axes inside blocks, under any names that are not taken: behind shard or local
#
# The outermost axis comes first: neighbouring ranks share a node, then a replica, then a stage. Shards are cut over
# the shard group, all ranks of a replica of a stage: shard index = node * local ranks + local index.


class MeshRanks(Ranks):
    """The ranks of a mesh, and this rank's coordinates, without collectives. Raises TypeError for axes other than those
    above, naming them.

    grid: global ranks [stages, replicas, nodes, ranks of a node]; an axis that the mesh lacks has size 1
    node, local_rank: of this rank; world_rank: among all ranks of the mesh
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        inside = _axes_inside(mesh)
        names = mesh.mesh_dim_names or ()
        coordinate = mesh.get_coordinate()
        grid = mesh.mesh.detach().cpu()
        if coordinate is None:
            raise ValueError(f"mesh: rank {dist.get_rank()} is not among its ranks {grid.flatten().tolist()}")
        if bool((grid.flatten().diff() <= 0).any()):
            # process groups number their members in ascending order, whatever a mesh says
            raise ValueError(f"mesh: ranks must ascend along its axes, got {grid.tolist()}")
        outer = names[: -1 - len(inside)]  # of a 1-D mesh the name does not matter
        size = dict(zip(outer, mesh.shape, strict=False))
        self.grid = grid.reshape(size.get(STAGE, 1), size.get(REPLICATE, 1), size.get(NODE, 1), -1)
        axes = {}
        for name, count, at in zip(names, mesh.shape, coordinate, strict=True):
            if name in inside:
                axes[name] = Axis(count, at)
        stages, replicas, nodes, local_ranks = self.grid.shape
        [[stage, replica, self.node, self.local_rank]] = (self.grid == dist.get_rank()).nonzero().tolist()
        rank = self.node * local_ranks + self.local_rank
        super().__init__(replicas, nodes, local_ranks, device_of(mesh), rank, replica, stages, stage, axes)
        self.world_rank = (stage * replicas + replica) * self.ranks + rank

    def groups_over(self, *members: str) -> list[list[int]]:
        """The ranks in groups, the same list on every rank: those of a group differ on the axes `members` alone, of
        stage, copy, node and local."""
        axes = "stage copy node local"
        others = [axis for axis in axes.split() if axis not in members]
        return rearrange(self.grid, f"{axes} -> ({' '.join(others)}) ({' '.join(members)})").tolist()


def _axes_inside(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns the axes of `mesh` inside blocks. Raises TypeError unless it has axes of ours."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, as ya.mesh() makes, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and not names:
        raise TypeError("mesh: its axes have no names; make it by ya.mesh(), or give mesh_dim_names=('shard',)")
    if names in ((STAGE,), (REPLICATE,)):
        [name] = names
        alone = "stages" if name == STAGE else "copies"
        raise TypeError(
            f"mesh: a 1-D mesh is one copy of the state, cut over its ranks, and its axis is called {name!r}; for "
            f"{alone} alone give axes ({name!r}, 'shard') with shard of size 1, as ya.mesh({name}=..., shard=1) does"
        )
    inside = inside_of(names)
    if not OUTSIDE.isdisjoint(inside):
        inside = ()
    outer = names[: len(names) - len(inside)]
    if mesh.ndim > 1 and outer not in AXES:
        known = " or ".join(map(str, AXES[1:]))
        got = f"axes {names or 'without names'} of sizes {tuple(mesh.shape)}"
        raise TypeError(
            f"mesh: expected a 1-D DeviceMesh, or axes {known}, got {got}; take the dimensions to shard over, such as "
            "device_mesh['replicate', 'shard']"
        )
    return inside


def mesh_axes(mesh: DeviceMesh) -> MeshAxes:
    """`(name, size)` of each mesh axis."""
    return tuple(zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


# ---- The process groups of a mesh.


class Groups(MeshRanks):
    """The process groups of one mesh. parent: the default process group when they were made

    timeout: of a collective, None where the backend does not say
    groups: all of the mesh's backend
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.set_micro_shards(micro_shards_of(mesh))
        self.parent = default_group()
        self.timeout: timedelta | None = None
        self.reduce_scratch, self.replicate_scratch = Scratch(self.device), Scratch(self.device)
        self.groups = list[RankGroup]()
        self.message_groups: list[RankGroup] = []
        self._sharing: dict[tuple[int, ...], RankGroup] = {}
        self.along: dict[str, RankGroup] = {}
        if self.alone:
            return
        # several axes have groups of their own, made with torch's timeout whatever that of the process group is
        timeout = timeout_of(mesh.get_group() if mesh.ndim == 1 else self.parent, self.device)
        self.timeout = timeout
        self.abort_timeout = ABORT_TIMEOUT if timeout is None else min(timeout, ABORT_TIMEOUT)
        backend = "gloo"
        control = "gloo"
        if self.device.type == "cuda":
            backend = "nccl"
            timeout = None if timeout is None else timeout + GRACE
            order_launches()
        if self.parent.name() == EMULATED:
            backend = control = EMULATED
        self._how = timeout, backend
        everyone = [self.grid.flatten().tolist()]
        self._make_unit_groups(self.groups_over("node", "local"))
        self.metrics_group = self.reduce_group
        if self.replicas > 1:
            self.replicate_group = self._new(self.groups_over("copy"), "replicate")
        if self.stages > 1:
            of_stages = self.groups_over("stage")
            self.stages_group = self._new(of_stages, "stages")
            for sender in range(self.stages):
                self.message_groups.append(self._new(of_stages, f"sent by stage {sender}"))
        if self.replicas > 1 or self.stages > 1:
            self.metrics_group = self._new(everyone, "metrics")
        for name, axis in self.axes.items():
            if axis.size > 1:
                self.along[name] = self._new(self._in_copies(self.subgroups(along=(name,))), f"along {name}")
        self.control_group = self.stage_control_group = make_group(everyone, self.timeout, control, "control")
        if self.stages > 1 and self.along:
            of_stages = self.grid.flatten(1).tolist()
            self.stage_control_group = make_group(of_stages, self.timeout, control, "control of a stage")
        self.abort_group = make_group(everyone, self.abort_timeout, control, "abort")

    def _make_unit_groups(self, members: list[list[int]], within: str = "") -> None:
        """Makes the groups that move units, which are cut over each of `members`. within: for torch's own messages"""
        self.gather_group = self.gather_local_group = self._new(members, f"gather{within}")
        self.reduce_group = self._new(members, f"reduce{within}")
        if hierarchical(self):  # else a node is as large as the whole, or a rank
            at = torch.tensor(members, device="cpu").view(-1, self.nodes, self.local_ranks)
            in_node = at.flatten(0, 1).tolist()
            self.gather_local_group = self._new(in_node, f"gather in a node{within}")
            self.reduce_local_group = self._new(in_node, f"reduce in a node{within}")
            self.reduce_nodes_group = self._new(at.mT.flatten(0, 1).tolist(), f"reduce between nodes{within}")

    def _new(self, groups: list[list[int]], name: str) -> RankGroup:
        """Makes `groups`, each of global ranks, and returns that of this rank."""
        made = make_group(groups, *self._how, name)
        self.groups.append(made)
        return made

    def _in_copies(self, subgroups: list[list[int]]) -> list[list[int]]:
        """Returns `subgroups` of a copy, as global ranks of every copy."""
        copies = self.groups_over("node", "local")
        return [[copy[rank] for rank in members] for copy in copies for members in subgroups]

    def _narrowed(self, names: tuple[str, ...]) -> Self:
        """Makes the groups of units that are split over `names`. All ranks call it, when they place a state."""
        found = super()._narrowed(names)
        found.local_rank = found.rank % found.local_ranks
        if found.ranks > 1:
            found._make_unit_groups(self._in_copies(self.subgroups(across=names)), f" within {', '.join(names)}")
        return found

    def send(self, tensor: Tensor, stage: int) -> Work:
        """Returns work for the stream "send": sends `tensor` to the rank of `stage` with this rank's coordinates, and
        blocks until it is received."""
        return partial(self.message_groups[self.stage].send, tensor, stage)

    def receive(self, tensor: Tensor, stage: int) -> Work:
        """Returns work for the stream "receive": receives into `tensor` what the rank of `stage` sends, of the same
        size and dtype."""
        return partial(self.message_groups[stage].receive, tensor, stage)

    def share(self, stages: tuple[int, ...]) -> None:
        """Makes the group of `stages`, which share a unit, from the ranks with this rank's coordinates. All ranks call
        it."""
        if stages in self._sharing:
            return
        others = [stage for stage in range(self.stages) if stage not in stages]
        groups: list[list[int]] = []
        for members in filter(None, (stages, others)):
            groups += [[ranks[stage] for stage in members] for ranks in self.groups_over("stage")]
        self._sharing[stages] = self._new(groups, f"stages {stages}")

    def sharing(self, stages: tuple[int, ...]) -> RankGroup:
        """Returns the group that `share` has made, for the stream "replicate"."""
        return self._sharing[stages]

    def destroy(self) -> None:
        """Destroys the groups, unless their process group has ended already."""
        there = dist.is_initialized() and self.parent is default_group()
        # groups of a part of the ranks stay: torch names the next ones after how many there are
        if there and not self.alone and self.world == dist.get_world_size():
            control = self.control_group, self.stage_control_group, self.abort_group
            for group in dict.fromkeys([*self.groups, *control]):
                dist.destroy_process_group(group.process_group)


def make_group(groups: list[list[int]], timeout: timedelta | None, backend: str, name: str) -> RankGroup:
    """Makes all of `groups`, each of global ranks, and returns the one with this rank."""
    # torch numbers groups, so all ranks make all of them in one order. If the mesh is only a part of the ranks, the
    # others take no part, and names are made of the members and the number of groups that each is in
    local = sum(map(len, groups)) < dist.get_world_size()
    made = [new_group(ranks, timeout, backend, name, use_local_synchronization=local) for ranks in groups]
    [own] = [group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks]
    return group_of(own)


def order_launches() -> None:
    """Tells NCCL (2.26 or newer) to give kernels of several communicators the device in the order in which the host
    launches them, which is that of all ranks; else one may hold what an earlier one needs. NCCL reads it once, at its
    first use in the process: this comes before any collective of ours."""
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


_HOST_GROUPS: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
"""The groups of ours, by default process group."""


def host_group() -> ProcessGroup | None:
    """Returns a group of all ranks that works on the CPU, for what hosts tell each other: None, which is torch's word
    for the default process group, or a gloo group if that has no backend for the CPU (`init_process_group("nccl")`).

    All ranks make it together, on their main threads, at the first call.
    """
    default = default_group()
    cpu = torch.device("cpu")
    if default.name() == EMULATED or serves(default, cpu):
        return None
    if default not in _HOST_GROUPS:
        _HOST_GROUPS[default] = new_group(None, timeout_of(default, cpu), "gloo", "host")
    return _HOST_GROUPS[default]


def group_of(process_group: ProcessGroup) -> RankGroup:
    several = process_group.name() == "gloo" and process_group.size() > 1
    return GlooGroup(process_group) if several else RankGroup(process_group)
