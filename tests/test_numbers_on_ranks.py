"""Norms of sharded trees in float64, and complex tensors between visits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import compare
from tests.harness.pool import on_ranks

WORLDS = on_ranks(1, 2, 4)
SGD = ya.optim.sgd(0.1)


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in {"a": (5, 7), "b": (7, 3)}.items()
    }


def x_of(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)).double()


@WORLDS
def test_complex_tensors_between_visits(mesh: Any) -> None:
    """Value and gradients are those of the plain loss over all ranks."""
    state = ya.shard(tensors(), SGD, mesh=mesh, precision=ya.Precision(torch.float64))
    both = ya.value_and_grad(complex_loss)
    ranks = mesh.size()
    each = [ya.value_and_grad(complex_loss)(tensors(), x_of(rank)) for rank in range(ranks)]
    value = sum(value for value, _ in each) / ranks
    grads = {name: sum(found[name] for _, found in each) / ranks for name in tensors()}
    for _ in range(3):
        compare(both(state.params, x_of(mesh.get_rank())), (value, grads), 1e-12, "gradients")


def complex_loss(params: Any, x: Tensor) -> Tensor:
    spectrum = ya.apply(lambda w, x: torch.fft.fft(x @ w), params["a"], x)
    assert spectrum.is_complex()
    turned = spectrum * torch.exp(1j * torch.linspace(0, 1, 7).double())
    mixed = ya.apply(lambda w, z: z @ w.to(z.dtype) * (1 + 2j), params["b"], turned)
    return (mixed.real.sin() * mixed.imag).sum() / 100


def squares(params: Any, x: Tensor) -> Tensor:
    return ya.apply(lambda w, h: (h @ w).square().sum(), params["b"], ya.apply(lambda w, x: x @ w, params["a"], x))


def norms(mesh: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of the parameters, and of the gradient that a step reports; and how far clipping moves."""
    tx = ya.optim.chain(ya.optim.clip_by_global_norm(1e-3), ya.optim.sgd(1.0))
    state = ya.shard(tensors(dtype), tx, mesh=mesh, precision=ya.Precision(dtype))
    before = ya.unshard(state)
    norm = ya.global_norm(state.params)
    x = x_of(0).to(dtype)  # the same on every rank, so that the mean is that of one

    def loss(params: Any, x: Tensor) -> ya.Mean:
        return ya.Mean(squares(params, x), torch.tensor(1 / 3, dtype=torch.float64))

    state, metrics = ya.train_step(loss, tx)(state, x)
    moved = {name: before[name] - leaf for name, leaf in ya.unshard(state).items()}
    return norm, metrics["grad_norm"], ya.global_norm(moved)


@WORLDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norms_and_clipping_are_the_same_at_every_number_of_ranks(mesh: Any, dtype: torch.dtype) -> None:
    """To 1e-12 in float64, weight and norm included; in float32 to 1e-6, the bound of `global_norm`'s blocks."""
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    whole = {name: leaf.to(dtype).double().requires_grad_() for name, leaf in tensors().items()}
    total = (x_of(0).to(dtype).double() @ whole["a"] @ whole["b"]).square().sum() / (1 / 3)
    grads = torch.autograd.grad(total, list(whole.values()))
    expected = tuple(torch.cat([x.detach().flatten() for x in of]).norm() for of in (whole.values(), grads))
    norm, reported, clipped = norms(mesh, dtype)
    assert norm.dtype == reported.dtype == dtype
    compare((norm.double(), reported.double()), expected, bound, "norms")
    assert clipped.item() == pytest.approx(1e-3, rel=1e-9 if dtype == torch.float64 else 1e-3)


@WORLDS
def test_weights_are_the_numbers_that_were_written(mesh: Any) -> None:
    """Weights that float32 does not have, against autograd of one number."""
    state = ya.shard(tensors(), SGD, mesh=mesh, precision=ya.Precision(torch.float64))
    ranks = range(mesh.size())

    def loss(params: Any, x: Tensor) -> Any:
        mean = ya.Mean(squares(params, x), 0.1 * (1 + mesh.get_rank()))
        return mean, {"again": mean}

    leaves = {name: leaf.requires_grad_() for name, leaf in tensors().items()}
    mean = sum(squares(leaves, x_of(at)) for at in ranks) / sum(0.1 * (1 + at) for at in ranks)
    grads = dict(zip(leaves, torch.autograd.grad(mean, list(leaves.values())), strict=True))
    (value, aux), got = ya.value_and_grad(loss, has_aux=True)(state.params, x_of(mesh.get_rank()))
    compare((value, aux["again"], got), (mean.detach(), mean.detach(), grads), 1e-13, "a mean")


@pytest.mark.parametrize("deterministic", [False, True])
@WORLDS
def test_a_gradient_whose_squares_float32_does_not_hold_is_clipped_and_not_skipped(
    mesh: Any, deterministic: bool
) -> None:
    """It is 1e19 at 70 neighbours, zero elsewhere."""
    mesh = ya.mesh(device="cpu", deterministic=12) if deterministic else mesh
    tx = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.sgd(1.0))
    state = ya.shard({"a": torch.zeros(20, 7)}, tx, mesh=mesh)

    def loss(params: Any, x: Tensor) -> ya.Mean:
        return ya.Mean(ya.apply(lambda w, x: (w[5:15] * x[:1]).sum(), params["a"], x), 1.0)

    state, metrics = ya.train_step(loss, tx)(state, torch.full((12 // mesh.size(), 1), 1e19))
    leaf = ya.unshard(state)["a"]
    assert metrics["skipped"].item() == 0
    assert metrics["grad_norm"].item() == pytest.approx(1e19 * 70**0.5, rel=1e-6)
    assert ya.global_norm(state.params).item() == pytest.approx(1.0, rel=1e-6)
    assert torch.allclose(leaf[5:15], torch.tensor(-(70**-0.5)), rtol=1e-6)
    assert not leaf[:5].any()
