"""Visits: when blocks run, and what they keep."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

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
    embed,
    model,
    one_rank,
    param,
    with_block,
)

TX = ya.optim.sgd(0.1)
KEEP, REMAT = ya.schedules.zero3(), ya.schedules.zero3(remat=ya.schedules.remat.all)


def state() -> ya.ShardedState:
    return ya.init(model(), TX, mesh=one_rank())


@pytest.mark.parametrize(
    ("schedule", "runs"), [(KEEP, L), (REMAT, 2 * L), (ya.schedules.zero3(remat=ya.schedules.remat.first(1)), L + 1)]
)
def test_a_kept_graph_is_not_recomputed(schedule: Any, runs: int) -> None:
    calls: list[bool] = []

    def counted(c: Tensor, w: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return block(c, w)

    both, params = ya.value_and_grad(with_block(counted), schedule=schedule), state().params
    for recorded in (L, 0, 0):
        calls.clear()
        both(params, batch())
        assert calls[:recorded] == [False] * recorded
        assert len(calls) == recorded + runs and calls.count(True) == L


def test_an_output_that_the_loss_does_not_use_is_not_differentiated() -> None:
    """Its slope is infinite, and times zero no number. Products of `ya.linear` behind it are not made."""

    def layer(c: Tensor, w: Any) -> Any:
        return block(c, w)[0], ya.linear((c * 0).sqrt(), w["up"])

    made = state()
    for schedule in (KEEP, REMAT):
        both = ya.value_and_grad(with_block(layer), schedule=schedule)
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


def test_autocast_around_several_steps_casts_the_weights_of_each() -> None:
    """It keeps casts while it lasts, by the tensor that was cast."""

    def losses(around: bool) -> list[Tensor]:
        made, step, found = state(), ya.train_step(with_block(block), TX, schedule=KEEP), []
        with torch.autocast("cpu", dtype=torch.bfloat16) if around else nullcontext():
            for _ in range(4):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    made, metrics = step(made, batch())
                found.append(metrics["loss"])
        return found

    assert_equal(losses(around=True), losses(around=False))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_users_autocast_keeps_its_cache_or_has_none(enabled: bool) -> None:
    """And the casts in it: between visits, after a step, and after a block that raises."""
    seen: list[bool] = []
    theirs = torch.ones(2, 2, requires_grad=True)

    def cast() -> Any:
        """The node of the cast of their own weights."""
        return torch.mm(torch.ones(2, 2), theirs).grad_fn.next_functions[1][0]

    def watched(params: Model, data: Any) -> Any:
        mean = with_block(block)(params, data)
        seen.append(torch.is_autocast_cache_enabled())
        return mean

    def broken(c: Tensor, w: Any) -> Any:
        raise OSError

    made = state()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=enabled):
        first = cast()
        for schedule in (KEEP, REMAT):
            step = ya.value_and_grad(watched, schedule=schedule)
            for _ in range(2):
                step(made.params, batch())
                seen.append(torch.is_autocast_cache_enabled())
        with pytest.raises(OSError):
            ya.value_and_grad(with_block(broken))(made.params, batch())
        seen.append(torch.is_autocast_cache_enabled())
        assert (cast() is first) == enabled
    assert seen == [enabled] * 11  # each first call is recorded before its step


def test_frozen_embedding_alone_needs_no_backward_of_weights() -> None:
    tree = {"f": ya.frozen({"w": param(3, 3)}), "t": {"w": param(3, 3)}}
    made = ya.init(tree, TX, mesh=one_rank())

    def run(p: Any, x: Tensor) -> Tensor:
        x = ya.apply(lambda w, x: torch.tanh(x @ w["w"]), p["f"], x)
        x = ya.apply(lambda w, x: torch.tanh(x @ w["w"]), p["t"], x)
        return ya.apply(lambda w, x: (x @ w["w"]).sum(), p["f"], x)

    both = ya.value_and_grad(run)
    for _ in range(2):
        assert_close(
            both(made.params, torch.ones(2, 3)),
            both(ya.unshard(made) | {"f": ya.frozen(ya.unshard(made)["f"])}, torch.ones(2, 3)),
        )
