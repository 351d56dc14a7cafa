"""Batches that were dealt otherwise than a model takes them are told, and so are axes of the mesh that nothing uses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import yafsdp_fn as ya
from models import llama
from tests.axes.model import mesh_of
from tests.axes.test_exact import close
from tests.axes.test_llama import CONTEXT, SEQUENCE, TENSOR, Case, batch_of, config_of
from tests.harness.pool import on_ranks
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.util.randomness import acting_over


def batches(_: Any) -> None:
    config = config_of(Case({}, CONTEXT))
    every = batch_of(0)
    for axes, name in ((CONTEXT, "context"), (TENSOR, "tensor"), (SEQUENCE, "tensor")):
        mesh = mesh_of(**{name: 2})
        state = ya.init(llama.params(config, **axes.options), mesh=mesh)
        loss = llama.loss(config, axes=axes)

        def run(batch: Any, state: Any = state, loss: Any = loss) -> Any:
            return ya.value_and_grad(loss)(state.params, batch)[0]

        wrong = {
            "context": {
                "not at all": (every, ValueError, r"the batch has no `places`"),
                "one after the other": (
                    ya.shard_batch(every, mesh, split={"context": 1}),
                    ValueError,
                    r"the batch has no `places`",
                ),
                "the same for all": (
                    {**every, "places": torch.arange(16).expand(4, 16)},
                    RuntimeError,
                    r"places in the batch are not those",
                ),
            },
            "tensor": {
                "by rank": (
                    {key: rows[2 * mesh.get_rank() :][:2] for key, rows in every.items()},
                    RuntimeError,
                    "other targets",
                ),
            },
        }[name]
        for what, (batch, kind, text) in wrong.items():
            with pytest.raises(kind, match=text) as error:
                run(batch)
            assert "split it with axes.shard_batch(batch, mesh)" in str(error.value), what
        value = run(axes.shard_batch(every, mesh))
        plain = ya.value_and_grad(llama.loss(config))(ya.init(llama.params(config), mesh=mesh).params, every)[0]
        close(value, plain, name, 1e-5)


def shapes(_: Any) -> None:
    """A plan has fake tokens, and no places."""
    with acting_over(communicators(mesh_of(context=2))):
        with FakeTensorMode():
            CONTEXT.must_be_dealt({"tokens": torch.empty(4, 8, dtype=torch.int64)})
        with pytest.raises(ValueError, match="the batch has no `places`"):
            CONTEXT.must_be_dealt({"tokens": torch.zeros(4, 8, dtype=torch.int64)})


@on_ranks(2)
def test_a_batch_that_was_dealt_otherwise(mesh: Any) -> None:
    batches(mesh)
    shapes(mesh)


# ---- axes that nothing uses


def weights(split: bool) -> Any:
    of: Any = {"split": {"tensor": -1}} if split else {}
    return {"a": {"w": ya.Param((4,), torch.float64, ya.params.initializers.normal(1), **of)}}


def summed(p: Any, x: Tensor) -> Tensor:
    return ya.apply(lambda w: (x * w["w"].square().sum()).mean(), p["a"])


def psummed(p: Any, x: Tensor) -> Tensor:
    return ya.apply(lambda w: (x * ya.psum(w["w"].square().sum(), "tensor")).mean(), p["a"])


def normed(p: Any, x: Tensor) -> Tensor:
    """Without a visit: norms count every element once."""
    return (x * ya.vdot(p, p)).mean()


def indexed(p: Any, x: Tensor) -> Tensor:
    """Each rank of `tensor` takes rows of its own."""
    return summed(p, x.chunk(ya.axis_size("tensor"))[ya.axis_index("tensor")])


@on_ranks(2)
def test_an_axis_that_nothing_uses(_: Any) -> None:
    mesh = mesh_of(tensor=2)
    x = torch.arange(4.0, dtype=torch.float64)
    own = x.chunk(2)[mesh.get_rank()]
    same = "the ranks of tensor all do the same: their batches are equal"
    parts = "leaves are split over tensor, and"
    for loss, split, batch, text in (
        (summed, False, x, same),
        (summed, False, own, ""),  # as over shard
        (summed, True, x, parts),
        (psummed, True, x, ""),
        (indexed, False, x, ""),
        (normed, True, own, ""),
    ):
        state = ya.init(weights(split), mesh=mesh, precision=ya.Precision(torch.float64))
        both = ya.value_and_grad(loss)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            value, grads = both(state.params, batch)
            both(state.params, batch)  # not again
        said = [str(each.message) for each in told if "tensor" in str(each.message)]
        assert [text in each for each in said] == [True] * bool(text), (loss, said)
        if text != parts:
            want, slopes = ya.value_and_grad(psummed)(ya.materialize(weights(False)), x)
            close(value, want, "value")
            close(grads, slopes, "gradient")


def mixed(_: Any, ranks: int, apart: str) -> list[str]:
    """Warnings of first steps in which ranks of `tensor` compute their parts of a layer on a batch each."""
    mesh = ya.mesh(device="cpu", tensor=ranks)  # it remembers how batches were dealt
    x = torch.arange(4.0 * ranks, dtype=torch.float64).view(1, -1)
    if apart == "dealt":
        x = ya.shard_batch(x, mesh, split={"tensor": 1})
    elif apart == "own":
        x = x + mesh.get_rank()
    state = ya.init({"a": {"w": ya.Param((ranks,), split={"tensor": -1})}}, ya.optim.sgd(0.1), mesh=mesh)

    def loss(p: Any, x: Tensor) -> Tensor:
        return ya.apply(lambda w, x: ya.psum(w["w"].sum() * x.sum(), "tensor"), p["a"], x)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            ya.train_step(loss, ya.optim.sgd(0.1), donate=False)(state, x)
        ya.eval_step(loss)(state, x)
    return [str(each.message) for each in told if "tensor" in str(each.message)]


@on_ranks(2, 4)
def test_ranks_of_tensor_with_batches_of_their_own(mesh: Any) -> None:
    ranks = mesh.size()
    assert mixed(mesh, ranks, "") == []
    said = mixed(mesh, ranks, "own")
    assert len(said) == 3
    assert all(s.startswith("ranks of tensor have other batches, and leaves are") for s in said)


@on_ranks(2)
def test_what_is_cut_along_tensor_is_dealt_so(mesh: Any) -> None:
    assert mixed(mesh, 2, "dealt") == []
