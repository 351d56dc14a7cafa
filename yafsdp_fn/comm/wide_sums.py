"""Reductions whose sums ranks make themselves, in a dtype `accumulate` wider than the wire's.

They are exchanges and local sums in rank order: nothing is lost but the wire's rounding, and the bits are the same in
every run. What a rank sends, in elements of the wire's dtype (N, R, M, K, P, n: see flat.py):

                         one node (or K = 1)         M nodes of K ranks
    backend's sum        (R - 1) n                   (R - 1) n; between nodes as the backend likes
    accumulate           (R - 1) n                   within the node M (K - 1) n, between nodes (M - 1) n
    receive buffer       R n                         (K + 2 M) n

An exchange among all ranks of M nodes would send K (M - 1) n between nodes: sums are made inside the node first. These
partial sums are rounded to the wire's dtype once more; sent in float32 they would need the bytes that bf16 saves.
"""

import torch
from torch import Tensor

from yafsdp_fn.comm.groups import Groups
from yafsdp_fn.comm.local_sum import local_sum
from yafsdp_fn.comm.ranks import Ranks, round_up


def receive_numel(comms: Ranks, n: int) -> int:
    """Elements in the wire's dtype of the buffer that `reduce` needs for shards of `n`."""
    return (comms.local_ranks + 2 * comms.nodes) * n if _hierarchical(comms) else comms.ranks * n


def reduce(comms: Groups, shard: Tensor, full: Tensor, receive: Tensor, *, add: bool, accumulate: torch.dtype) -> None:
    """As `flat.reduce_into`, over more than one rank."""
    if _hierarchical(comms):
        rows = _sums_of_nodes(comms, full, receive, accumulate)
    else:
        rows = receive[: full.numel()].view(comms.ranks, -1)
        comms.reduce_group.all_to_all(rows.view(-1), full)
    local_sum(shard, rows, comms.reduce_scratch, add=add, dtype=accumulate)


def _hierarchical(comms: Ranks) -> bool:
    return comms.nodes > 1 and comms.local_ranks > 1


def _sums_of_nodes(comms: Groups, full: Tensor, receive: Tensor, accumulate: torch.dtype) -> Tensor:
    """[M, n]: for this rank's shard the sum of each node, in the wire's dtype."""
    ranks, nodes = comms.local_ranks, comms.nodes
    n = full.numel() // comms.ranks
    within, rest = receive[: ranks * n], receive[ranks * n :]
    mine, theirs = rest[: nodes * n], rest[nodes * n : 2 * nodes * n]
    for node, part in enumerate(full.view(nodes, ranks * n)):  # shards of one node lie side by side
        comms.reduce_local_group.all_to_all(within, part)
        local_sum(mine[node * n : (node + 1) * n], within.view(ranks, n), comms.reduce_scratch, dtype=accumulate)
    comms.reduce_nodes_group.all_to_all(theirs, mine)
    return theirs.view(nodes, n)


def staging_numel(comms: Ranks, n: int, wire: torch.dtype, accumulate: torch.dtype) -> int:
    """Elements in the wire's dtype of the buffer that `all_reduce_replicas` needs for shards of `n`."""
    return comms.replicas * _part(comms, n) * (2 + accumulate.itemsize // wire.itemsize)


def all_reduce_replicas(
    comms: Groups, shard: Tensor, staging: Tensor, *, wire: torch.dtype, accumulate: torch.dtype
) -> None:
    """As `flat.all_reduce_replicas`: each replica sums a P-th of the shard, in the order of replicas, and all gather
    the sums. A rank sends (P - 1) / P n elements of `wire`, and as many of `accumulate`."""
    n = shard.numel()
    size = _part(comms, n)
    whole = comms.replicas * size
    mine, theirs, rest = staging[: staging_numel(comms, n, wire, accumulate)].tensor_split((whole, 2 * whole))
    mine[:n].copy_(shard)
    mine[n:].zero_()
    comms.replicate_group.all_to_all(theirs, mine)
    sums = rest.view(accumulate)
    own = sums[comms.replica * size : (comms.replica + 1) * size]
    local_sum(own, theirs.view(comms.replicas, size), comms.replicate_scratch, dtype=accumulate)
    comms.replicate_group.all_gathers([sums], [own])
    shard.copy_(sums[:n])


def _part(comms: Ranks, n: int) -> int:
    """Elements of a shard of `n` that each replica sums: equal on all of them, aligned for any dtype."""
    return round_up(-(-n // comms.replicas))
