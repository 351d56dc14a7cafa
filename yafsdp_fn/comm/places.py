"""A mesh without processes: what `Communicators` say about ranks, and collectives that have nothing but shapes.

It is for fake tensors. A step of a mesh that need not exist is traced with it, and so is that of one that does, since
no rank can communicate what it does not compute.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.mesh import AXES, LOCAL, NODE, REPLICATE, SHARD


class Places(NamedTuple):
    """Seen from rank 0 of the shard group and of the replicas."""

    replicas: int
    nodes: int
    local_ranks: int
    device: torch.device
    rank: int = 0
    replica: int = 0

    @property
    def ranks(self) -> int:
        """Of the shard group."""
        return self.nodes * self.local_ranks

    @property
    def alone(self) -> bool:
        return self.replicas * self.ranks == 1

    def all_gather(self, shard: Tensor) -> Tensor:
        return shard.new_empty(shard.shape[0] * self.ranks, *shard.shape[1:])

    def reduce_scatter(
        self,
        full: Tensor,
        dtype: torch.dtype | None = None,
        accumulate: torch.dtype | None = None,
        *,
        replicas: bool = True,
    ) -> Tensor:
        return full.new_empty(full.shape[0] // self.ranks, *full.shape[1:], dtype=dtype or full.dtype)

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        return values.clone(memory_format=torch.contiguous_format) if self.replicas > 1 else values

    def sum_over_shards(self, values: Tensor) -> Tensor:
        return values

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return values


def places(axes: tuple[tuple[str, int], ...], device: torch.device) -> Places:
    """A mesh of `(name, size)` axes, outermost first. Raises ValueError for axes that no mesh here has."""
    sizes = dict(axes)
    if tuple(name for name, _ in axes) not in AXES or any(not isinstance(n, int) or n < 1 for n in sizes.values()):
        known = ", ".join(str(names) for names in AXES)
        raise ValueError(f"mesh: expected positive sizes of axes {known}, outermost first; got {axes}")
    return Places(sizes.get(REPLICATE, 1), sizes.get(NODE, 1), sizes.get(LOCAL, sizes.get(SHARD, 1)), device)
