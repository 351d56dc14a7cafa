"""Visits: what is refused, and that the state survives it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.small import (
    Model,
    assert_close,
    assert_equal,
    batch,
    block,
    embed,
    head,
    leaves,
    loss,
    model,
    one_rank,
    with_block,
)

TX = ya.optim.sgd(0.1)


def state() -> ya.ShardedState:
    return ya.init(model(), TX, mesh=one_rank())


def refused(run: Any, message: str, error: type[Exception] = RuntimeError) -> None:
    """`run(params, batch)` raises, on demand and with a program, and the state is as good as before."""
    made = state()
    before = [leaf.clone() for leaf in leaves(made)]
    fine = ya.train_step(loss, TX)
    for _ in range(2):
        with pytest.raises(error, match=message):
            ya.value_and_grad(run)(made.params, batch())
    assert_equal(before, made)
    again, _ = fine(made, batch())
    want, _ = fine(state(), batch())
    assert_equal(again, want)


@pytest.mark.parametrize(
    "view", [lambda w: w["up"], lambda w: w["up"].t(), lambda w: w["up"][0], lambda w: w["up"].detach()]
)
def test_views_of_the_weights(view: Any) -> None:
    run = with_block(lambda c, w: (block(c, w)[0], view(w)))
    refused(run, r"layers\[0\]: an output of shape .* is a view of the block's weights, .*return a copy \(.clone\(\)\)")


def test_copies_of_the_weights_are_fine() -> None:
    def summed(p: Model, b: Any) -> ya.Mean:
        x, ups = ya.scan(
            lambda c, w: (block(c, w)[0], w["up"].clone()), ya.apply(embed, p.embed, b["tokens"]), p.layers
        )
        mean: ya.Mean = ya.apply(head, p.head, x, b["targets"])
        return ya.Mean(mean.total + ups.square().sum(), mean.weight)

    made, both = state(), ya.value_and_grad(summed)
    for _ in range(2):
        assert_close(both(made.params, batch()), both(ya.unshard(made), batch()), rtol=1e-5)


def test_a_gradient_inside_the_loss() -> None:
    def inner(use: Any) -> Any:
        def run(p: Model, b: Any) -> ya.Mean:
            x = ya.apply(embed, p.embed, b["tokens"]).detach().requires_grad_()
            y, _ = ya.scan(block, x, p.layers)
            use(y.sum(), x)
            mean: ya.Mean = ya.apply(head, p.head, y, b["targets"])
            return mean

        return run

    message = r"layers\[2\]: a backward through a visit outside the step's own, .* use torch.func.grad"
    refused(inner(lambda y, x: torch.autograd.grad(y, x)), message)
    refused(inner(lambda y, x: y.backward()), message)


def test_a_second_backward_through_a_kept_loss() -> None:
    kept: list[Tensor] = []

    def keeps(p: Model, b: Any) -> ya.Mean:
        mean = loss(p, b)
        kept.append(mean.total)
        return mean

    made = state()
    ya.value_and_grad(keeps)(made.params, batch())
    with pytest.raises(RuntimeError, match=r"outside the step's own|second backward"):
        kept[0].backward()


def test_a_visit_inside_a_block() -> None:
    def nested(p: Model, b: Any) -> ya.Mean:
        x = ya.apply(lambda w, t: embed(w, t) * ya.apply(lambda h: h["norm"] * 1, p.head), p.embed, b["tokens"])
        mean: ya.Mean = ya.apply(head, p.head, x, b["targets"])
        return mean

    refused(nested, r"begins inside (forward|backward) of embed .*a block cannot visit sharded parameters")


def test_parameters_of_a_step_that_is_over() -> None:
    stolen: list[Model] = []

    def steals(p: Model, b: Any) -> ya.Mean:
        stolen.append(p)
        return loss(p, b)

    made = state()
    ya.value_and_grad(steals)(made.params, batch())
    with pytest.raises(
        RuntimeError, match="embed: these parameters were given to a step that is over; use the state's params"
    ):
        loss(stolen[0], batch())


@pytest.mark.parametrize("where", ["embed", "layer", "head", "outside", "backward"])
def test_an_exception_anywhere_leaves_the_state_usable(where: str) -> None:
    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("planned")

    armed = [True]

    def trip(name: str, x: Tensor) -> Tensor:
        if armed[0] and name == where:
            raise KeyError("planned")
        return Trap.apply(x) if armed[0] and (name, where) == ("layer", "backward") else x

    def run(p: Model, b: Any) -> ya.Mean:
        x = ya.apply(lambda w, t: trip("embed", embed(w, t)), p.embed, b["tokens"])
        x, _ = ya.scan(lambda c, w: (trip("layer", block(c, w)[0]), None), x, p.layers)
        x = trip("outside", x)
        mean: ya.Mean = ya.apply(lambda w, c, t: head(w, trip("head", c), t), p.head, x, b["targets"])
        return mean

    step, made, twin = ya.train_step(run, TX), state(), state()
    for number in range(3):  # on demand, planned, planned
        armed[0] = True
        with pytest.raises(KeyError, match="planned") as caught:
            step(made, batch(number))
        assert any("rank 0 of 1, " in note and f"step {number}" in note for note in caught.value.__notes__)
        armed[0] = False
        made, got = step(made, batch(number))
        twin, want = ya.train_step(loss, TX)(twin, batch(number))
        assert torch.equal(got["loss"], want["loss"])
        assert_equal(made, twin)


def test_a_loss_that_swallows_a_failed_visit() -> None:
    def swallows(p: Model, b: Any) -> ya.Mean:
        with contextlib.suppress(KeyError):
            ya.apply(lambda w: w["nothing"], p.embed)
        return loss(p, b)

    refused(swallows, "forward of embed .* raised KeyError, and the loss went on")
