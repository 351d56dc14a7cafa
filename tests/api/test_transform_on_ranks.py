"""value_and_grad and aux on several ranks: what is differentiated, and what comes back."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import on_ranks
from tests.harness.problems import TX, Batch, Params, base_loss, base_params

DOUBLE = ya.Precision(torch.float64)


def product(params: Any, x: Tensor) -> Tensor:
    return ya.apply(lambda w, x: w @ x, params["w"], x)


def swapped(x: Tensor, params: Any) -> Tensor:
    return product(params, x)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@on_ranks(2)
@pytest.mark.sampled
@pytest.mark.parametrize("second", [False, True], ids=["params first", "params second"])
@pytest.mark.parametrize("argnums", [0, 1, (0,), (0, 1), (1, 0)])
def test_every_argument_has_the_gradient_of_the_global_mean(mesh: Any, argnums: Any, second: bool) -> None:
    draw = generator(1)
    w = torch.rand(4, generator=draw).double()
    xs = torch.rand(2, 4, generator=draw).double()
    params = ya.shard({"w": w}, TX, mesh=mesh, precision=DOUBLE).params
    args = [params, xs[mesh.get_rank()]]
    each = [xs.mean(0), w / 2]
    if second:
        args.reverse()
        each.reverse()
    expected = [(xs @ w).mean(), *(each[at] for at in ((argnums,) if isinstance(argnums, int) else argnums))]
    function = ya.value_and_grad(swapped if second else product, argnums=argnums)
    for _ in range(3):  # recorded, then by the program
        value, grads = function(*args)
        assert type(grads) is tuple or not isinstance(argnums, tuple)
        compare([value, *optree.tree_leaves(ya.unshard(grads))], expected, 1e-12, f"argnums={argnums}")


def with_vector(params: Params, batch: Batch) -> tuple[ya.Mean, Any]:
    mean = base_loss(params, batch)
    valid = (batch["targets"] >= 0).double()
    return mean, {"position": ya.Mean((valid * batch["targets"]).sum(0), valid.sum(0)), "one": ya.Mean(valid.sum(0), 3)}


@on_ranks(2)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_vector_mean_in_aux_is_the_mean_over_ranks(mesh: Any, parts: int) -> None:
    targets = torch.cat([batch_of(rank)["targets"] for rank in range(2)])
    valid = (targets >= 0).double()
    expected = {"position": (valid * targets).sum(0) / valid.sum(0), "one": valid.sum(0) / (3 * 2 * parts)}
    state = ya.init(base_params(3), TX, mesh=mesh)
    step = ya.train_step(with_vector, TX, has_aux=True, microbatches=parts)
    got = step(state, batch_of(mesh.get_rank()))[1]["aux"]
    compare(got, expected, 1e-12, "aux")
