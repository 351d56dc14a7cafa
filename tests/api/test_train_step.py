"""train_step and eval_step: their metrics, programs, skipped steps, on sharded and on plain states."""

from __future__ import annotations

from typing import Any

import torch

import yafsdp_fn as ya
from tests.harness.small import (
    Model,
    assert_close,
    batch,
    block,
    dropout_block,
    embed,
    loss,
    model,
    one_rank,
    with_block,
)

TX = ya.optim.chain(ya.optim.clip_by_global_norm(0.5), ya.optim.adamw(1e-2))


def states(seed: int = 0) -> tuple[Any, Any]:
    """The same state, sharded and plain."""
    return ya.init(model(), TX, mesh=one_rank(), seed=seed), ya.PlainState.create(model(), TX, seed=seed)


def test_metrics_are_numbers_without_axes() -> None:
    for one in states():
        after, metrics = ya.train_step(loss, TX)(one, batch())
        assert set(metrics) == {"loss", "grad_norm", "skipped"}
        assert after.step == 1
        assert all(number.shape == () for number in metrics.values())
        assert metrics["loss"].dtype == torch.float32


# ---- randomness


dropped = with_block(dropout_block)


def test_evaluation_draws_the_same_numbers_on_a_plain_state() -> None:
    """Those of the state's seed and step."""
    state, plain = states(seed=5)
    state, _ = ya.train_step(loss, TX)(state, batch())
    plain, _ = ya.train_step(loss, TX)(plain, batch())
    got, want = (ya.eval_step(dropped)(one, batch())["loss"] for one in (state, plain))
    assert_close(got, want, rtol=1e-5)


# ---- evaluation


def test_evaluation_runs_without_grad() -> None:
    def check(params: Model, b: Any) -> ya.Mean:
        assert not torch.is_grad_enabled()
        mean = loss(params, b)
        assert not mean.total.requires_grad
        return mean

    for state in states():
        assert set(ya.eval_step(check)(state, batch())) == {"loss"}


def test_evaluation_under_inference_mode_leaves_training_alone() -> None:
    state, plain = states()
    evaluate = ya.eval_step(loss)
    step = ya.train_step(loss, TX)
    for number in range(2):
        with torch.inference_mode():
            got = evaluate(state, batch(number))["loss"]
            x, _ = ya.scan(block, ya.apply(embed, state.params.embed, batch()["tokens"]), state.params.layers)
        assert torch.equal(got, evaluate(plain, batch(number))["loss"])
        assert x.shape == (4, 3, 5)
        state, _ = step(state, batch(number))
        plain, _ = step(plain, batch(number))
    assert_close(state, plain.params, rtol=1e-5, atol=1e-6)
