"""Mixtral with its experts over an axis of the mesh, against the plain loop; and the slots of a capacity."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models
import yafsdp_fn as ya
from models import mixtral
from models.parts.axes import Axes
from tests.axes.test_exact import FLOAT64, close
from tests.axes.test_llama import EXPERT, SIZE, Case, S, batch_of, config_of, exact, on_their_ranks, wide
from tests.harness.pool import Pool, on_ranks

TENSOR = Axes(expert=True, tensor=True)
SEQUENCE = Axes(expert=True, tensor=True, sequence=True)
CONTEXT = Axes(expert=True, context=True)
ALL = Axes(expert=True, tensor=True, sequence=True, context=True)
ROUTER: dict[str, Any] = {"experts": 4, "router_loss": True, "router_coef": 0.1, "router_z_coef": 0.01}


def case(mesh: dict[str, int], axes: Axes, **more: Any) -> Case:
    return Case(mesh, axes, {**ROUTER, **more.pop("config", {})}, "mixtral", **more)


CASES = {
    "uneven": case({"expert": 2}, EXPERT),
    "capacity": case({"expert": 2}, EXPERT, capacity=0.5, recomputed=True),
    "uneven, chunks, documents": case({"expert": 2}, EXPERT, loss={"chunks": 2}, documents=True),
    "capacity, microbatches": case({"expert": 2}, EXPERT, capacity=1.0, microbatches=2),
    "uneven, experts without tokens": case({"expert": 2}, EXPERT, alike=True, config={"experts": 8}),
    "capacity, experts without tokens": case({"expert": 2}, EXPERT, alike=True, capacity=1.0, config={"experts": 8}),
    "capacity, context": case({"context": 2}, Axes(context=True), capacity=0.6),
    "capacity, tensor": case({"tensor": 2}, Axes(tensor=True), capacity=0.6),
    "tensor": case({"tensor": 2}, Axes(tensor=True, sequence=True)),
    "not split": case({"expert": 2}, Axes(), capacity=0.6),
    "uneven over four": case({"expert": 4}, EXPERT),
    "capacity over four": case({"expert": 4}, EXPERT, capacity=0.7, config={"experts": 8, "tied": True}),
    "uneven, shard": case({"shard": 2, "expert": 2}, EXPERT, recomputed=True),
    "capacity, shard": case({"shard": 2, "expert": 2}, EXPERT, capacity=0.5),
    "uneven, sequence": case({"expert": 2, "tensor": 2}, SEQUENCE),
    "capacity and tensor": case({"expert": 2, "tensor": 2}, TENSOR, capacity=0.5),
    "uneven, context": case({"expert": 2, "context": 2}, CONTEXT, documents=True),
    "capacity and context": case({"expert": 2, "context": 2}, CONTEXT, capacity=0.6, config={"window": 5}),
}
DAILY = {
    "capacity",
    "uneven, experts without tokens",
    "capacity, experts without tokens",
    "capacity, context",
    "capacity and context",
}


@on_ranks()
@pytest.mark.parametrize(("world", "case"), on_their_ranks(CASES, CASES.keys() - DAILY))
def test_exact(mesh: Any, case: Case) -> None:
    exact(mesh, case)


@pytest.mark.nightly
def test_a_triple_of_axes() -> None:
    pool = Pool(8)
    try:
        for capacity in (None, 0.6):
            pool.run(exact, case({"expert": 2, "context": 2, "tensor": 2}, ALL, recomputed=True, capacity=capacity))
    finally:
        pool.stop()


CONFIG = mixtral.Config(**SIZE, max_length=2 * S, **ROUTER)


def by_hand(w: dict[str, Tensor], x: Tensor, most: int) -> tuple[Tensor, list[int]]:
    """The feed-forward network of one row [S, E], a token at a time; how often an expert was chosen, and refused."""
    y = torch.zeros_like(x)
    taken = [0] * CONFIG.experts
    refused = 0
    for token, row in enumerate(x):
        scores = (w[mixtral.GATE] @ row).softmax(-1)
        best, chosen = scores.topk(CONFIG.chosen)
        for score, expert in zip(best / best.sum(), chosen.tolist(), strict=True):
            taken[expert] += 1
            if taken[expert] > most:
                refused += 1
                continue
            gate, up = (w[mixtral.GATE_UP][expert] @ row).chunk(2)
            y[token] += score * (w[mixtral.DOWN][expert] @ (F.silu(gate) * up))
    return y, [refused, *taken]


@pytest.mark.parametrize(("capacity", "most"), [(None, S), (2.0, S), (1.0, 8), (0.3, 3), (1e-9, 1)])
def test_an_expert_takes_the_first_tokens_of_each_row(capacity: float | None, most: int) -> None:
    params = ya.materialize(wide(mixtral.params(CONFIG)), seed=1)
    w = {key: leaf[0] for key, leaf in params.layers.items()}
    x = torch.randn(3, S, CONFIG.embed, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, routing = mixtral.experts(CONFIG, w, x, capacity=capacity)
    for row in range(3):
        want, (refused, *taken) = by_hand(w, x[row], most)
        torch.testing.assert_close(got[row], want, atol=1e-13, rtol=0.0)
        assert routing.counts[row].tolist() == taken
        assert (refused > 0) == (max(taken) > most) == (most < S - 5)


def test_what_the_cases_are_of() -> None:
    """Experts without tokens, and tokens that find no slot, are there."""
    config = config_of(CASES["uneven, experts without tokens"])
    loss = mixtral.loss(config, has_aux=True)
    _, aux = loss(ya.materialize(wide(mixtral.params(config))), batch_of(0, alike=True))
    assert (aux["expert_load"].total[0] == 0).any()
    params = ya.materialize(wide(mixtral.params(CONFIG)))
    limits = (None, 0.5, 0.6, 0.7, 1.0)
    totals = {float(mixtral.loss(CONFIG, capacity=limit)(params, batch_of(0)).total) for limit in limits}
    assert len(totals) == len(limits)


def test_the_z_loss_is_a_mean_over_tokens() -> None:
    params = ya.materialize(wide(mixtral.params(CONFIG)))
    batch = batch_of(0)
    routers: list[Tensor] = []
    layer = mixtral.block(CONFIG)

    def watched(x: Tensor, w: dict[str, Tensor], at: Any) -> Any:
        y, routing = layer(x, w, at)
        routers.append(routing.squares)
        return y, routing

    mean, aux = mixtral.loss(CONFIG, layer=watched, has_aux=True)(params, batch)
    weights = (batch["targets"] != -100).sum(1)
    want = (torch.stack(routers).mean(0) / S * weights).sum()
    assert want > 0
    assert len(routers) == CONFIG.layers
    close(aux["router_z_loss"].total, want, "z")
    without = dataclasses.replace(CONFIG, router_z_coef=0.0)
    close(mean.total - mixtral.loss(without)(params, batch).total, 0.01 * want, "its part of the loss")


@on_ranks(4)
def test_files_of_hugging_face(_: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    mesh = ya.mesh(expert=2, tensor=2, device="cpu")
    state = ya.init(mixtral.params(CONFIG, axes=TENSOR), mesh=mesh, precision=FLOAT64)
    models.hf.save(folder, CONFIG, state.params)
    found, params = models.hf.load(folder, axes=TENSOR)
    again = ya.shard(params, mesh=mesh, precision=FLOAT64)
    assert found == CONFIG
    want = ya.materialize(mixtral.params(CONFIG))
    for whole in (ya.unshard(state.params), ya.unshard(again.params), ya.materialize(models.hf.load(folder)[1])):
        assert optree.tree_all(optree.tree_map(lambda a, b: torch.equal(a.float(), b), whole, want))


@on_ranks(2)
def test_what_cannot_be_is_refused_by_name(_: Any) -> None:
    def refused(made: Axes, run: Axes, text: str, experts: int = 4) -> None:
        config = dataclasses.replace(CONFIG, experts=experts)
        with pytest.raises(ValueError, match=text):
            state = ya.init(mixtral.params(config, axes=made), mesh=ya.mesh(expert=2, device="cpu"))
            ya.value_and_grad(mixtral.loss(config, axes=run))(state.params, batch_of(0))

    refused(EXPERT, Axes(), r"experts: this rank's weights have 2 of 4 .* over 1 ranks of expert")
    refused(Axes(), EXPERT, r"experts: .* have 4 of 4 .* over 2 ranks of expert; .* axes=Axes\(expert=")
    refused(EXPERT, EXPERT, "dimension -3 is split over expert, and 5 elements do not divide by its 2", 5)
    refused(Axes(), EXPERT, r"Config.experts: 5 do not divide among 2 ranks of expert; take fewer", 5)
    for options in ({"capacity": 0.0}, {"capacity": float("inf")}, {"capacity": 1.0, "layer": mixtral.block(CONFIG)}):
        with pytest.raises(ValueError, match="expected a positive number, and no `layer` of your own beside it"):
            mixtral.loss(CONFIG, **options)
    with pytest.raises(ValueError, match="router_z_coef: expected a number of at least 0, got -1"):
        dataclasses.replace(CONFIG, router_z_coef=-1)
