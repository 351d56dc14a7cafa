"""A unit's flat vector between the ranks of a mesh. Each function blocks the stream that calls it.

    gather_into(comms, full, shard)               shards of all ranks -> the whole vector
    gather_local_into(comms, full, secondary)     slices of the ranks of this node -> the whole vector
    reduce_into(comms, shard, full, receive)      the sum over the shard group, each rank its shard
    all_reduce_replicas(comms, shard, staging)    the sum over replicas

    gather_all_into, gather_local_all_into, reduce_all_into    the same for lists of vectors, which travel together

N flat elements (padding included), R ranks of the shard group on M nodes of K ranks (R = M K), P replicas, n = N / R.
The stream is the one of the communicators that a function uses: gather, gather, reduce, replicate.

Reductions in a dtype `accumulate` wider than the wire's are exchanges and local sums in rank order: nothing is lost but
the wire's rounding, and the bits are the same in every run. What a rank sends, in elements of the wire's dtype:

                         one node (or K = 1)         M nodes of K ranks
    backend's sum        (R - 1) n                   (R - 1) n; between nodes as the backend likes
    accumulate           (R - 1) n                   within the node M (K - 1) n, between nodes (M - 1) n
    receive buffer       n, or R n for accumulate    (K + 2 M) n for accumulate

An exchange among all ranks of M nodes would send K (M - 1) n between nodes: sums are made inside the node first. These
partial sums are rounded to the wire's dtype once more; sent in float32 they would need the bytes that bf16 saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_fn.comm import collectives
from yafsdp_fn.comm.local_sum import local_sum
from yafsdp_fn.layout import round_up

if TYPE_CHECKING:
    from yafsdp_fn.comm.communicators import Communicators
    from yafsdp_fn.comm.places import Places

Reduction = tuple[Tensor, Tensor, Tensor, bool]
"""`(shard, full, received, add)`; received: where the sum lands, empty for the shard itself."""


def gather_into(comms: Communicators, full: Tensor, shard: Tensor) -> None:
    """`full` [N] from the `shard` [n] of each rank of the shard group."""
    gather_all_into(comms, [full], [shard])


def gather_all_into(comms: Communicators, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
    """`gather_into` of each: every rank passes the same sizes and dtypes in the same order."""
    if comms.ranks == 1:
        for full, shard in zip(fulls, shards, strict=True):
            full.copy_(shard.view_as(full))
    else:
        collectives.all_gathers(fulls, shards, comms.gather_group)


def gather_local_into(comms: Communicators, full: Tensor, secondary: Tensor) -> None:
    """`full` [N] from the `secondary` [N / K] of each rank of this node: see `node_slice`."""
    gather_local_all_into(comms, [full], [secondary])


def gather_local_all_into(comms: Communicators, fulls: Sequence[Tensor], secondaries: Sequence[Tensor]) -> None:
    """`gather_local_into` of each, as in `gather_all_into`."""
    if comms.local_ranks == 1:
        for full, secondary in zip(fulls, secondaries, strict=True):
            full.copy_(secondary)
    else:
        collectives.all_gathers(fulls, secondaries, comms.gather_local_group)


def node_slice(comms: Communicators, full: Tensor) -> Tensor:
    """What this rank keeps of `full` [N] for its node: a view [N / K], slice number `comms.local_rank` of K."""
    size = full.numel() // comms.local_ranks
    return full.narrow(0, comms.local_rank * size, size)


def receive_numel(comms: Communicators | Places, n: int, accumulate: torch.dtype | None) -> int:
    """Elements in the wire's dtype of the buffer that `reduce_into` needs for shards of `n`.

    accumulate: `Precision.sum_dtype`. Without it the buffer is used only to add or to convert.
    """
    if comms.ranks == 1:
        return 0
    if accumulate is None:
        return n
    return (comms.local_ranks + 2 * comms.nodes) * n if _hierarchical(comms) else comms.ranks * n


def reduce_into(
    comms: Communicators,
    shard: Tensor,
    full: Tensor,
    receive: Tensor,
    *,
    add: bool,
    accumulate: torch.dtype | None,
) -> None:
    """The sum of `full` [N] over the shard group, this rank's slice of it, in `shard` [n].

    shard: in its own dtype; `full`, in the wire's, is not changed; receive: at least `receive_numel` elements of the
    wire's dtype; add: to what is in `shard`, instead of overwriting it; accumulate: `Precision.sum_dtype`, wider than
    the wire's dtype, or None for the backend's own sum
    """
    n, scratch = shard.numel(), comms.reduce_scratch
    if comms.ranks == 1:
        local_sum(shard, full.view(1, n), scratch, add=add, dtype=accumulate)
    elif accumulate is None:
        _reduce_together(comms, [(shard, full, receive[:0] if _straight(shard, full, add) else receive[:n], add)])
    elif _hierarchical(comms):
        rows = _sums_of_nodes(comms, full, receive, accumulate)
        local_sum(shard, rows, scratch, add=add, dtype=accumulate)
    else:
        rows = receive[: full.numel()]
        collectives.all_to_all(rows, full, comms.reduce_group)
        local_sum(shard, rows.view(comms.ranks, n), scratch, add=add, dtype=accumulate)


def reduce_all_into(
    comms: Communicators,
    shards: Sequence[Tensor],
    fulls: Sequence[Tensor],
    receive: Tensor,
    *,
    adds: Sequence[bool],
    accumulate: torch.dtype | None,
) -> None:
    """`reduce_into` of each, to the same bits: every rank passes the same sizes and dtypes in the same order.

    receive: as for the largest of them. As many travel together as it holds; those that need none of it, all
    """
    jobs = list(zip(shards, fulls, adds, strict=True))
    if comms.ranks == 1 or accumulate is not None:
        for shard, full, add in jobs:
            reduce_into(comms, shard, full, receive, add=add, accumulate=accumulate)
        return
    together: list[Reduction] = []
    used = 0
    for shard, full, add in jobs:
        need = 0 if _straight(shard, full, add) else shard.numel()
        if used + need > receive.numel():
            _reduce_together(comms, together)
            together, used = [], 0
        together.append((shard, full, receive[used : used + need], add))
        used += need
    _reduce_together(comms, together)


def _straight(shard: Tensor, full: Tensor, add: bool) -> bool:
    """Whether the backend's sum may land in the shard itself."""
    return shard.dtype == full.dtype and not add


def _reduce_together(comms: Communicators, jobs: Sequence[Reduction]) -> None:
    """The backend's sums, received in the shards or, where there is one, in the buffer of each."""
    landing = [received if received.numel() else shard for shard, _, received, _ in jobs]
    collectives.reduce_scatters(landing, [full for _, full, _, _ in jobs], comms.reduce_group)
    for shard, _, received, add in jobs:
        if received.numel():
            local_sum(shard, received.view(1, -1), comms.reduce_scratch, add=add)


def _hierarchical(comms: Communicators | Places) -> bool:
    return comms.nodes > 1 and comms.local_ranks > 1


def _sums_of_nodes(comms: Communicators, full: Tensor, receive: Tensor, accumulate: torch.dtype) -> Tensor:
    """[M, n]: for this rank's shard the sum of each node, in the wire's dtype."""
    ranks, nodes = comms.local_ranks, comms.nodes
    n = full.numel() // comms.ranks
    within, rest = receive[: ranks * n], receive[ranks * n :]
    mine, theirs = rest[: nodes * n], rest[nodes * n : 2 * nodes * n]
    for node, part in enumerate(full.view(nodes, ranks * n)):  # shards of one node lie side by side
        collectives.all_to_all(within, part, comms.reduce_local_group)
        local_sum(mine[node * n : (node + 1) * n], within.view(ranks, n), comms.reduce_scratch, dtype=accumulate)
    collectives.all_to_all(theirs, mine, comms.reduce_nodes_group)
    return theirs.view(nodes, n)


def staging_numel(
    comms: Communicators | Places, n: int, dtype: torch.dtype, wire: torch.dtype, accumulate: torch.dtype | None
) -> int:
    """Elements in the wire's dtype of the buffer that `all_reduce_replicas` needs for shards of `n` in `dtype`."""
    if comms.replicas == 1:
        return 0
    if accumulate is not None:
        return comms.replicas * _part(comms, n) * (2 + accumulate.itemsize // wire.itemsize)
    return 0 if dtype == wire else n


def all_reduce_replicas(
    comms: Communicators,
    shard: Tensor,
    staging: Tensor,
    *,
    wire: torch.dtype,
    accumulate: torch.dtype | None,
) -> None:
    """Sums `shard` [n] over replicas, in place, to the same bits on each of them.

    staging: at least `staging_numel` elements of dtype `wire`, in which shards travel
    accumulate: with a dtype wider than `wire` each replica sums a P-th of the shard, in the order of replicas, and all
        gather the sums: a rank sends (P - 1) / P n elements of `wire`, and as many of `accumulate`. Else the backend
        all-reduces, and a rank sends about twice the former
    """
    n = shard.numel()
    if comms.replicas == 1:
        return
    if accumulate is not None:
        size = _part(comms, n)
        whole = comms.replicas * size
        mine, theirs, rest = staging[: staging_numel(comms, n, shard.dtype, wire, accumulate)].tensor_split(
            (whole, 2 * whole)
        )
        mine[:n].copy_(shard)
        mine[n:].zero_()
        collectives.all_to_all(theirs, mine, comms.replicate_group)
        sums = rest.view(accumulate)
        own = sums[comms.replica * size : (comms.replica + 1) * size]
        local_sum(own, theirs.view(comms.replicas, size), comms.replicate_scratch, dtype=accumulate)
        collectives.all_gather(sums, own, comms.replicate_group)
        shard.copy_(sums[:n])
    elif shard.dtype == wire:
        collectives.all_reduce_sum(shard, comms.replicate_group)
    else:
        staged = staging[:n]
        staged.copy_(shard)
        collectives.all_reduce_sum(staged, comms.replicate_group)
        shard.copy_(staged)


def _part(comms: Communicators | Places, n: int) -> int:
    """Elements of a shard of `n` that each replica sums: equal on all of them, aligned for any dtype."""
    return round_up(-(-n // comms.replicas))
