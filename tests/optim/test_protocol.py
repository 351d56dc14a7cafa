"""The protocol: purity, states, chains, masks, foreign pairs, refusals."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

from tests.optim.trees import bits, matrices, model
from yafsdp_fn import optim


def test_states_have_optax_names_and_the_structure_of_the_parameters() -> None:
    params = model(0)
    adam, decay, rate = optim.adamw(optim.constant_schedule(0.1)).init(params)
    assert adam._fields == ("count", "mu", "nu")
    assert decay == optim.EmptyState()
    assert rate._fields == ("count",)
    assert optree.tree_structure(adam.mu) == optree.tree_structure(params)
    assert adam.count.shape == ()
    assert adam.count.dtype == torch.int32
    assert optree.tree_structure(optim.trace(0.9).init(params).trace) == optree.tree_structure(params)
    assert optim.sgd(0.1).init(params) == (optim.EmptyState(), optim.EmptyState())


def test_an_update_of_leaves_that_returns_no_pair_is_refused() -> None:
    tx = optim.assume_leafwise((lambda leaf: (), lambda updates, state, params=None: None))
    with pytest.raises(TypeError, match=r"lambda.* should return a pair \(updates, state\), got NoneType$"):
        tx.update(model(1), tx.init(model(0)), model(0))


@pytest.mark.parametrize(
    "update", [torch.ones(()), torch.ones(1), torch.ones(2, 3), torch.ones(3, dtype=torch.int32), 0.1]
)
def test_apply_updates_broadcasts_nothing(update: Any) -> None:
    with pytest.raises(
        TypeError, match=r"apply_updates got .* for a\.b, expected a floating-point tensor of shape \(3,\)"
    ):
        optim.apply_updates({"a": {"b": torch.zeros(3)}}, {"a": {"b": update}})


class TestElementwise:
    """What is tried of a promise, once."""

    def first_steps(self, update: Any, dtype: torch.dtype = torch.float32) -> int:
        """Two steps; how often the update was called."""
        calls: list[Any] = []

        def counted(updates: Any, state: Any, params: Any = None) -> Any:
            calls.append(updates)
            return update(updates, params), state

        tx = optim.assume_elementwise((lambda params: (), counted))
        state = tx.init(model(0, dtype))
        for step in range(2):
            optim.step_(tx, model(0, dtype), model(step, dtype), state)
        return len(calls)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_whatever_keeps_it_passes(self, dtype: torch.dtype) -> None:
        infinite = lambda u: torch.where(u == 0, 0, u / 0)  # noqa: E731
        no_numbers = lambda u: torch.where(u == 0, 0, u.log())  # noqa: E731
        for function in (torch.sin, torch.tanh, lambda u: u.abs().pow(1.7), infinite, no_numbers, torch.sign):
            kept = lambda updates, params, of=function: optree.tree_map(of, updates)  # noqa: E731
            assert self.first_steps(kept, dtype) == 2 + 12  # three steps of the whole, of each half, and of zeros

    def test_what_takes_no_other_shape_is_not_tried(self) -> None:
        mask = model(7)
        self.first_steps(lambda updates, params: optree.tree_map(torch.mul, updates, mask))

    def test_what_draws_is_refused(self) -> None:
        noisy = lambda updates, params: optree.tree_map(lambda u: u + torch.randn_like(u), updates)  # noqa: E731
        with pytest.raises(TypeError, match=r"draws random numbers, which are others on each rank.*ya\.normal_like"):
            self.first_steps(noisy)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_what_breaks_it_is_refused_every_time(self, dtype: torch.dtype) -> None:
        tx = optim.assume_elementwise(
            (lambda params: (), lambda u, s, p=None: (optree.tree_map(lambda x: x - x.mean(), u), s))
        )
        for _ in range(2):
            with pytest.raises(TypeError, match=r"does not treat every element of layers\.weight on its own"):
                optim.step_(tx, model(0, dtype), model(1, dtype), tx.init(model(0, dtype)))

    @pytest.mark.parametrize("function", [torch.sigmoid, torch.ones_like, torch.log, lambda u: u / u.abs()])
    def test_what_fills_padding_is_refused(self, function: Any) -> None:
        with pytest.raises(TypeError, match=r"it does not keep zeros in layers\.weight: .* fill the padding of shards"):
            self.first_steps(lambda updates, params: optree.tree_map(function, updates))


def test_apply_updates_keeps_the_dtype() -> None:
    params = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros((), dtype=torch.bfloat16)]
    out = optim.apply_updates(params, [torch.ones(2), torch.ones((), dtype=torch.float64)])
    assert [leaf.dtype for leaf in out] == [torch.bfloat16] * 2


def test_a_norm_inside_masked_is_that_of_the_masked_leaves() -> None:
    params = model(0)
    grads = model(1)
    tx = optim.masked(optim.clip_by_global_norm(1e-3), matrices)
    updates, _ = tx.update(grads, tx.init(params))
    assert updates.layers.weight.norm().item() == pytest.approx(1e-3, rel=1e-5)
    assert bits(updates.bias) == bits(grads.bias)


NEGATIVE = {
    "learning_rate": lambda: optim.adamw(-1e-3),
    "weight_decay": lambda: optim.lion(1e-3, weight_decay=-0.1),
    "momentum": lambda: optim.sgd(1e-3, momentum=-0.9),
    "eps": lambda: optim.rmsprop(1e-3, eps=-1e-8),
}


@pytest.mark.parametrize("setting", NEGATIVE)
def test_negative_settings_are_refused_as_torch_does(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"^{setting}=-.*: expected a number >= 0"):
        NEGATIVE[setting]()
    with pytest.raises(ValueError, match=r"^learning_rate=nan"):
        optim.muon(float("nan"))


@pytest.mark.parametrize("later", [-0.5, float("nan")])
def test_a_schedule_that_falls_below_zero_is_refused_there(later: float) -> None:
    params = model(0)
    grads = model(1)
    rates = iter((0.5, later))
    tx = optim.sgd(lambda count: next(rates))
    _, state = tx.update(grads, tx.init(params))
    with pytest.raises(ValueError, match=rf"^learning_rate\(count\)={later}: expected a number >= 0"):
        tx.update(grads, state)


def test_decay_without_parameters_is_refused() -> None:
    tx = optim.adamw(0.1)
    with pytest.raises(ValueError, match=r"add_decayed_weights: .*call `tx\.update\(updates, state, params\)`"):
        tx.update(model(1), tx.init(model(0)))


@pytest.mark.parametrize("bad", [None, 3, (1, 2), (lambda p: p,), optim.adamw])
def test_what_is_no_transformation_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a GradientTransformation or a pair of functions \(init, update\)"):
        optim.chain(bad)


def test_bad_hyperparameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"b1 and b2 in \[0, 1\)"):
        optim.adamw(0.1, b2=1.0)
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        optim.clip_by_global_norm(0.0)
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        optim.sgd(0.1, nesterov=True)
