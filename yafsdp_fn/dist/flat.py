"""Gathers and reductions of units' flat vectors over the ranks of a mesh, and the sums that ranks make themselves."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_fn.dist.groups import Groups
from yafsdp_fn.dist.micro_shards import Scratch, local_sum
from yafsdp_fn.dist.ranks import Ranks, round_up

# ---- Reductions summed by the ranks themselves, in a dtype `accumulate` wider than the wire's.
#
# They are exchanges and local sums in rank order: only the wire's rounding is lost, and the bits are the same in every
# run. Elements that a rank sends, in the wire's dtype (N, R, M, K, P, n: see below):
#
#                          one node (or K = 1)         M nodes of K ranks
#     backend's sum        (R - 1) n                   (R - 1) n; between nodes as the backend likes
#     accumulate           (R - 1) n                   within the node M (K - 1) n, between nodes (M - 1) n
#     receive buffer       R n                         (K + 2 M) n
#
# An exchange among all ranks of M nodes would send K (M - 1) n between nodes, so sums are made inside the node first.
# These partial sums are rounded to the wire's dtype once more; in float32 they would need the bytes that bf16 saves.


def wide_receive_numel(comms: Ranks, n: int) -> int:
    """Returns the elements, in the wire's dtype, of the buffer that `reduce_wide` needs for shards of `n`."""
    return (comms.local_ranks + 2 * comms.nodes) * n if _hierarchical(comms) else comms.ranks * n


def reduce_wide(
    comms: Groups, shard: Tensor, full: Tensor, receive: Tensor, *, add: bool, accumulate: torch.dtype
) -> None:
    """Reduces over more than one rank, as `flat.reduce_into`."""
    if _hierarchical(comms):
        rows = _sums_of_nodes(comms, full, receive, accumulate)
    else:
        rows = receive[: full.numel()].view(comms.ranks, -1)
        comms.reduce_group.all_to_all(rows.view(-1), full)
    local_sum(shard, rows, comms.reduce_scratch, add=add, dtype=accumulate)


def _hierarchical(comms: Ranks) -> bool:
    return comms.nodes > 1 and comms.local_ranks > 1


def _sums_of_nodes(comms: Groups, full: Tensor, receive: Tensor, accumulate: torch.dtype) -> Tensor:
    """Returns [M, n]: each node's sum for this rank's shard, in the wire's dtype."""
    ranks, nodes = comms.local_ranks, comms.nodes
    n = full.numel() // comms.ranks
    within, rest = receive[: ranks * n], receive[ranks * n :]
    mine, theirs = rest[: nodes * n], rest[nodes * n : 2 * nodes * n]
    for node, part in enumerate(full.view(nodes, ranks * n)):  # shards of one node lie side by side
        comms.reduce_local_group.all_to_all(within, part)
        local_sum(mine[node * n : (node + 1) * n], within.view(ranks, n), comms.reduce_scratch, dtype=accumulate)
    comms.reduce_nodes_group.all_to_all(theirs, mine)
    return theirs.view(nodes, n)


def wide_staging_numel(comms: Ranks, n: int, wire: torch.dtype, accumulate: torch.dtype) -> int:
    """Returns the elements, in the wire's dtype, of the buffer that `all_reduce_replicas_wide` needs for shards of
    `n`."""
    return comms.replicas * _part(comms, n) * (2 + accumulate.itemsize // wire.itemsize)


def all_reduce_replicas_wide(
    comms: Groups, shard: Tensor, staging: Tensor, *, wire: torch.dtype, accumulate: torch.dtype
) -> None:
    """Sums over replicas, as `flat.all_reduce_replicas`: each replica sums a P-th of the shard, in the order of
    replicas, and all gather the sums. A rank sends (P - 1) / P n elements of `wire`, and as many of `accumulate`."""
    n = shard.numel()
    size = _part(comms, n)
    whole = comms.replicas * size
    mine, theirs, rest = staging[: wide_staging_numel(comms, n, wire, accumulate)].tensor_split((whole, 2 * whole))
    mine[:n].copy_(shard)
    mine[n:].zero_()
    comms.replicate_group.all_to_all(theirs, mine)
    sums = rest.view(accumulate)
    own = sums[comms.replica * size : (comms.replica + 1) * size]
    local_sum(own, theirs.view(comms.replicas, size), comms.replicate_scratch, dtype=accumulate)
    comms.replicate_group.all_gathers([sums], [own])
    shard.copy_(sums[:n])


def _part(comms: Ranks, n: int) -> int:
    """Returns the elements of a shard of `n` that each replica sums: equal on all, and aligned for any dtype."""
    return round_up(-(-n // comms.replicas))


# ---- Sums over micro-shards in their order, whatever the number of ranks that hold them (micro_shards.py).
#
#     shard = ((shard + rows[0]) + rows[1]) + ...          # each addition rounded to the shard's dtype
#
# One rank that reduces one microbatch after the other does the same: no rank adds anything up before. A reduction is
# an exchange, followed by these additions where the shard is. A rank sends (R - 1) n elements, as for the backend's
# own sum; the receive buffer has R n.


def reduce_in_order(comms: Groups, shard: Tensor, full: Tensor, receive: Tensor, *, add: bool) -> None:
    """Reduces one microbatch of every rank, as `flat.reduce_into`. receive: at least R n elements of the wire's dtype,
    none with one rank"""
    rows = full.view(comms.ranks, -1)
    if comms.ranks > 1:
        received = receive[: full.numel()]
        comms.reduce_group.all_to_all(received, full)
        rows = received.view(comms.ranks, -1)
    add_rows(shard, rows, comms.reduce_scratch, add=add)


def add_rows(out: Tensor, rows: Tensor, scratch: Scratch, *, add: bool) -> None:
    """Adds `rows` [R, n] to `out` [n] in the order of R; without `add` the first one overwrites it."""
    dtype = sum_dtype(out.dtype, rows.dtype, None)
    one, other = scratch.chunks(dtype)
    for start in range(0, out.numel(), one.numel()):
        target = out[start : start + one.numel()]
        for number, row in enumerate(rows[:, start : start + one.numel()]):
            if number == 0 and not add:
                target.copy_(row)
                continue
            # without a fresh tensor: a mixed addition would make one
            part = row if row.dtype == dtype else one[: row.numel()].copy_(row)
            if target.dtype == dtype:
                target.add_(part)
            else:
                target.copy_(other[: row.numel()].copy_(target).add_(part))


def sum_dtype(param: torch.dtype, wire: torch.dtype, accumulate: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of an addition, before it is rounded to `param`. Raises ValueError if `Precision.accumulate`
    would keep more between additions."""
    if accumulate is not None and accumulate.itemsize > param.itemsize:
        raise ValueError(
            f"Precision.accumulate is {accumulate}, but on a deterministic mesh micro-shards are added one by one to "
            f"gradient shards of Precision.param, {param}; give a param at least as wide, or accumulate=None"
        )
    return torch.promote_types(param, wire)


def apart(values: Tensor, ranks: Ranks, rank: int) -> Tensor:
    """Spreads [M, k] -> [G, k]: a rank's own micro-shards at their indices, zeros elsewhere. A sum over ranks completes
    it, to the same bits in any order, since only zeros are added."""
    out = values.new_zeros(values.shape[0] * ranks.world, *values.shape[1:])
    out[rank :: ranks.world] = values
    return out


def in_order(values: Tensor) -> Tensor:
    """Sums [G, ...] -> [...], one micro-shard after the other, from zero."""
    total = torch.zeros_like(values[0])
    for value in values:
        total = total + value
    return total


# ---- Moves units' flat vectors between the ranks of a mesh. Each function blocks the stream that calls it.
#
# Vectors of a list travel together: every rank passes the same sizes and dtypes in the same order.
#
# N flat elements (padding included), R ranks of the shard group on M nodes of K ranks (R = M K), P replicas, n = N /
# R. Each function runs on the communicators' stream of its kind: gather, reduce or replicate.
#
# With a dtype `accumulate` wider than the wire's, reductions are exchanges and local sums in rank order
# (flat.py); on a deterministic mesh, exchanges and additions in the order of micro-shards (flat.py).

Reduction = tuple[Tensor, Tensor, Tensor, bool]
"""`(shard, full, received, add)`; received: buffer for the sum, empty to receive in the shard itself."""


def gather_into(comms: Groups, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
    """Gathers each of `fulls` [N] from the shards [n] of the shard group."""
    if comms.ranks == 1:
        for full, shard in zip(fulls, shards, strict=True):
            full.copy_(shard.view_as(full))
    else:
        comms.gather_group.all_gathers(fulls, shards)


def gather_local_into(comms: Groups, fulls: Sequence[Tensor], secondaries: Sequence[Tensor]) -> None:
    """Gathers each of `fulls` [N] from the secondary shards [N / K] of this node's ranks: see `node_slice`."""
    if comms.local_ranks == 1:
        for full, secondary in zip(fulls, secondaries, strict=True):
            full.copy_(secondary)
    else:
        comms.gather_local_group.all_gathers(fulls, secondaries)


def node_slice(comms: Groups, full: Tensor) -> Tensor:
    """Returns the view [N / K] of `full` [N] that this rank keeps for its node: slice `comms.local_rank` of K."""
    size = full.numel() // comms.local_ranks
    return full.narrow(0, comms.local_rank * size, size)


def receive_numel(comms: Ranks, n: int, accumulate: torch.dtype | None) -> int:
    """Returns the elements, in the wire's dtype, of the buffer that `reduce_into` needs for shards of `n`. Without
    `accumulate` only adding or converting uses it."""
    if comms.ranks == 1:
        return 0
    if comms.deterministic:
        return comms.ranks * n
    return n if accumulate is None else wide_receive_numel(comms, n)


def reduce_into(
    comms: Groups,
    shards: Sequence[Tensor],
    fulls: Sequence[Tensor],
    receive: Tensor,
    *,
    adds: Sequence[bool],
    accumulate: torch.dtype | None,
) -> None:
    """Sums each of `fulls` [N] over the shard group and writes this rank's slice to its shard [n], or adds it.

    shards: in their own dtype; `fulls`, in the wire's, are not changed
    receive: at least `receive_numel` elements of the wire's dtype, for the largest shard. As many vectors travel
        together as it holds; those that do not need it, all
    adds: per vector, add to the shard instead of overwriting it
    accumulate: `Precision.sum_dtype`, wider than the wire's dtype, or None for the backend's own sum
    """
    together: list[Reduction] = []
    used = 0
    for shard, full, add in zip(shards, fulls, adds, strict=True):
        if comms.deterministic:
            reduce_in_order(comms, shard, full, receive, add=add)
        elif comms.ranks == 1:
            local_sum(shard, full.view(1, -1), comms.reduce_scratch, add=add, dtype=accumulate)
        elif accumulate is not None:
            reduce_wide(comms, shard, full, receive, add=add, accumulate=accumulate)
        else:
            need = 0 if shard.dtype == full.dtype and not add else shard.numel()
            if used + need > receive.numel():
                _reduce_together(comms, together)
                together, used = [], 0
            together.append((shard, full, receive[used : used + need], add))
            used += need
    if together:
        _reduce_together(comms, together)


def _reduce_together(comms: Groups, jobs: Sequence[Reduction]) -> None:
    """Reduces several vectors by the backend, received in the shards, or in the buffers of those that have one."""
    landing = [received if received.numel() else shard for shard, _, received, _ in jobs]
    comms.reduce_group.reduce_scatters(landing, [full for _, full, _, _ in jobs])
    for shard, _, received, add in jobs:
        if received.numel():
            local_sum(shard, received.view(1, -1), comms.reduce_scratch, add=add)


def staging_numel(comms: Ranks, n: int, dtype: torch.dtype, wire: torch.dtype, accumulate: torch.dtype | None) -> int:
    """Returns the elements, in the wire's dtype, of the buffer that `all_reduce_replicas` needs for shards of `n` in
    `dtype`."""
    if comms.replicas == 1:
        return 0
    if accumulate is not None:
        return wide_staging_numel(comms, n, wire, accumulate)
    return 0 if dtype == wire else n


def all_reduce_replicas(
    comms: Groups, shard: Tensor, staging: Tensor, *, wire: torch.dtype, accumulate: torch.dtype | None
) -> None:
    """Sums `shard` [n] over replicas, in place, to the same bits on each. staging: at least `staging_numel` elements of
    dtype `wire`, in which shards travel"""
    if comms.replicas == 1:
        return
    if accumulate is not None:
        all_reduce_replicas_wide(comms, shard, staging, wire=wire, accumulate=accumulate)
    elif shard.dtype == wire:
        dist.all_reduce(shard, group=comms.replicate_group.process_group)
    else:
        staged = staging[: shard.numel()]
        staged.copy_(shard)
        dist.all_reduce(staged, group=comms.replicate_group.process_group)
        shard.copy_(staged)
