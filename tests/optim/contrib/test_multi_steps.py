"""Several gradients to one step: what is done in between, what a skipped one leaves, and the same as microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.harness.small import assert_close, assert_equal, batch, loss, model
from tests.optim.trees import bits
from tests.optim.trees import model as tree
from yafsdp_fn import optim


def test_in_between_nothing_moves() -> None:
    tx = optim.contrib.multi_steps(optim.adamw(0.1), 3)
    params, expected = tree(0), tree(0)
    state = tx.init(params)
    for step in range(7):
        before, inner = bits(params), bits(state.inner_opt_state)
        state = optim.step_(tx, params, tree(step + 1), state)
        moved = (bits(params) != before, bits(state.inner_opt_state) != inner)
        assert moved == (step % 3 == 2,) * 2 and int(state.mini_step) == (step + 1) % 3
    assert int(state.gradient_step) == 2
    inner_state = optim.adamw(0.1).init(expected)
    for first in (1, 4):
        mean = optree.tree_map(lambda *g: sum(g) / 3, *(tree(first + k) for k in range(3)))
        updates, inner_state = optim.adamw(0.1).update(mean, inner_state, expected)
        expected = optim.apply_updates(expected, updates)
    assert_close(params, expected)


@pytest.mark.parametrize("with_bad", [(1, None, 2, 3, None, None, 4, 5), (None, 1, 2, 3, 4, None, 5)])
def test_a_skipped_gradient_is_as_if_it_had_not_been(with_bad: tuple[int | None, ...]) -> None:
    tx = optim.contrib.multi_steps(optim.adamw(0.1), 2)

    def after(seeds: Sequence[int | None]) -> list[bytes]:
        params = tree(0)
        state = tx.init(params)
        for seed in seeds:
            grads = optree.tree_map(lambda g: g * float("nan"), tree(0)) if seed is None else tree(seed)
            state = optim.step_(tx, params, grads, state, found_inf=torch.tensor(float(seed is None)))
        return bits((params, state))

    assert after(with_bad) == after(range(1, 6)) != after(range(1, 5))


def microbatches(mesh: Any, dtype: torch.dtype) -> None:
    """Two steps of half a batch are a step of two microbatches."""
    rank, precision = mesh.get_local_rank(), ya.Precision(dtype)
    adam = optim.chain(optim.clip_by_global_norm(0.3), optim.adamw(0.05))
    accumulated = optim.contrib.multi_steps(adam, 2)
    one, other = (ya.init(model(), tx, mesh=mesh, precision=precision) for tx in (adam, accumulated))
    step, half = ya.train_step(loss, adam, microbatches=2), ya.train_step(loss, accumulated)
    for number in range(3):
        whole = batch(10 * number + rank, rows=4)
        one, _ = step(one, whole)
        for rows in (slice(2), slice(2, 4)):
            other, _ = half(other, {key: value[rows] for key, value in whole.items()})
    how = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-13}
    assert_close(one.params, other.params, **how)
    assert_close(one.opt_state, other.opt_state.inner_opt_state, **how)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world", [1, 2])
def test_is_microbatches_one_by_one(pools: dict[int, Pool], world: int, dtype: torch.dtype) -> None:
    pools[world].run(microbatches, dtype)


def test_one_gradient_a_step_is_the_optimizer_itself() -> None:
    tx, params = optim.contrib.multi_steps(optim.adamw(0.1), 1), tree(0)
    grads = tree(1)
    updates, state = tx.update(grads, tx.init(params), params)
    expected, inner = optim.adamw(0.1).update(grads, optim.adamw(0.1).init(params), params)
    assert_equal(updates, expected)
    assert_equal(state.inner_opt_state, inner)


def test_the_mean_of_low_precision_gradients_is_not() -> None:
    tx, params = optim.contrib.multi_steps(optim.sgd(1.0), 3), {"w": torch.zeros(1, dtype=torch.bfloat16)}
    state = tx.init(params)
    for value in (256.0, 1.0, 1.0):  # bfloat16 has no 257
        updates, state = tx.update({"w": torch.full((1,), value, dtype=torch.bfloat16)}, state, params)
        params = optim.apply_updates(params, updates)
    assert float(params["w"]) == -86.0 and state.acc_grads["w"].dtype == torch.float32


def test_fewer_than_one_gradient_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        optim.contrib.multi_steps(optim.sgd(0.1), 0)
