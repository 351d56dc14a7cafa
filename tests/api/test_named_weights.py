"""named_weights: what unshard gives, a unit at a time, in one order on all ranks, in the memory that is promised."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from benchmarks.counting import tensor_peak
from tests.harness.groups import SOON, TIMEOUT, breakable, outcome
from tests.harness.pool import Pools, on_ranks
from tests.harness.small import batch, loss, model, param
from yafsdp_fn.util.torch_private import side_store

TX = ya.optim.adamw(1e-2)


def params() -> dict[str, Any]:
    layer = {"w": param(4, 3, 5), "gain": ya.Pinned(param(4, 5)), "base": ya.frozen(param(4, 2))}
    return {
        "first": param(7, 3),
        "layers": ya.Stacked({"block": layer, "b": param(4, 1)}),
        "last": {"x": param(2), "y": param(3)},
    }


def expected(whole: Any) -> dict[str, torch.Tensor]:
    found = {"first": whole["first"]}
    for layer in range(4):
        for name, leaf in (
            ("b", whole["layers"]["b"]),
            *((f"block.{k}", v) for k, v in whole["layers"]["block"].items()),
        ):
            found[f"layers.{layer}.{name}"] = leaf[layer]
    return found | {f"last.{name}": leaf for name, leaf in whole["last"].items()}


def same(mesh: Any) -> list[str]:
    state = ya.init(params(), TX, mesh=mesh, seed=1)
    want = expected(ya.params.without_markers(ya.unshard(state)))
    kept = list(ya.named_weights(state.params))  # all of them stay what they are, also when the state moves on
    narrow = dict(ya.named_weights(state.params, dtype=torch.bfloat16))
    optree.tree_map_(lambda leaf: leaf.zero_(), state.params)
    assert not any(weight.any() for _, weight in ya.named_weights(state.params)), "they are those of now"
    assert dict(kept).keys() == want.keys() == narrow.keys()
    assert len(kept) == len(want)
    for name, weight in kept:
        assert torch.equal(weight, want[name]) and torch.equal(narrow[name], want[name].bfloat16()), name
        assert not weight.requires_grad
    adapted = ya.init(ya.lora({"layers": ya.Stacked({"w": param(4, 3, 5)})}, rank=2), TX, mesh=mesh)
    merged = ya.params.without_markers(ya.unshard(ya.merge_lora(adapted.params)))["layers"]["w"]
    for layer, (name, weight) in enumerate(ya.named_weights(adapted.params)):
        assert name == f"layers.{layer}.w"
        assert torch.equal(weight, merged[layer])
    return [name for name, _ in kept]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_they_are_the_whole_weights_in_one_order(pools: Pools, world: int) -> None:
    orders = pools[world].run(same)
    assert orders == [orders[0]] * world


@on_ranks(1, 2)
def test_two_units_are_there_at_most(mesh: Any) -> None:
    """In bytes, while weights are asked for."""
    tree = {"layers": ya.Stacked({"w": param(6, 64, 64), "v": param(6, 64, 32)})}
    state = ya.init(tree, ya.optim.sgd(1.0), mesh=mesh)
    shards = sum(leaf.numel() * 4 for leaf in optree.tree_leaves(state.params))

    def build() -> Any:
        def ask(number: int) -> None:
            for _, weight in ya.named_weights(state.params):
                weight.numel()

        return ask

    peak = tensor_peak(build, torch.device("cpu"), 1)
    unit = 64 * 96 * 4
    assert unit < peak <= shards + 2 * unit + 1000, (peak, shards, unit)


def stops(mesh: Any, how: str) -> str:
    state = ya.init(params(), TX, mesh=mesh)
    rank = mesh.get_rank()
    try:
        for number, (name, _) in enumerate(ya.named_weights(state.params)):
            if rank == 1 and name.startswith("layers.1") and how == "one":
                break
            if how == "all" and name.startswith("layers.1"):
                break
            if how == "in the last" and rank == 1 and name.startswith("layers.3"):
                break
            assert number < 20
        said = "ended"
    except ya.errors.RanksDisagree as error:
        said = str(error)
    small = ya.init(model(), TX, mesh=mesh)
    step = ya.train_step(loss, TX)
    for _ in range(2):  # ranks are in step
        small, _metrics = step(small, batch())
    return said


def test_a_rank_that_stops_is_named_and_others_go_on(pools: Pools) -> None:
    said, ended = pools[2].run(stops, "one")
    assert said.endswith("or none does); it differs:\n    rank 0: layers.2\n    rank 1: no more")
    assert ended == "ended"
    for how in ("all", "in the last"):
        assert pools[2].run(stops, how) == ["ended", "ended"]


@on_ranks(2)
@pytest.mark.nightly
def test_others_wait_for_a_rank_that_does_not_ask_as_long_as_collectives_may_take(mesh: Any) -> None:
    """Rank 1 stays at a layer until rank 0 has given up."""
    state, store = ya.init(params(), TX, mesh=breakable()), side_store("asleep", timedelta(seconds=TIMEOUT))
    dict(ya.named_weights(state.params))
    began = time.monotonic()

    def ask() -> None:
        for name, _ in ya.named_weights(state.params):
            if mesh.get_rank() == 1 and name == "layers.0.b":
                store.wait(["given up"])

    how = outcome(ask, SOON)
    seconds = time.monotonic() - began
    store.set("given up", "")
    rank = mesh.get_rank()
    assert f"CommunicationError: rank {rank}: named_weights of layers.1" in how and SOON <= seconds < TIMEOUT, how


def test_what_is_not_sharded_is_refused() -> None:
    for tree, has in (({"w": torch.zeros(2)}, "one with a Tensor"), ({}, "nothing")):
        with pytest.raises(TypeError, match=f"expected a sharded tree such as state.params, got {has}"):
            next(iter(ya.named_weights(tree)))
    with pytest.raises(
        TypeError, match=r"dtype=torch\.int8\): expected a dtype, such as torch\.bfloat16, of floating point"
    ):
        next(iter(ya.named_weights({}, dtype=torch.int8)))
