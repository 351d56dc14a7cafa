"""The pure path: torch.func over a sharded loss, exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.small import (
    Model,
    loss,
    states,
)
from yafsdp_fn.runtime.pure import Rematerialised


def scalar(params: Model, b: Any) -> Tensor:
    mean = loss(params, b)
    return mean.total / mean.weight


def test_dropout_is_replayed_in_the_backward() -> None:
    """Every element's gradient says which were dropped; it must be those of the forward."""
    sharded, _ = states()

    def dropped(x: Tensor) -> Tensor:
        return ya.scan(lambda c, w: (torch.nn.functional.dropout(c, 0.5), None), x, sharded.layers)[0]

    x = torch.ones(64, requires_grad=True)
    out = dropped(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out.detach(), slope)
    assert 0 < int((out == 0).sum()) < 64
    ambient = torch.get_rng_state()
    out = dropped(x)
    middle = torch.get_rng_state()
    torch.autograd.grad(out.sum(), x)
    assert not torch.equal(ambient, middle)
    assert torch.equal(torch.get_rng_state(), middle)


def test_views_of_the_weights_are_refused() -> None:
    sharded, _ = states()
    with pytest.raises(RuntimeError, match=r"layers\[0\]: an output .* is a view of the block's weights"):
        ya.scan(lambda c, w: (c, w["up"]), torch.ones(1), sharded.layers)


def test_only_arguments_are_saved() -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def heavy(x: Tensor) -> tuple[Tensor]:
        return (torch.cat([x.exp() for _ in range(50)]).square().sum(),)

    x = torch.linspace(0, 1, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (out,) = Rematerialised.apply(heavy, x)
    assert saved == [4]
    (got,) = torch.autograd.grad(out, x)
    assert torch.allclose(got, 50 * 2 * (2 * x).exp())


def test_integers_pass_through_a_recomputed_block() -> None:
    def f(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x[index] * 2, index + 1

    x, index = torch.arange(4.0, requires_grad=True), torch.tensor([0, 2])
    out, after = Rematerialised.apply(f, x, index)
    assert after.tolist() == [1, 3]
    assert not after.requires_grad
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [2, 0, 2, 0]
