"""Tensors that reach a block from outside: an error naming the visit, on every path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.small import Model, batch, block, model, one_rank, with_block
from yafsdp_fn.runtime.graph_walks import TensorWatch

TX = ya.optim.sgd(0.1)
OUTSIDE = (
    r"a tensor of shape \(5,\) that requires grad reaches the block from outside, .* in xs, or in consts; or detach it"
)


def params() -> Model:
    made: Model = ya.init(model(), TX, mesh=one_rank()).params
    return made


def test_under_a_transform() -> None:
    sharded = params()

    def of_scale(scale: Tensor) -> Tensor:
        closed = with_block(lambda c, w: (block(c, w)[0] * scale, None))
        return closed(sharded, batch()).total

    with pytest.raises(RuntimeError, match=r"layers\[0\]: " + OUTSIDE):
        torch.func.grad(of_scale)(torch.ones(5))
    with pytest.raises(RuntimeError, match=r"layers\[0\]: " + OUTSIDE):
        of_scale(torch.ones(5, requires_grad=True))  # no transform, no session: the pure path as well


def test_watch_knows_what_is_made_while_it_watches() -> None:
    known = torch.ones(2, requires_grad=True)
    foreign = torch.ones(2, requires_grad=True)
    with TensorWatch([known], "v"):
        made = torch.stack([known * 2, known.exp()])
        (made[0] + made[1]).sum()
        torch.cat([foreign.detach() for _ in range(0)] or [known])
        with pytest.raises(RuntimeError, match=r"v: a tensor of shape \(2,\)"):
            torch.cat([known, foreign])
        with pytest.raises(RuntimeError):
            known.add(other=foreign)
