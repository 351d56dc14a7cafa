"""train_step and eval_step: their metrics, programs, skipped steps, on sharded and on plain states."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.small import (
    L,
    Model,
    assert_close,
    assert_equal,
    batch,
    block,
    dropout_block,
    embed,
    head,
    leaves,
    loss,
    model,
    one_rank,
    with_block,
)

TX = ya.optim.chain(ya.optim.clip_by_global_norm(0.5), ya.optim.adamw(1e-2))


def states(seed: int = 0) -> tuple[Any, Any]:
    """The same state, sharded and plain."""
    return ya.init(model(), TX, mesh=one_rank(), seed=seed), ya.PlainState.create(model(), TX, seed=seed)


def with_aux(params: Model, b: Any) -> tuple[ya.Mean, Any]:
    x = ya.apply(embed, params.embed, b["tokens"])
    x, norms = ya.scan(lambda c, w: (block(c, w)[0], c.norm()), x, params.layers)
    mean = ya.apply(head, params.head, x, b["targets"])
    return mean, {"norms": ya.Max(norms), "tokens": ya.Sum(torch.tensor(b["tokens"].numel())), "loss": mean}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("remat", ["none", "all"], ids=["keep", "remat"])
def test_steps_and_metrics_are_those_of_the_plain_state(parts: int, remat: Any) -> None:
    state, plain = states()
    step = ya.train_step(with_aux, TX, has_aux=True, microbatches=parts, schedule=ya.schedules.zero3(remat=remat))
    for number in range(4):
        state, metrics = step(state, batch(number))
        plain, want = step(plain, batch(number))
        assert set(metrics) == set(want) == {"loss", "grad_norm", "skipped", "aux"}
        assert_close(metrics, want, rtol=1e-5)
        assert all(metrics[name].shape == () for name in ("loss", "grad_norm", "skipped"))
        assert metrics["loss"].dtype == torch.float32 and metrics["skipped"] == 0
        assert metrics["aux"]["norms"].shape == (L,) and metrics["aux"]["tokens"] == 12
        assert torch.equal(metrics["aux"]["loss"], metrics["loss"])
        assert state.step == plain.step == number + 1
    assert_close(state, plain.params, rtol=1e-5, atol=1e-6)


def test_the_norm_is_the_gradients_before_clipping() -> None:
    state, _ = states()
    _, grads = ya.value_and_grad(loss)(state.params, batch())
    want = ya.global_norm(grads)
    _, metrics = ya.train_step(loss, TX)(state, batch())
    assert want > 0.5
    assert torch.isclose(metrics["grad_norm"], want)


def test_without_aux_there_is_none() -> None:
    state, plain = states()
    for one in (state, plain):
        assert set(ya.train_step(loss, TX)(one, batch())[1]) == {"loss", "grad_norm", "skipped"}


# ---- steps that are not finite


def spoiled(params: Model, b: Any) -> ya.Mean:
    mean = loss(params, b)
    return ya.Mean(mean.total * b["spoil"], mean.weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [0, 1], ids=["sharded", "plain"])
def test_a_step_that_is_not_finite_is_skipped(kind: int, bad: float) -> None:
    state = states()[kind]
    step = ya.train_step(spoiled, TX)
    state, _ = step(state, batch() | {"spoil": torch.tensor(1.0)})
    before = [leaf.clone() for leaf in leaves((state.params, state.opt_state))]
    state, metrics = step(state, batch() | {"spoil": torch.tensor(bad)})
    assert metrics["skipped"] == 1 and not metrics["loss"].isfinite()
    assert state.step == 2
    assert_equal(before, (state.params, state.opt_state))
    state, metrics = step(state, batch() | {"spoil": torch.tensor(1.0)})
    assert metrics["skipped"] == 0 and metrics["loss"].isfinite()
    assert not torch.equal(leaves(state.params)[0], before[0])


@pytest.mark.parametrize("kind", [0, 1], ids=["sharded", "plain"])
def test_unless_it_is_asked_for(kind: int) -> None:
    state = states()[kind]
    state, metrics = ya.train_step(spoiled, TX, skip_nonfinite=False)(
        state, batch() | {"spoil": torch.tensor(torch.nan)}
    )
    assert metrics["skipped"] == 0 and all(leaf.isnan().any() for leaf in leaves(state.params))


def test_a_batch_without_any_weight_is_skipped() -> None:
    def masked(params: Model, b: Any) -> ya.Mean:
        mean = loss(params, b)
        return ya.Mean(mean.total * 0, 0)

    for state in states():
        _, metrics = ya.train_step(masked, TX)(state, batch())
        assert metrics["skipped"] == 1 and metrics["loss"].isnan()


# ---- randomness


dropped = with_block(dropout_block)


@pytest.mark.parametrize("remat", ["none", "all"], ids=["keep", "remat"])
def test_dropout_depends_on_seed_and_step(remat: Any) -> None:
    step = ya.train_step(dropped, ya.optim.sgd(0.0), microbatches=2, schedule=ya.schedules.zero3(remat=remat))
    runs = []
    for seed in (3, 3, 4):
        # the parameters of seed 3, in states of these seeds
        state = ya.shard(
            ya.materialize(model(), seed=3)._replace(layers=stacked(3)), ya.optim.sgd(0.0), mesh=one_rank(), seed=seed
        )
        plain = ya.PlainState(ya.unshard(state), ya.optim.sgd(0.0).init(ya.unshard(state)), 0, seed)
        losses = []
        for _ in range(3):
            state, got = step(state, batch())
            plain, want = step(plain, batch())
            assert torch.equal(got["loss"], want["loss"])
            losses.append(float(got["loss"]))
        runs.append(losses)
    assert runs[0] == runs[1] != runs[2] and len(set(runs[0])) == 3


def stacked(seed: int) -> Any:
    return ya.Stacked(ya.materialize(model(), seed=seed).layers)


@pytest.mark.parametrize("kind", [0, 1], ids=["sharded", "plain"])
def test_evaluation_draws_what_training_draws(kind: int) -> None:
    state = states(seed=5)[kind]
    twin = states(seed=5)[1 - kind]
    state, _ = ya.train_step(loss, TX)(state, batch())
    twin, _ = ya.train_step(loss, TX)(twin, batch())
    got, want = ya.eval_step(dropped)(state, batch())["loss"], ya.eval_step(dropped)(twin, batch())["loss"]
    assert_close(got, want, rtol=1e-5)
    assert torch.equal(got, ya.eval_step(dropped)(state, batch())["loss"])


# ---- evaluation


@pytest.mark.parametrize("parts", [1, 2])
def test_evaluation(parts: int) -> None:
    state, plain = states()
    evaluate = ya.eval_step(with_aux, has_aux=True, microbatches=parts)
    before = [leaf.clone() for leaf in leaves(state)]
    outs = [evaluate(x, batch()) for x in (state, state, state.params, plain, plain.params, ya.unshard(state))]
    for out in outs:
        assert set(out) == {"loss", "aux"}
        assert_equal(out, outs[0])
    assert_equal(before, state)
    _, metrics = ya.train_step(with_aux, TX, has_aux=True, microbatches=parts)(state, batch())
    assert torch.equal(metrics["loss"], outs[0]["loss"])


def test_evaluation_runs_without_grad() -> None:
    def check(params: Model, b: Any) -> ya.Mean:
        assert not torch.is_grad_enabled()
        mean = loss(params, b)
        assert not mean.total.requires_grad
        return mean

    for state in states():
        assert set(ya.eval_step(check)(state, batch())) == {"loss"}


def test_evaluation_of_an_average() -> None:
    state, _ = states()
    average = optree.tree_map(lambda x: 0.5 * x, state.params)
    plain = optree.tree_map(lambda x: 0.5 * x, ya.unshard(state))
    assert_equal(ya.eval_step(loss)(average, batch()), ya.eval_step(loss)(plain, batch()))


def test_evaluation_under_inference_mode_leaves_training_alone() -> None:
    state, plain = states()
    evaluate, step = ya.eval_step(loss), ya.train_step(loss, TX)
    for number in range(2):
        with torch.inference_mode():
            got = evaluate(state, batch(number))["loss"]
            x, _ = ya.scan(block, ya.apply(embed, state.params.embed, batch()["tokens"]), state.params.layers)
        assert torch.equal(got, evaluate(plain, batch(number))["loss"])
        assert x.shape == (4, 3, 5)
        state, _ = step(state, batch(number))
        plain, _ = step(plain, batch(number))
    assert_close(state, plain.params, rtol=1e-5, atol=1e-6)


def test_leaves_without_elements() -> None:
    tree = model()._replace(head=model().head | {"none": ya.Param((0, 5))})
    state = ya.init(tree, TX, mesh=one_rank())

    def run(p: Model, b: Any) -> tuple[ya.Mean, Tensor]:
        empty = ya.apply(lambda w: w["none"] * 1, p.head)
        return loss(p, b), empty

    step = ya.train_step(run, TX, has_aux=True)
    for _ in range(2):
        state, metrics = step(state, batch())
        assert metrics["aux"].shape == (0, 5) and metrics["skipped"] == 0
