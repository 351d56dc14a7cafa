"""Visits: when blocks run, what they keep, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.small import (
    L,
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
    param,
)

TX = ya.optim.sgd(0.1)
KEEP, REMAT = ya.schedules.zero3(), ya.schedules.zero3(remat=ya.remat.all)


def state() -> ya.ShardedState:
    return ya.init(model(), TX, mesh=one_rank())


def with_block(f: Callable[[Tensor, Any], Any]) -> Callable[[Model, Any], ya.Mean]:
    def run(p: Model, b: Any) -> ya.Mean:
        x = ya.apply(embed, p.embed, b["tokens"])
        x, _ = ya.scan(f, x, p.layers)
        mean: ya.Mean = ya.apply(head, p.head, x, b["targets"])
        return mean

    return run


# ---- when a block runs


@pytest.mark.parametrize(
    ("schedule", "runs"), [(KEEP, L), (REMAT, 2 * L), (ya.schedules.zero3(remat=ya.remat.first(1)), L + 1)]
)
def test_a_kept_graph_is_not_recomputed(schedule: Any, runs: int) -> None:
    calls: list[bool] = []

    def counted(c: Tensor, w: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return block(c, w)

    both, params = ya.value_and_grad(with_block(counted), schedule=schedule), state().params
    both(params, batch())
    assert len(calls) == 2 * L  # on demand: nothing says what to keep
    for _ in range(2):
        calls.clear()
        both(params, batch())
        assert len(calls) == runs and calls.count(True) == L


def test_graphs_are_freed_one_by_one_in_the_backward() -> None:
    """When a layer's backward runs, the activations of the layers above it are gone."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x.clone()
            ctx.save_for_backward(kept)
            made.append(weakref.ref(kept))
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            gc.collect()
            alive.append(sum(ref() is not None for ref in made))
            return grad

    def looked(c: Tensor, w: Any) -> Any:
        return block(Look.apply(c), w)  # type: ignore[no-untyped-call]

    both, params = ya.value_and_grad(with_block(looked)), state().params
    both(params, batch())
    made.clear()
    alive.clear()
    both(params, batch())
    assert alive == list(range(L, 0, -1))
    gc.collect()
    assert not any(ref() is not None for ref in made)


def test_a_visit_that_the_loss_does_not_use_has_its_backward_in_its_place() -> None:
    def forgetful(p: Model, b: Any) -> ya.Mean:
        x = ya.apply(embed, p.embed, b["tokens"])
        ya.scan(block, x, p.layers)  # thrown away
        mean: ya.Mean = ya.apply(head, p.head, x, b["targets"])
        return mean

    both, made = ya.value_and_grad(forgetful), state()
    for _ in range(2):
        _, grads = both(made.params, batch())
        assert_equal(grads, ya.value_and_grad(forgetful)(ya.unshard(made), batch())[1])
        assert all(leaf.eq(0).all() for leaf in leaves(grads.layers))


def test_the_same_units_visited_twice() -> None:
    def twice(p: Model, b: Any) -> ya.Mean:
        x = ya.apply(embed, p.embed, b["tokens"])
        for reverse in (False, True):
            x, _ = ya.scan(block, x, p.layers, reverse=reverse)
        x = x + ya.apply(embed, p.embed, b["targets"])
        mean: ya.Mean = ya.apply(lambda w, *rest: head(w[0], *rest), (p.head, p.embed), x, b["targets"])
        return mean

    made = state()
    for schedule in (KEEP, REMAT, ya.schedules.zero2()):
        both = ya.value_and_grad(twice, schedule=schedule, microbatches=2)
        for _ in range(2):
            assert_close(both(made.params, batch()), both(ya.unshard(made), batch()), rtol=1e-5)


def test_outputs_that_are_not_differentiable_and_no_tensors() -> None:
    def layer(c: Tensor, w: Any) -> Any:
        out, _ = block(c, w)
        return out, {"index": out.argmax(-1), "none": None}

    def last(w: Any, x: Tensor) -> Any:
        out = x * w["norm"]
        return out.sum(), {"index": out.argmax(), "text": "t", "detached": out.detach().mean(), "n": 3}

    def run(p: Model, b: Any) -> tuple[Tensor, Any]:
        x, ys = ya.scan(layer, ya.apply(embed, p.embed, b["tokens"]), p.layers)
        total, extra = ya.apply(last, p.head, x)
        return total + extra["detached"], {"ys": ys["index"], **extra}

    made = state()
    both = ya.value_and_grad(run, has_aux=True)
    for _ in range(2):
        (got, aux), grads = both(made.params, batch())
        (want, want_aux), want_grads = both(ya.unshard(made), batch())
        assert torch.equal(got, want) and aux["text"] == "t" and aux["n"] == 3
        assert aux["ys"].dtype == torch.int64
        assert_equal(aux, want_aux)
        assert_close(grads, want_grads, rtol=1e-5)


def test_a_block_that_passes_its_carry_through() -> None:
    def through(p: Model, x: Tensor) -> Tensor:
        c, ys = ya.scan(lambda c, w: (c, c), x, p.layers)
        return (c * ys).sum() + 0 * ya.apply(lambda w: w["norm"].sum(), p.head)

    made, x = state(), torch.ones(2, 5)
    for schedule in (KEEP, REMAT):
        both = ya.value_and_grad(through, (0, 1), schedule=schedule)
        for _ in range(2):
            assert_equal(both(made.params, x), both(ya.unshard(made), x))


def test_autocast_is_restored_in_the_backward() -> None:
    dtypes: set[torch.dtype] = set()

    def layer(c: Tensor, w: Any) -> Any:
        hidden = torch.nn.functional.linear(c, w["up"])
        dtypes.add(hidden.dtype)
        return c + torch.nn.functional.linear(torch.tanh(hidden), w["down"]).float(), None

    def cast(p: Model, b: Any) -> ya.Mean:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return with_block(layer)(p, b)

    made = state()
    for schedule in (KEEP, REMAT):
        both = ya.value_and_grad(cast, schedule=schedule)
        for _ in range(2):
            assert_close(both(made.params, batch()), both(ya.unshard(made), batch()), rtol=1e-2, atol=1e-2)
    assert dtypes == {torch.bfloat16}


# ---- what is refused, and that the state survives it


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
        kept[0].backward()  # type: ignore[no-untyped-call]


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
        return Trap.apply(x) if armed[0] and (name, where) == ("layer", "backward") else x  # type: ignore[no-untyped-call,no-any-return]

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


def test_frozen_embedding_alone_needs_no_backward_of_weights() -> None:
    tree = {"f": ya.frozen({"w": param(3, 3)}), "t": {"w": param(3, 3)}}
    made = ya.init(tree, TX, mesh=one_rank())

    def run(p: Any, x: Tensor) -> Tensor:
        x = ya.apply(lambda w, x: torch.tanh(x @ w["w"]), p["f"], x)
        x = ya.apply(lambda w, x: torch.tanh(x @ w["w"]), p["t"], x)
        return ya.apply(lambda w, x: (x @ w["w"]).sum(), p["f"], x)  # type: ignore[no-any-return]

    both = ya.value_and_grad(run)
    for _ in range(2):
        assert_close(
            both(made.params, torch.ones(2, 3)),
            both(ya.unshard(made) | {"f": ya.frozen(ya.unshard(made)["f"])}, torch.ones(2, 3)),
        )
