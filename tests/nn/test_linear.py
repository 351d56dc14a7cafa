"""ya.linear and ya.embedding as functions; in steps they are tested by everything that trains a Llama."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from yafsdp_fn.nn.linear import weight_leaf


def weight(*shape: int) -> Tensor:
    return weight_leaf(torch.randn(*shape), lambda size, dtype: torch.empty(size, dtype=dtype))


def node(out: Tensor) -> str:
    assert out.grad_fn is not None
    return out.grad_fn.name()


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_outside_of_a_visit_they_are_torchs_own(shape: tuple[int, ...]) -> None:
    x, w, b = torch.randn(shape), torch.randn(4, 5, requires_grad=True), torch.randn(4)
    assert torch.equal(ya.linear(x, w, b), F.linear(x, w, b))
    assert node(ya.linear(x, w)) == node(F.linear(x, w))
    tokens = torch.tensor([[0, 3], [1, 1]])
    assert torch.equal(ya.embedding(tokens, w), F.embedding(tokens, w))
    assert node(ya.embedding(tokens, w)) == node(F.embedding(tokens, w))


def test_without_a_slot_the_gradient_is_autograds() -> None:
    x, w = torch.randn(2, 3, 5), weight(4, 5)
    given = torch.randn(2, 3, 4)
    plain = w.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(ya.linear(x, w), [w], given)
    (wanted,) = torch.autograd.grad(F.linear(x, plain), [plain], given)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_under_a_transform_and_under_autocast_they_are_torchs_own() -> None:
    x, w = torch.randn(3, 5), weight(4, 5)
    found = torch.func.grad(lambda x: ya.linear(x, w).square().sum())(x)
    assert torch.allclose(found, 2 * (x @ w.T) @ w, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert node(ya.linear(x, w)) != "_LinearBackward"
