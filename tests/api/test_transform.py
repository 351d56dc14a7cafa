"""grad and value_and_grad: JAX's contract, on plain trees against autograd, on sharded ones against plain ones."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.marks import by_name
from tests.harness.small import (
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
    param,
    with_ends,
)

TX = ya.optim.sgd(0.1)


def states(tree: Any = None, **options: Any) -> tuple[Any, Any]:
    state = ya.init(tree if tree is not None else model(), TX, mesh=one_rank(), **options)
    return state.params, ya.unshard(state)


# ---- plain: against torch itself


def f(a: Any, b: Tensor, *, scale: float = 1.0) -> Tensor:
    return (a["x"] * b).sum() * scale + b.square().sum()


A, C = {"x": torch.tensor([1.0, 2.0])}, torch.tensor([3.0, 4.0])


def test_the_value_comes_first() -> None:
    value, grads = ya.value_and_grad(f)(A, C, scale=2.0)
    assert value == 2 * 11 + 25 and grads["x"].tolist() == [6, 8]
    assert ya.grad(f)(A, C)["x"].tolist() == [3, 4]
    assert not value.requires_grad and not A["x"].requires_grad


@pytest.mark.parametrize(
    ("argnums", "want"),
    [
        (0, {"x": [3, 4]}),
        (1, [7, 10]),
        ((0,), ({"x": [3, 4]},)),
        ((0, 1), ({"x": [3, 4]}, [7, 10])),
        ((1, 0), ([7, 10], {"x": [3, 4]})),
    ],
)
def test_argnums(argnums: Any, want: Any) -> None:
    got = ya.grad(f, argnums)(A, C)
    assert optree.tree_map(lambda leaf: leaf.tolist(), got) == want and type(got) is type(
        want if want != [7, 10] else C
    )


def test_aux() -> None:
    def with_aux(a: Any, b: Tensor) -> tuple[Tensor, Any]:
        return f(a, b), {"m": ya.Max(b), "raw": a["x"] * 2, "n": 3}

    (value, aux), grads = ya.value_and_grad(with_aux, has_aux=True)(A, C)
    assert value == 36 and aux["m"].tolist() == [3, 4] and aux["raw"].tolist() == [2, 4] and aux["n"] == 3
    assert not aux["raw"].requires_grad
    grads_alone, aux_again = ya.grad(with_aux, has_aux=True)(A, C)
    assert_equal(grads_alone, grads)
    assert_equal(aux, aux_again)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_plain_model_against_autograd(parts: int) -> None:
    params = optree.tree_map(lambda x: x.requires_grad_(), ya.materialize(model()))
    mean = loss(params, batch())
    want = torch.autograd.grad(mean.total / mean.weight, optree.tree_leaves(params))
    value, grads = ya.value_and_grad(loss, microbatches=parts)(params, batch())
    assert_close(value, (mean.total / mean.weight).detach())
    assert_close(grads, list(want))
    assert type(grads) is Model


def test_a_function_that_returns_a_mean_divides_by_the_whole_weight() -> None:
    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])

    def masked(x: Tensor, rows: Tensor, mask: Tensor) -> ya.Mean:
        return ya.Mean((x * rows * mask).sum(), mask.sum())

    rows = torch.arange(8.0)
    for parts in (1, 2, 4):
        value, grad = ya.value_and_grad(masked, microbatches=parts)(torch.tensor(2.0), rows, mask)
        assert value == 2 * 22 / 5 and torch.isclose(grad, torch.tensor(22 / 5))


# ---- sharded: against plain, to the bit on one rank

SCHEDULES = {
    "zero3": ya.schedules.zero3(),
    "remat": ya.schedules.zero3(remat="all"),
    "some remat": ya.schedules.zero3(remat=ya.schedules.remat.every(2), resident=1, prefetch=0),
    "zero2": ya.schedules.zero2(remat=ya.schedules.remat.first(1)),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("schedule", by_name(SCHEDULES))
def test_a_sharded_model_is_the_plain_one(schedule: Any, parts: int) -> None:
    sharded, plain = states()
    both = ya.value_and_grad(loss, schedule=schedule, microbatches=parts)
    for seed in range(3):
        got, want = both(sharded, batch(seed)), both(plain, batch(seed))
        assert torch.equal(got[0], want[0])
        if parts == 1:
            assert_equal(got[1], want[1])
        else:
            assert_close(got[1], want[1])  # microbatches add up in another order


def test_gradients_are_like_the_parameters() -> None:
    sharded, _ = states()
    _, grads = ya.value_and_grad(loss)(sharded, batch())
    assert optree.tree_structure(grads) == optree.tree_structure(sharded)
    for grad, leaf in zip(optree.tree_leaves(grads), optree.tree_leaves(sharded), strict=True):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype and not grad.requires_grad
    leaves = [(group.layout, leaf) for handle in grads for _, group, leaf in handle.group_leaves()]
    assert not any(
        gap.any() for layout, leaf in leaves for row in leaf.view(-1, leaf.shape[-1]) for gap in layout.gaps(row)
    )


def test_gradients_are_in_memory_of_their_own() -> None:
    sharded, _ = states()
    both = ya.value_and_grad(loss)
    _, first = both(sharded, batch(0))
    kept = optree.tree_map(torch.clone, first)
    before = optree.tree_map(torch.clone, sharded)
    for seed in (1, 2):
        both(sharded, batch(seed))
    assert_equal(first, kept)
    assert_equal(before, sharded)


def test_sharded_and_plain_arguments_together() -> None:
    sharded, plain = states()

    def scaled(shift: Tensor, params: Model, b: Any, *, power: float) -> ya.Mean:
        x = ya.apply(embed, params.embed, b["tokens"]) + shift
        x, _ = ya.scan(block, x, params.layers)
        mean = ya.apply(head, params.head, x * power, b["targets"])
        return ya.Mean(mean.total + shift.sum(), mean.weight)

    shift = torch.linspace(0, 1, 5)
    for argnums in ((0, 1), (1, 0), 1, 0):
        both = ya.value_and_grad(scaled, argnums)
        for _ in range(2):
            got, want = (both(shift, params, batch(), power=0.5) for params in (sharded, plain))
            assert_close(got, want)


def test_a_part_of_the_parameters() -> None:
    sharded, plain = states()

    def deep(layers: Any, x: Tensor) -> Tensor:
        return ya.scan(block, x, layers)[0].square().mean()

    x = torch.ones(2, 5)
    assert_close(ya.value_and_grad(deep)(sharded.layers, x), ya.value_and_grad(deep)(plain.layers, x))


def test_regularisers_and_maps_inside_the_loss() -> None:
    sharded, plain = states()

    def regular(params: Model, b: Any) -> ya.Mean:
        halved = params._replace(head=optree.tree_map(lambda x: x / 2, params.head))
        mean = loss(halved, b)
        squares = torch.stack([leaf.square().sum() for leaf in optree.tree_leaves(params)]).sum()
        return ya.Mean(mean.total + 0.1 * squares, mean.weight)

    both = ya.value_and_grad(regular, microbatches=2)
    for _ in range(2):
        assert_close(both(sharded, batch()), both(plain, batch()), rtol=1e-5)


def test_another_states_parameters_beside_the_differentiated_ones() -> None:
    """A teacher: it is not cut into microbatches, and gets no gradient."""
    (sharded, plain), (teacher, plain_teacher) = states(seed=0), states(seed=1)

    def distilled(params: Model, other: Model, b: Any) -> ya.Mean:
        mine = loss(params, b)
        with torch.no_grad():
            theirs = loss(other, b)
        return ya.Mean((mine.total - theirs.total).square(), mine.weight)

    both = ya.value_and_grad(distilled, microbatches=2)
    # a plain teacher would be cut like a batch: it is closed over
    alone = ya.value_and_grad(lambda params, b: distilled(params, plain_teacher, b), microbatches=2)
    for _ in range(2):
        assert_close(both(sharded, teacher, batch()), alone(plain, batch()), rtol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_dropout_draws_the_same_numbers_on_a_plain_tree(parts: int) -> None:
    sharded, plain = states()

    @with_ends
    def dropped(params: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            y, _ = ya.scan(dropout_block, x, params.layers)
        x, _ = ya.scan(dropout_block, x, params.layers)
        return x + y

    for schedule in (SCHEDULES["zero3"], SCHEDULES["remat"]):
        both = ya.value_and_grad(dropped, schedule=schedule, microbatches=parts)
        values = []
        for _ in range(2):
            got, want = both(sharded, batch()), both(plain, batch())
            assert torch.equal(got[0], want[0])
            assert_close(got[1], want[1])
            values.append(got[0])
        assert values[0] == values[1]  # the step has not changed
    ambient = torch.get_rng_state()
    both(sharded, batch())
    assert torch.equal(torch.get_rng_state(), ambient)


# ---- what gets no gradient


def test_frozen_leaves_have_zero_gradients_without_memory() -> None:
    tree = {"s": ya.Stacked({"w": param(2, 3, 3), "base": ya.frozen(param(2, 3))}), "f": ya.frozen({"w": param(3)})}
    state = ya.init(tree, TX, mesh=one_rank())
    plain = ya.PlainState.create(tree, TX)

    def frozen_loss(params: Any, x: Tensor) -> Tensor:
        x = ya.apply(lambda w, x: x * w["w"], params["f"], x)
        return ya.scan(lambda c, w: (torch.tanh(c @ w["w"] + w["base"]), None), x, params["s"])[0].sum()

    both = ya.value_and_grad(frozen_loss)
    for _ in range(2):
        (value, grads), (want, want_grads) = (both(p, torch.ones(2, 3)) for p in (state.params, plain.params))
        assert torch.equal(value, want)
        assert_equal(grads, want_grads)
        assert ya.unshard(grads)["f"]["w"].eq(0).all() and ya.unshard(grads)["s"]["base"].eq(0).all()
        frozen = grads["f"].leaves[0]
        assert frozen.untyped_storage().nbytes() == frozen.element_size()
        assert optree.tree_structure(want_grads) == optree.tree_structure(plain.params)


def test_what_the_loss_does_not_use_has_a_zero_gradient() -> None:
    sharded, plain = states({"a": {"w": param(3), "unused": param(2)}, "b": {"w": param(4)}})

    def part(params: Any) -> Tensor:
        return ya.apply(lambda w: w["w"].sum(), params["a"])

    for _ in range(2):
        assert_equal(ya.grad(part)(sharded), ya.grad(part)(plain))
        assert [leaf.tolist() for leaf in leaves(ya.grad(part)(sharded))] == [[0, 0], [1, 1, 1], [0, 0, 0, 0]]
