"""Cuts batches along their first axis: into the parts of ranks, and into microbatches."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.dist.micro_shards import micro_shards_of
from yafsdp_fn.dist.ranks import grid
from yafsdp_fn.params.sharded import is_sharded
from yafsdp_fn.params.tree import Tree, dotted


def shard_batch(batch: Tree, mesh: DeviceMesh) -> Tree:
    """Returns this rank's part of a global batch. Every tensor leaf [B, ...] is cut along its first axis into equal
    parts, one per rank of the mesh, replicas included; with stages, one per rank of a stage, the same in all stages.
    Raises ValueError, naming the leaf, if B is not a multiple of their number.

    A deterministic mesh of R ranks cuts into its micro-shards; this rank gets every R-th.
    """
    places, micro_shards = grid(mesh), micro_shards_of(mesh)
    rank, ranks = places.batch_rank, places.batch_ranks
    if micro_shards is None:
        return split_batch(batch, ranks, "shard_batch", "ranks")(rank)
    part = split_batch(batch, micro_shards, "shard_batch", "micro-shards")
    own = [part(number) for number in range(rank, micro_shards, ranks)]
    return optree.tree_map(lambda *parts: torch.cat(parts) if _is_cut(parts[0]) else parts[0], *own, is_leaf=is_sharded)


def split_batch(
    batch: Tree, parts: int, what: str, unit: str, name: Callable[[optree.PyTreeAccessor], str] = dotted
) -> Callable[[int], Tree]:
    """Returns a function from a part's number to that part of `batch`.

    Leaves that are not tensors, or 0-dim, and sharded parameters stay whole. `name`: names a leaf in errors
    """
    if parts > 1:
        accessors, leaves, _ = optree.tree_flatten_with_accessor(batch, is_leaf=is_sharded)
        for accessor, leaf in zip(accessors, leaves, strict=True):
            if _is_cut(leaf) and leaf.shape[0] % parts:
                shown = name(accessor) or "the batch"
                raise ValueError(f"{what}: {shown} has {leaf.shape[0]} rows, not a multiple of {parts} {unit}")

    def cut(leaf: Any, index: int) -> Any:
        if parts == 1 or not _is_cut(leaf):
            return leaf
        rows = leaf.shape[0] // parts
        return leaf.narrow(0, index * rows, rows)

    return lambda index: optree.tree_map(lambda leaf: cut(leaf, index), batch, is_leaf=is_sharded)


def _is_cut(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0
