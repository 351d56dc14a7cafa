"""torch.func on axes inside blocks, by ya.functional_loss: derivatives by example, inside blocks and of chunks. Those
of models, to the second order, are in test_models_derivatives.py."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp

import yafsdp_fn as ya
from tests.axes.model import Options, batch_of, loss_of, mesh_of, params
from tests.axes.test_exact import FLOAT64, close
from tests.harness import oracle
from tests.harness.pool import on_ranks
from yafsdp_fn import optim
from yafsdp_fn.schedules import zero3

OF = Options(sequence_parallel=True)
WITHOUT = ya.params.without_markers


# ---- by example


def row_of(step: int, row: int) -> Any:
    return {key: rows[row : row + 1] for key, rows in batch_of(step).items()}


@on_ranks(2)
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 2}])
def test_derivatives_by_example(_: Any, axes: dict[str, int]) -> None:
    """Gradients of each row, and their products with a direction, by vmap over rows; collectives are of all at once."""
    mesh = mesh_of(**axes)
    state = ya.init(params(OF), mesh=mesh, precision=FLOAT64)
    marked = oracle.plain(params(OF))
    rows = {key: leaf[:, None] for key, leaf in batch_of(0).items()}
    own = ya.shard_batch(rows, mesh, split={"context": 2})
    direction = ya.normal_like(5, state.params)
    f = ya.functional_loss(loss_of(OF))

    def slopes(p: Any, row: Any) -> Any:
        return jvp(lambda p: f(p, row), (p,), (direction,))[1]

    each = torch.vmap(grad(f), (None, 0))(state.params, own)
    along = torch.vmap(slopes, (None, 0))(state.params, own)
    u = WITHOUT(ya.normal_like(5, marked))
    for row in range(len(own["tokens"])):
        want = grad(f)(WITHOUT(marked), row_of(0, row))
        got = optree.tree_map(lambda leaf, row=row: leaf[row], each)
        close(got, want, f"gradient of row {row}")
        close(along[row], ya.vdot(want, u), f"slope of row {row}")


# ---- a step whose loss has a derivative inside


def drawn() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def network(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, up)), down)


def penalised(p: Any, x: Tensor) -> Tensor:
    """A loss with the square of a gradient: of the input, by torch.func, through a psum. A derivative in a block is of
    the sum over ranks, which all have the value, and with respect to this rank's own copy of x: docs/axes.md."""

    def mlp(w: Any, x: Tensor) -> Tensor:
        value = ya.psum(network(x, w["up"], w["down"]), "tensor")
        slope = grad(lambda x: ya.psum(torch.tanh(F.linear(x, w["up"])).sum(), "tensor"))(x)
        slope = ya.psum(slope, "tensor") / ya.axis_size("tensor")
        return value.square().mean() + slope.square().mean()

    return ya.apply(mlp, p["mlp"], x)


def mlp_params() -> Any:
    of: dict[str, Any] = {"dtype": torch.float64, "init": ya.params.initializers.normal(0.5)}
    up, down = (ya.Param(shape, split={"tensor": dim}, **of) for shape, dim in (((8, 4), -2), ((4, 8), -1)))
    return {"mlp": {"up": up, "down": down}}


def chunked(p: Any, x: Tensor) -> Tensor:
    """A part of a block runs again in the backward, in autograd's thread on a GPU, and its collective with it."""

    def mlp(w: Any, x: Tensor) -> Tensor:
        def whole(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
            return ya.psum(network(x, up, down), "tensor")

        out: Tensor = ya.chunk(whole, 2, in_axes=(0, None, None))(x, w["up"], w["down"])
        return out.square().mean()

    return ya.apply(mlp, p["mlp"], x)


@on_ranks(2)
def test_chunks_with_collectives(_: Any) -> None:
    x = drawn()
    state = ya.init(mlp_params(), mesh=mesh_of(tensor=2), precision=FLOAT64)
    want = ya.grad(chunked)(ya.PlainState.create(mlp_params(), optim.sgd(0.1)).params, x)
    for schedule in (zero3(), zero3(remat="all")):
        close(ya.grad(chunked, schedule=schedule)(state.params, x), want, "gradient")
    close(grad(ya.functional_loss(chunked))(state.params, x), want, "gradient by torch.func")


@on_ranks(2)
def test_a_derivative_inside_of_a_block(_: Any) -> None:
    """All units are split over all ranks: slots are the shards. One step of gradient descent."""
    x = drawn()
    want = ya.PlainState.create(mlp_params(), optim.sgd(0.1))
    state = ya.init(mlp_params(), optim.sgd(0.1), mesh=mesh_of(tensor=2), precision=FLOAT64)
    assert state.memory.weights_alias == {unit.id for unit in state.memory.units}
    step = ya.train_step(penalised, optim.sgd(0.1))
    for _ in range(3):
        want = step(want, x)[0]
        state = step(state, x)[0]
        close(state, want.params, "parameters")
