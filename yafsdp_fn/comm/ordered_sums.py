"""Sums over micro-shards in their order, whatever the number of ranks that hold them (micro_shards.py).

    shard = ((shard + rows[0]) + rows[1]) + ...          # each addition rounded to the shard's dtype

is what one rank does that reduces one microbatch after the other: no rank adds up anything before. A reduction is an
exchange, and these additions where the shard lies. A rank sends (R - 1) n elements, as the backend's own sum would; the
receive buffer is R n.
"""

import torch
from torch import Tensor

from yafsdp_fn.comm.groups import Groups
from yafsdp_fn.comm.local_sum import Scratch
from yafsdp_fn.comm.ranks import Ranks


def reduce(comms: Groups, shard: Tensor, full: Tensor, receive: Tensor, *, add: bool) -> None:
    """As `flat.reduce_into`, of one microbatch of every rank. receive: at least R n elements of the wire's dtype, none
    where there is one rank"""
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
    """What an addition is made in, before it is rounded to `param`. Raises ValueError where `Precision.accumulate`
    would keep more between additions."""
    if accumulate is not None and accumulate.itemsize > param.itemsize:
        raise ValueError(
            f"Precision.accumulate is {accumulate}, but on a deterministic mesh micro-shards are added one by one to "
            f"gradient shards of Precision.param, {param}; give a param at least as wide, or accumulate=None"
        )
    return torch.promote_types(param, wire)


def apart(values: Tensor, ranks: Ranks, rank: int) -> Tensor:
    """[M, k] -> [G, k]: a rank's own micro-shards in their places, zeros elsewhere. A sum over ranks fills them in, to
    the same bits in any order: nothing but zeros is added to anything."""
    out = values.new_zeros(values.shape[0] * ranks.world, *values.shape[1:])
    out[rank :: ranks.world] = values
    return out


def in_order(values: Tensor) -> Tensor:
    """[G, ...] -> [...]: the sum, one micro-shard after the other, from zero."""
    total = torch.zeros_like(values[0])
    for value in values:
        total = total + value
    return total
