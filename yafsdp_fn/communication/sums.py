"""Sums that ranks make themselves, in the order of ranks or of micro-shards, from what they exchange."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_fn.communication import formats
from yafsdp_fn.communication.formats import Format
from yafsdp_fn.communication.groups import Groups
from yafsdp_fn.communication.micro_shards import Scratch, local_sum
from yafsdp_fn.communication.ranks import Ranks, hierarchical, replica_part, staging_numel
from yafsdp_fn.util.on_gpu import vector_kernels

# ---- Reductions summed by the ranks themselves, in a dtype `accumulate` wider than the wire's.
#
# They are exchanges and local sums in rank order: only the wire's rounding is lost, and the bits are the same in every
# run. Elements that a rank sends, in the wire's dtype (N, R, M, K, P, n: see below):
#
#                          one node (or K = 1)         M nodes of K ranks
#     backend's sum        (R - 1) n                   (R - 1) n; between nodes as the backend likes
#     accumulate           (R - 1) n                   within the node M (K - 1) n, between nodes (M - 1) n
#     receive buffer       R n                         (K + 2 M) n
#     launches on a GPU    2: an exchange, a sum       2 M + 2
#
# One exchange inside the node for all M nodes would need what a rank sends in the order K, M, n: a copy, and buffers of
# another N elements to send and N to receive.
#
# An exchange among all ranks of M nodes would send K (M - 1) n between nodes, so sums are made inside the node first.
# These partial sums are rounded to the wire's dtype once more; in float32 they would need the bytes that bf16 saves.
#
# What travels in a wire format (formats.py) does the same, encoded, and a node's sum is encoded once more:
#
#     sent = encode(full); received = exchange(sent); shard = decode(received[0]) + decode(received[1]) + ...


def sum_by_ranks(
    comms: Groups,
    shard: Tensor,
    full: Tensor,
    receive: Tensor,
    *,
    add: bool,
    accumulate: torch.dtype | None,
    format: Format | None = None,
) -> None:
    """Reduces a vector, as `flat.reduce_into`. In a format it is encoded where it is, from the front, and lost.

    receive: bytes for what travels
    """
    sent = full
    if format is not None:
        sent = full.view(torch.uint8)[: format.nbytes(full.numel())]
        formats.encode(format, full, sent)
    received = sent
    parts = comms.ranks
    if hierarchical(comms) and not comms.deterministic:

        def of_node(out: Tensor, received: Tensor) -> None:
            for part, rows in _rows(format, received, comms.local_ranks, accumulate):
                if format is None:
                    local_sum(out, rows, comms.reduce_scratch, dtype=accumulate)
                    continue
                total = rows.new_empty(rows.shape[1])
                local_sum(total, rows, comms.reduce_scratch, dtype=accumulate)
                formats.encode(format, total, out[format.nbytes(part.start) : format.nbytes(part.stop)])

        parts = comms.nodes
        received = _from_nodes(comms, sent, receive.view(sent.dtype), of_node)
    elif comms.ranks > 1:
        received = receive.view(sent.dtype)[: sent.numel()]
        comms.reduce_group.all_to_all(received, sent)
    for part, rows in _rows(format, received, parts, accumulate):
        if comms.deterministic:
            add_rows(shard[part], rows, comms.reduce_scratch, add=add)
        else:
            local_sum(shard[part], rows, comms.reduce_scratch, add=add, dtype=accumulate)


def _rows(
    format: Format | None, received: Tensor, ranks: int, accumulate: torch.dtype | None
) -> Iterable[tuple[slice, Tensor]]:
    """Returns parts of a shard, each with the rows [ranks, n] that the ranks have sent for it. Without a format it is
    one part; in a format, as many as are decoded one after the other."""
    if format is None:
        return [(slice(None), received.view(ranks, -1))]
    assert accumulate is not None, "what travels in a format is summed by the ranks"
    return formats.decoded_parts(format, received, ranks, accumulate)


def _from_nodes(comms: Groups, sent: Tensor, receive: Tensor, of_node: Callable[[Tensor, Tensor], None]) -> Tensor:
    """Returns each node's sum for this rank's shard, [M * n], as it travels. of_node: writes this node's sum for a
    shard, given what its ranks have sent, [K * n]"""
    ranks = comms.local_ranks
    nodes = comms.nodes
    n = sent.numel() // comms.ranks
    used = receive[: (ranks + 2 * nodes) * n]
    in_node, mine, theirs = used.tensor_split((ranks * n, (ranks + nodes) * n))
    for out, part in zip(mine.view(nodes, n), sent.view(nodes, ranks * n), strict=True):  # a node's lie side by side
        comms.reduce_local_group.all_to_all(in_node, part)
        of_node(out, in_node)
    comms.reduce_nodes_group.all_to_all(theirs, mine)
    return theirs


def all_reduce_replicas(
    comms: Groups, shard: Tensor, staging: Tensor, *, wire: torch.dtype, accumulate: torch.dtype | None
) -> None:
    """Sums `shard` [n] over replicas, in place, to the same bits on each. staging: bytes for at least `staging_numel`
    elements of dtype `wire`, in which shards travel.

    With `accumulate` each replica sums a P-th of the shard, in the order of replicas, and all gather the sums: a rank
    sends (P - 1) / P n elements of `wire`, and as many of `accumulate`.
    """
    if comms.replicas == 1:
        return
    n = shard.numel()
    staging = staging.view(wire)
    if accumulate is None:
        staged = shard if shard.dtype == wire else staging[:n].copy_(shard)
        dist.all_reduce(staged, group=comms.replicate_group.process_group)
        if staged is not shard:
            shard.copy_(staged)
        return
    size = replica_part(comms, n)
    whole = comms.replicas * size
    used = staging[: staging_numel(comms, n, shard.dtype, wire, accumulate)]
    mine, theirs, rest = used.tensor_split((whole, 2 * whole))
    mine[:n].copy_(shard)
    mine[n:].zero_()
    comms.replicate_group.all_to_all(theirs, mine)
    sums = rest.view(accumulate)
    own = sums[comms.replica * size : (comms.replica + 1) * size]
    local_sum(own, theirs.view(comms.replicas, size), comms.replicate_scratch, dtype=accumulate)
    comms.replicate_group.all_gathers([sums], [own])
    shard.copy_(sums[:n])


# ---- Sums over micro-shards in their order, whatever the number of ranks that hold them (micro_shards.py).
#
#     shard = ((shard + rows[0]) + rows[1]) + ...          # each addition rounded to the shard's dtype
#
# One rank that reduces one microbatch after the other does the same: no rank adds anything up before. A reduction is
# an exchange, followed by these additions where the shard is. A rank sends (R - 1) n elements, as for the backend's
# own sum; the receive buffer has R n.


def add_rows(out: Tensor, rows: Tensor, scratch: Scratch, *, add: bool) -> None:
    """Adds `rows` [R, n] to `out` [n] in the order of R; without `add` the first one overwrites it."""
    dtype = sum_dtype(out.dtype, rows.dtype, None)
    if (kernels := vector_kernels(out)) is not None:
        kernels.sum_rows(out, rows, dtype, add, True)
        return
    size = scratch.chunks(dtype).shape[1]
    for start in range(0, out.numel(), size):
        part = slice(start, start + size)
        for number, row in enumerate(rows):
            local_sum(out[part], row[None, part], scratch, add=add or number > 0, dtype=dtype)


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
