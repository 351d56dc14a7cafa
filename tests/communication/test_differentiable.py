"""Differentiable collectives between two ranks, batched along any dim."""

from __future__ import annotations

import torch

from tests.harness.pool import on_ranks
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.differentiable import AllGather, SumOfRanks, SumOfShards, SumToShards


@on_ranks(2)
def test_collectives_are_batched_along_any_dim_and_leave_their_inputs(mesh):
    comms = communicators(mesh)
    f64 = torch.float64
    shards = [torch.arange(3, dtype=f64) + 10 * rank for rank in range(2)]
    mine = shards[comms.rank].clone()
    sums = [(kind(comms), sum(shards)) for kind in (SumOfShards, SumToShards, SumOfRanks)]
    gather = AllGather(comms, f64, f64), torch.cat(shards)
    for collective, want in [*sums, gather]:
        assert torch.equal(collective(mine), want)
        assert torch.equal(mine, shards[comms.rank])
        assert torch.equal(torch.vmap(collective, in_dims=1)(torch.stack([mine, -mine], 1)), torch.stack([want, -want]))
    # every rank's own gradient of a sum over the ranks is the sum of theirs
    assert torch.equal(torch.func.vjp(sums[2][0], mine)[1](mine)[0], sums[2][1])
