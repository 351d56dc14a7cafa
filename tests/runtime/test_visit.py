"""Visits: when blocks run, and what they keep."""

from __future__ import annotations

from contextlib import nullcontext
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
    model,
    one_rank,
    with_block,
)

TX = ya.optim.sgd(0.1)
KEEP = ya.schedules.zero3()
REMAT = ya.schedules.zero3(remat=ya.schedules.remat.all)


def state() -> ya.ShardedState:
    return ya.init(model(), TX, mesh=one_rank())


def test_an_output_that_the_loss_does_not_use_is_not_differentiated() -> None:
    """Its slope is infinite, and times zero no number. Products of `ya.linear` behind it are not made."""

    def layer(c: Tensor, w: Any) -> Any:
        return block(c, w)[0], ya.linear((c * 0).sqrt(), w["up"])

    made = state()
    for schedule in (KEEP, REMAT):
        both = ya.value_and_grad(with_block(layer), schedule=schedule)
        for _ in range(2):
            assert_close(both(made.params, batch()), both(ya.unshard(made), batch()), rtol=1e-5)


def test_autocast_around_several_steps_casts_the_weights_of_each() -> None:
    """It keeps casts while it lasts, by the tensor that was cast."""

    def losses(around: bool) -> list[Tensor]:
        made = state()
        step = ya.train_step(with_block(block), TX, schedule=KEEP)
        found = []
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
