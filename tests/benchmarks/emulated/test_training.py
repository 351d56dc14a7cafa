"""FSDP2 and DDP train as one rank of 64, neither of them changed for it; this toolkit: test_simulated.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.emulated import emulate
from tests.benchmarks.emulated.toy import cluster
from tests.harness.child_process import in_child_process

RANKS, STEPS, RATE, E = 64, 4, 0.5, 64


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(E, 2 * E), nn.Tanh(), nn.Linear(2 * E, E)) for _ in range(3)])


def fsdp2(mesh: Any, device: str = "cpu") -> nn.Sequential:
    model = module().to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def x() -> Tensor:
    return torch.randn(8, E, generator=torch.Generator().manual_seed(1))


def steps(model: nn.Module, device: str = "cpu") -> list[float]:
    """Losses of plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for _ in range(STEPS):
        loss = (model(x().to(device)) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tied_module(ranks: int) -> list[float]:
    """Losses of weights that are `ranks` times their first slice, which learns by its share of the gradient.

    It is what contents say: an all-gather repeats, and a reduce-scatter averages over the slices.
    """
    model = module()
    whole = dict(model.named_parameters())
    own = [w.detach().flatten()[: w.numel() // ranks].clone().requires_grad_() for w in whole.values()]
    losses = []
    for _ in range(STEPS):
        weights = {name: w.repeat(ranks).view_as(whole[name]) for name, w in zip(whole, own, strict=True)}
        loss = (torch.func.functional_call(model, weights, (x(),)) - 0.5).square().mean()
        grads = torch.autograd.grad(loss, own)
        with torch.no_grad():
            for w, grad in zip(own, grads, strict=True):
                w -= RATE * grad / ranks
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sizes", [(64,), (8, 8)])
@in_child_process
def test_fsdp2_trains_the_model_whose_shards_are_alike(sizes: tuple[int, ...]) -> None:
    with emulate(cluster(1e-3), RANKS):
        names = ("replicate", "shard")[-len(sizes) :]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model = fsdp2(mesh)
        losses = steps(model)
        weight = model[0][0].weight
        whole = weight.full_tensor().detach()
    assert losses == pytest.approx(tied_module(sizes[-1]), rel=1e-4)
    rows = whole.view(sizes[-1], -1)
    assert torch.equal(rows, rows[:1].expand_as(rows))


@in_child_process
def test_ddp_trains_as_on_one_rank() -> None:
    with emulate(cluster(1e-3), RANKS):
        losses = steps(DistributedDataParallel(module()))
    assert losses == pytest.approx(steps(module()), rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
