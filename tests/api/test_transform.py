"""grad and value_and_grad: JAX's contract, on plain trees against autograd, on sharded ones against plain ones."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of
from tests.harness.problems import PROBLEMS
from tests.harness.small import (
    assert_equal,
    one_rank,
)

TX = ya.optim.sgd(0.1)


# ---- plain: against torch itself


def f(a: Any, b: Tensor, *, scale: float = 1.0) -> Tensor:
    return (a["x"] * b).sum() * scale + b.square().sum()


A = {"x": torch.tensor([1.0, 2.0])}
C = torch.tensor([3.0, 4.0])


def test_the_value_comes_first() -> None:
    value, grads = ya.value_and_grad(f)(A, C, scale=2.0)
    assert value == 2 * 11 + 25
    assert grads["x"].tolist() == [6, 8]
    assert ya.grad(f)(A, C)["x"].tolist() == [3, 4]
    assert not value.requires_grad
    assert not A["x"].requires_grad


def test_aux() -> None:
    def with_aux(a: Any, b: Tensor) -> tuple[Tensor, Any]:
        return f(a, b), {"m": ya.Max(b), "raw": a["x"] * 2, "n": 3}

    (value, aux), grads = ya.value_and_grad(with_aux, has_aux=True)(A, C)
    assert value == 36 and aux["m"].tolist() == [3, 4] and aux["raw"].tolist() == [2, 4] and aux["n"] == 3
    assert not aux["raw"].requires_grad
    grads_alone, aux_again = ya.grad(with_aux, has_aux=True)(A, C)
    assert_equal(grads_alone, grads)
    assert_equal(aux, aux_again)


def test_a_function_that_returns_a_mean_divides_by_the_whole_weight() -> None:
    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])

    def masked(x: Tensor, rows: Tensor, mask: Tensor) -> ya.Mean:
        return ya.Mean((x * rows * mask).sum(), mask.sum())

    rows = torch.arange(8.0)
    for parts in (1, 2, 4):
        value, grad = ya.value_and_grad(masked, microbatches=parts)(torch.tensor(2.0), rows, mask)
        assert value == 2 * 22 / 5
        assert torch.isclose(grad, torch.tensor(22 / 5))


# ---- what gets no gradient


def test_frozen_leaves_have_zero_gradients_without_memory() -> None:
    problem = PROBLEMS["frozen"]
    state = ya.init(problem.params(2), TX, mesh=one_rank())
    plain = ya.PlainState.create(problem.params(2), TX)
    for params in (state.params, plain.params):
        grads = ya.grad(problem.loss)(params, batch_of(0))
        assert optree.tree_structure(grads) == optree.tree_structure(params)
        for frozen in optree.tree_leaves((grads.embed, grads.layers)):
            assert frozen.eq(0).all()
            assert frozen.untyped_storage().nbytes() == frozen.element_size()
