"""Verbs inside an optimizer's update, on several ranks: they work, or say that they do not; nobody waits for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import batch, layer, loss, state
from tests.harness.oracle import compare
from tests.harness.pool import on_ranks
from yafsdp_fn.params.sharded import handles

VERBS: dict[str, Callable[[Any, Any], Any]] = {
    "map_whole_layers": lambda p, g: ya.map_whole_layers(lambda w: w["w"].square().sum(), p["layers"]),
    "map_whole_layers of gradients": lambda p, g: ya.map_whole_layers(
        lambda w, of: w["w"] * of["w"], p["layers"], g["layers"]
    ),
    "scan": lambda p, g: ya.scan(layer, torch.ones(3, 5), p["layers"])[0],
    "scan of chunk": lambda p, g: ya.scan(ya.chunk(layer, 3, in_axes=(0, None)), torch.ones(3, 5), p["layers"])[0],
    "chunk": lambda p, g: ya.chunk(torch.sin, 2, in_axes=0)(torch.ones(4)),
    "linear": lambda p, g: ya.linear(torch.ones(2, 5), torch.ones(3, 5)),
    "unshard": lambda p, g: ya.unshard(p),
    "unshard of gradients": lambda p, g: ya.unshard(g),
    "value_and_grad": lambda p, g: ya.value_and_grad(through_layers)(p, None),
    "torch.func.grad": lambda p, g: torch.func.grad(through_layers)(p),
    "eval_step": lambda p, g: ya.eval_step(through_layers)(p, None)["loss"],
    "shard": lambda p, g: ya.shard(p).step,
    "global_norm": lambda p, g: ya.global_norm(g),
    "vdot": lambda p, g: ya.vdot(p, g),
    "normal_like": lambda p, g: ya.normal_like(0, p),
}
WHOLE = "asked for something over all parameters or ranks|is no parameter of a state|no whole layers|is not Stacked"
"""Why an update of one unit alone cannot do it."""
BY_UNIT = {"chunk", "linear", "normal_like"}
"""What it can do."""


def through_layers(p: Any, _: Any = None) -> Tensor:
    return ya.scan(layer, torch.ones(3, 5), p["layers"])[0].sum()


def inside(mesh: Any, name: str, by_unit: bool) -> str:
    """What became of two steps with the verb in the update: "works", where they train as without it, or the error."""
    sgd = ya.optim.sgd(0.1)
    calls = []

    def nested(grads: Any, opt_state: Any, tree: Any = None) -> Any:
        both = [{key: found[0] for key, of in each.items() if (found := handles(of))} for each in (tree, grads)]
        if "layers" in both[0]:  # else it is the turn of another unit
            calls.append(VERBS[name](*both))
        return sgd.update(grads, opt_state, tree)

    tx = ya.optim.assume_elementwise((sgd.init, nested))
    options = {"schedule": ya.schedules.zero3(update=by_unit), "skip_nonfinite": not by_unit}
    one = state(mesh, tx)
    other = state(mesh, sgd)
    step = ya.train_step(loss, tx, **options)
    without = ya.train_step(loss, sgd, **options)
    for _ in range(3):
        try:
            one, _ = step(one, batch(mesh.get_rank()))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        other, _ = without(other, batch(mesh.get_rank()))
    assert len(calls) >= 3
    compare(one, other, 1e-5, name)
    return "works"


@on_ranks(2)
@pytest.mark.parametrize("name", VERBS)
def test_verbs_inside_an_update_work(mesh: Any, name: str) -> None:
    assert inside(mesh, name, False) == "works"


@on_ranks(2)
@pytest.mark.parametrize("name", VERBS)
def test_inside_an_update_of_one_unit_they_work_or_are_refused(mesh: Any, name: str) -> None:
    outcome = inside(mesh, name, True)
    assert outcome == "works" if name in BY_UNIT else re.search(WHOLE, outcome), outcome
