"""Differentiable collectives between two ranks: the rules for every transform, and the dtypes on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, func

from tests.harness.groups import exchanging
from tests.harness.pool import on_ranks
from yafsdp_fn.communication.communicators import Communicators, communicators
from yafsdp_fn.communication.differentiable import AllGather, ReduceScatter, SumOfRanks, SumOfShards, SumToShards


def check_rules(comms: Communicators) -> None:
    rank, f64 = comms.rank, torch.float64

    def gather(x: Tensor) -> Tensor:
        return AllGather.apply(comms, x, f64, f64)

    def scatter(x: Tensor) -> Tensor:
        return ReduceScatter.apply(comms, x, f64, f64)

    def of_shards(x: Tensor) -> Tensor:
        return SumOfShards.apply(comms, x)

    def to_shards(x: Tensor) -> Tensor:
        return SumToShards.apply(comms, x)

    def of_ranks(x: Tensor) -> Tensor:
        return SumOfRanks.apply(comms, x)

    shards = [torch.arange(3, dtype=f64) + 10 * r for r in range(2)]
    full = [torch.arange(6, dtype=f64) * (r + 1) for r in range(2)]
    mine, sent, own = shards[rank], full[rank], slice(3 * rank, 3 * rank + 3)
    assert torch.equal(gather(mine), torch.cat(shards))
    assert torch.equal(scatter(sent), sum(full)[own])
    # each other's adjoints: shards have the sum for their inner product, ranks the mean
    assert torch.equal(func.vjp(gather, mine)[1](sent)[0], sum(full)[own] / 2)
    assert torch.equal(func.vjp(scatter, sent)[1](mine)[0], 2 * torch.cat(shards))
    # linear: their own tangents
    assert torch.equal(func.jvp(gather, (mine,), (2 * mine,))[1], 2 * torch.cat(shards))
    assert torch.equal(func.jvp(scatter, (sent,), (2 * sent,))[1], 2 * sum(full)[own])
    # batched, along any dim
    rows = torch.stack([mine, -mine, 3 * mine])
    want = torch.stack([k * torch.cat(shards) for k in (1, -1, 3)])
    assert torch.equal(torch.vmap(gather)(rows), want)
    assert torch.equal(torch.vmap(gather, in_dims=1)(rows.T), want)
    assert torch.equal(
        torch.vmap(scatter)(torch.stack([sent, -sent])), torch.stack([k * sum(full)[own] for k in (1, -1)])
    )
    # sums
    for add, factor in ((of_shards, 0.5), (to_shards, 2.0), (of_ranks, 1.0)):
        assert torch.equal(add(mine), sum(shards)) and torch.equal(mine, shards[rank])
        assert torch.equal(func.vjp(add, mine)[1](sent[:3])[0], factor * sum(full)[:3])
        assert torch.equal(func.jvp(add, (mine,), (2 * mine,))[1], 2 * sum(shards))
        assert torch.equal(torch.vmap(add, in_dims=1)(rows.T), torch.stack([k * sum(shards) for k in (1, -1, 3)]))
        # and back again: the adjoint of the adjoint
        twice = func.vjp(lambda c, f=add: func.vjp(f, mine)[1](c)[0], sent[:3])[1](mine)[0]
        assert torch.equal(twice, add(mine))
    for collective, x, c in ((gather, mine, sent), (scatter, sent, mine)):
        twice = func.vjp(lambda c, f=collective, x=x: func.vjp(f, x)[1](c)[0], c)[1](x)[0]
        assert torch.equal(twice, collective(x))
    # second order: a square of what was gathered, on both ranks
    square = func.grad(lambda x: gather(x).square().sum() / 2)
    assert torch.equal(func.jvp(square, (mine,), (3 * mine,))[1], 3 * mine)


@on_ranks(2)
@pytest.mark.parametrize("exchange", [False, True])
def test_collectives_have_rules_for_every_transform(mesh: Any, exchange: bool) -> None:
    with exchanging(exchange):
        check_rules(communicators(mesh))


@on_ranks(2)
def test_dtypes_of_the_wire(mesh: Any) -> None:
    """Gathered in one, reduced in another, gradients in the shard's own."""
    comms = communicators(mesh)
    x = torch.ones(8, requires_grad=True)
    out = AllGather.apply(comms, x, torch.bfloat16, torch.float64)
    (grad,) = torch.autograd.grad(out.float().sum(), x)
    assert grad.eq(1).all()  # of the mean over two ranks
    assert (out.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
