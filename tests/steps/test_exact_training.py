"""Dropout, low precision and uneven masks in steps, against plain loops; the plain loop itself."""

from __future__ import annotations

import contextlib
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.oracle import batch_of, by_autograd, compare, joined, looped, plain, relative, whole
from tests.harness.pool import on_ranks
from tests.harness.problems import CLIPPED as TX
from tests.harness.problems import (
    IGNORED,
    SCHEDULES,
    Batch,
    Params,
    V,
    base_loss,
    base_params,
    dropout_loss,
    masked_loss,
    tied_loss,
    tied_params,
)

# ---- the oracle


def by_hand(params: Params, batch: Batch) -> ya.Mean:
    """The base model without a verb of the library."""
    x = params.embed[batch["tokens"]]
    for at in range(params.layers.up.shape[0]):
        up, bias, down, gate, _ = (leaf[at] for leaf in params.layers)
        x = x + gate * (torch.tanh(x @ up.T + bias) @ down.T)
    table = getattr(params.head, "out", params.embed)
    return masked_loss((x * params.head.scale) @ table.T, batch["targets"])


@pytest.mark.parametrize(("abstract", "loss"), [(base_params(3), base_loss), (tied_params(3), tied_loss)])
def test_the_oracles_agree_with_a_loop_by_hand(abstract: Params, loss: Any) -> None:
    params = whole(plain(abstract))
    batches = [batch_of(rank) for rank in range(3)]
    expected = looped(by_hand, params, [joined(batches)])
    for got in (ya.value_and_grad(loss)(params, joined(batches)), looped(loss, params, batches, parts=3)):
        compare(got, expected, 1e-5, "an oracle")


# ---- dropout


@pytest.mark.sampled
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("schedule", ["zero3", "zero3-remat-all", "zero2-remat-all"])
def test_dropout_replays(mesh: Any, schedule: str) -> None:
    """Each rank, step, microbatch and layer draws its own numbers; a recomputed block draws the same again."""
    ranks = mesh.size()
    rank = mesh.get_local_rank()
    for parts in (1, 3) if ranks == 1 else (3,):
        state = ya.init(base_params(3), TX, mesh=mesh)
        oracle = ya.PlainState.create(base_params(3), TX)
        step = ya.train_step(dropout_loss, TX, schedule=SCHEDULES[schedule], microbatches=parts)
        for number in range(3):
            batches = [batch_of(r, seed=number) for r in range(ranks)]
            value, grads = looped(dropout_loss, oracle.params, batches, parts=parts, step=number)
            state, metrics = step(state, batches[rank])
            assert relative(metrics["loss"], value) <= 1e-5, (schedule, parts, number)
            assert relative(metrics["grad_norm"].float(), ya.global_norm(grads)) <= 1e-5, (schedule, parts, number)
            oracle = oracle.apply_gradients(grads, TX)
        compare(state, oracle.params, 1e-5, f"{schedule}, {parts} microbatches: parameters")


# ---- low precision


F64 = torch.float64
F32 = torch.float32
BF16 = torch.bfloat16


@on_ranks(1, 2, nightly(3))
@pytest.mark.parametrize(
    ("param", "compute", "reduce", "schedule"),
    [
        (F32, BF16, F32, "zero3-remat-all"),
        (F32, BF16, BF16, "zero2"),
        nightly(F64, F32, F64, "zero3"),
        nightly(F64, BF16, F32, "zero3"),
        nightly(F32, F64, F32, "zero3"),
        nightly(BF16, F32, BF16, "zero3"),
        nightly(BF16, BF16, BF16, "zero3-remat-every"),
    ],
)
def test_any_three_dtypes(
    mesh: Any, param: torch.dtype, compute: torch.dtype, reduce: torch.dtype, schedule: str
) -> None:
    """Master, compute and reduction in any mixture: what is rounded is rounded where `Precision` says."""
    ranks = mesh.size()
    rank = mesh.get_local_rank()
    state = ya.init(base_params(3), TX, mesh=mesh, precision=ya.Precision(param, compute, reduce))
    rounds_sums = param == BF16 or (reduce == BF16 and ranks > 1)
    tolerance = 1e-2 if rounds_sums else 1e-5

    def cast(params: Params, batch: Batch) -> ya.Mean:
        return base_loss(optree.tree_map(lambda leaf: leaf.to(param).to(compute), params), batch)

    options: Any = {"schedule": SCHEDULES[schedule], "microbatches": 3}
    step = ya.train_step(base_loss, TX, **options)
    function = ya.value_and_grad(base_loss, **options)
    for number in range(3):
        params = optree.tree_map(Tensor.float, ya.unshard(state))
        value, grads = looped(cast, params, [batch_of(r, seed=number) for r in range(ranks)], parts=3)
        # a slot sums up rows of an embedding in the reduce dtype, autograd in the compute dtype
        with by_autograd() if compute == BF16 else contextlib.nullcontext():
            _, got = function(state.params, batch_of(rank, seed=number))
            assert {leaf.dtype for leaf in optree.tree_leaves(got)} == {param}
            compare(optree.tree_map(Tensor.float, ya.unshard(got)), grads, tolerance, f"step {number}")
            state, metrics = step(state, batch_of(rank, seed=number))
        assert relative(metrics["loss"].float(), value) <= 1e-5, number
        assert relative(metrics["grad_norm"].float(), ya.global_norm(grads)) <= tolerance, number


# ---- uneven masks

VALID = (1, 7, 0, 60)


def uneven_batch(rank: int) -> Batch:
    """[4, 16] tokens with `VALID[rank]` targets at random places."""
    generator = torch.Generator().manual_seed(rank)
    tokens, targets = torch.randint(0, V, (2, 4, 16), generator=generator)
    masked = torch.randperm(64, generator=generator)[VALID[rank] :]
    targets.view(-1)[masked] = IGNORED
    return {"tokens": tokens, "targets": targets}


@on_ranks(4)
def test_uneven_masks(mesh: Any) -> None:
    batches = [uneven_batch(rank) for rank in range(4)]
    assert [int((batch["targets"] != IGNORED).sum()) for batch in batches] == list(VALID)
    state = ya.init(base_params(3), TX, mesh=mesh)
    expected = ya.value_and_grad(by_hand)(whole(plain(base_params(3))), joined(batches))
    function = ya.value_and_grad(base_loss, microbatches=2)
    for _ in range(2):
        compare(function(state.params, batches[mesh.get_local_rank()]), expected, 1e-5, "uneven masks")
    step = ya.train_step(base_loss, TX, microbatches=2, donate=False)
    for _ in range(2):
        _, metrics = step(state, batches[mesh.get_local_rank()])
        assert relative(metrics["loss"], expected[0]) <= 1e-5
        assert relative(metrics["grad_norm"], ya.global_norm(expected[1])) <= 1e-5
