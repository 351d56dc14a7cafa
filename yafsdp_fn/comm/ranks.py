"""Where a rank stands among those that share a state, and how a flat vector is cut over ranks.

stages x replicas x nodes x local ranks = all ranks of a mesh; a copy of a stage's part of the state is cut over
nodes x local ranks
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STAGE, REPLICATE, SHARD, NODE, LOCAL = "stage", "replicate", "shard", "node", "local"
_WITHIN = ((SHARD,), (REPLICATE, SHARD), (NODE, LOCAL), (REPLICATE, NODE, LOCAL))
AXES = (*_WITHIN, *((STAGE, *axes) for axes in _WITHIN))
"""The axes that a mesh can have, outermost first."""

ALIGN = 8
"""Elements; 16 bytes in bf16, the narrowest dtype that is gathered, so that every view is aligned for vector loads."""


def round_up(n: int, multiple: int = ALIGN) -> int:
    return -(-n // multiple) * multiple


def padded_numel(numel: int, ranks: int) -> int:
    """Elements of a flat vector of `numel` whose slices are equal on all ranks, and aligned."""
    return round_up(-(-numel // ranks)) * ranks


class Ranks:
    """The ranks of a mesh as numbers, and the collectives that whole trees need.

    Here nobody communicates: collectives give shapes, for fake tensors, so that steps are traced on a mesh that need
    not exist. `Communicators` are ranks that do.

    stages, stage: of the pipeline, each with units of its own, and which one this is
    replicas, replica: copies of the state, and which one this is; nodes, local_ranks: of one copy
    ranks, rank: the shard group, that a copy is cut over, and the index in it
    batch_ranks, batch_rank: those that batches are dealt to: of one stage, since all stages see the same batches
    world: all ranks of the mesh; alone: they are one
    deterministic: whether bits are not to depend on the number of ranks; micro_shards: of every global batch, then
    """

    micro_shards: int | None = None
    deterministic = False

    def __init__(
        self,
        replicas: int,
        nodes: int,
        local_ranks: int,
        device: torch.device,
        rank: int = 0,
        replica: int = 0,
        stages: int = 1,
        stage: int = 0,
    ) -> None:
        self.replicas, self.nodes, self.local_ranks, self.device = replicas, nodes, local_ranks, device
        self.ranks, self.rank, self.replica = nodes * local_ranks, rank, replica
        self.stages, self.stage = stages, stage
        self.batch_ranks, self.batch_rank = replicas * self.ranks, replica * self.ranks + rank
        self.world = stages * self.batch_ranks
        self.alone = self.world == 1

    def deal(self, micro_shards: int | None) -> None:
        """How global batches are cut (micro_shards.py); None: as the caller likes, and bits depend on it."""
        self.micro_shards, self.deterministic = micro_shards, micro_shards is not None

    def all_gather(self, shard: Tensor) -> Tensor:
        """[n, ...] -> [R * n, ...] over the shard group."""
        return shard.new_empty(shard.shape[0] * self.ranks, *shard.shape[1:])

    def reduce_scatter(
        self,
        full: Tensor,
        dtype: torch.dtype | None = None,
        accumulate: torch.dtype | None = None,
        *,
        replicas: bool = True,
    ) -> Tensor:
        """[R * n, ...] -> [n, ...] in `dtype`, the sum over all ranks of this stage, sent in the dtype of `full`.

        accumulate: as in `flat.reduce_into`; replicas: False sums over the shard group alone
        """
        return full.new_empty(full.shape[0] // self.ranks, *full.shape[1:], dtype=dtype or full.dtype)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Within the shard group: `received[r]` becomes what rank r has in its `sent` for this rank."""

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """What each rank has for its own shard, summed in place over the shards of one copy, those of all stages; the
        same bits on every rank."""
        return values

    def from_stage(self, shard: Tensor, stage: int) -> Tensor:
        """`shard` as the rank with this one's place in `stage` has it: a new tensor, where there are stages. All ranks
        of the mesh ask alike, and pass tensors of one shape; the others' values do not count."""
        return shard

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """`values` summed over the replicas of this rank's shard: a new tensor, where there are replicas."""
        return values.clone(memory_format=torch.contiguous_format) if self.replicas > 1 else values

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all ranks of the mesh in place; the same bits on every rank."""
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """As `all_reduce_sum`, the largest of them."""
        return values


def absent_ranks(axes: tuple[tuple[str, int], ...], device: torch.device) -> Ranks:
    """A mesh of `(name, size)` axes, outermost first, as a stage has it that holds all units: steps are traced whole.
    Raises ValueError for axes that no mesh here has."""
    sizes = dict(axes)
    if tuple(name for name, _ in axes) not in AXES or any(not isinstance(n, int) or n < 1 for n in sizes.values()):
        known = ", ".join(map(str, AXES))
        raise ValueError(f"mesh: expected positive sizes of axes {known}, outermost first; got {axes}")
    return Ranks(sizes.get(REPLICATE, 1), sizes.get(NODE, 1), sizes.get(LOCAL, sizes.get(SHARD, 1)), device)
