"""torch.compile of blocks with collectives: they run between two graphs, and the numbers are the plain loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from tests.axes.model import mesh_of
from tests.axes.test_exact import FLOAT64, close
from tests.axes.test_llama import SEQUENCE, Case, batch_of, config_of, wide
from tests.axes.test_transforms import drawn, mlp_params, network
from tests.harness.groups import outcome
from tests.harness.pool import on_ranks
from yafsdp_fn.schedules import zero3


def mlp(w: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + ya.psum(network(x, w["up"], w["down"]), "tensor")
    every: Tensor = ya.all_gather(x, "tensor", axis=0, tiled=True) / ya.axis_size("tensor")
    return every.square().sum()


def loss_with(block: Any) -> Any:
    return lambda p, x: ya.apply(block, p["mlp"], x)


def whole_mlp(w: Any, x: Tensor) -> Tensor:
    """What it is of whole weights: two ranks have the same x."""
    for _ in range(2):
        x = x + network(x, w["up"], w["down"])
    return x.square().sum() / 2


@on_ranks(2)
@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "eager", "inductor"])
def test_a_block_with_collectives(_: Any, backend: str) -> None:
    want = ya.value_and_grad(loss_with(whole_mlp))(ya.materialize(mlp_params()), drawn())
    state = ya.init(mlp_params(), mesh=mesh_of(tensor=2), precision=FLOAT64)
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    block = torch.compile(mlp, backend=counted)
    for remat in ("none", "all"):
        both = ya.value_and_grad(loss_with(block), schedule=zero3(remat=remat))
        for _ in range(2):
            value, gradient = both(state.params, drawn())
            close(value, want[0], "value")
            close(gradient, want[1], "gradient")
    assert len(graphs) >= 4, "one before each collective, and one behind the last"


@on_ranks(2)
def test_one_graph_is_refused_by_torch(_: Any) -> None:
    state = ya.init(mlp_params(), mesh=mesh_of(tensor=2), precision=FLOAT64)
    both = ya.value_and_grad(loss_with(torch.compile(mlp, backend="eager", fullgraph=True)))
    error = outcome(lambda: both(state.params, drawn()))
    assert "torch.compiler.disable()`d function" in error and "psum" in error, error


@on_ranks(2)
@pytest.mark.nightly
def test_layers_of_llama(_: Any) -> None:
    config = config_of(Case({}, SEQUENCE))
    mesh = mesh_of(tensor=2)
    state = ya.init(wide(llama.params(config, axes=SEQUENCE)), mesh=mesh, precision=FLOAT64)
    layer = torch.compile(llama.over(SEQUENCE).block(config), backend="aot_eager")
    found = [
        ya.value_and_grad(llama.loss(config, axes=SEQUENCE, layer=each))(state.params, batch_of(0))
        for each in (None, layer)
    ]
    close(found[1][0], found[0][0], "loss")
    close(found[1][1], found[0][1], "gradient")
