"""Features: switched where they say, gone afterwards, and the same loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import yafsdp_fn as ya
from benchmarks import names
from benchmarks.contenders import Llama, adamw, loss_of, make_batches, materialize, switched_off
from benchmarks.shapes import SHAPES
from models.llama import model as llama
from yafsdp_fn.communication.gloo import GlooGroup
from yafsdp_fn.optim.base import stages
from yafsdp_fn.optim.step.kernels import recognise

CPU = torch.device("cpu")
SHAPE = SHAPES["tiny"]


def small() -> tuple[Any, Any]:
    """Parameters, and a batch."""
    (batch,) = make_batches(SHAPE, 1, seed=0, rank=0, device=CPU)
    return materialize(SHAPE.llama(), seed=0, device=CPU), batch


def test_what_is_switched_off_is_on_again_afterwards() -> None:
    before = (ya.linear, ya.embedding, vars(GlooGroup).copy())
    with switched_off(frozenset({"nolinear", "noexchange"})):
        assert ya.linear == F.linear
        assert ya.embedding == F.embedding
        assert vars(GlooGroup) != before[2]
    assert (ya.linear, ya.embedding, vars(GlooGroup)) == before
    with switched_off(frozenset()):
        assert (ya.linear, ya.embedding, vars(GlooGroup)) == before


def test_one_compiled_block_serves_all_layers_of_ours_and_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    calls: list[Any] = []

    def fake(block: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        made.append(block)
        return lambda *args: (calls.append(block), block(*args))[1]

    monkeypatch.setattr(torch, "compile", fake)
    params, batch = small()
    plain = llama.loss(SHAPE.llama())(params, batch)
    assert calls == []
    for unroll in ("", "-unroll3"):
        loss = loss_of(names.read(f"zero3-compile{unroll}"), SHAPE)
        found = loss(params, batch)
        assert torch.equal(found.total, plain.total)
        assert len(made) == 1
        assert calls == made * SHAPE.layers
        made.clear(), calls.clear()
    module = Llama(SHAPE.llama(), params, fake(llama.block(SHAPE.llama()), dynamic=False))
    assert torch.equal(module(batch["tokens"], batch["targets"]), plain.total / plain.weight)
    assert len(made) == 1
    assert calls == made * SHAPE.layers


def test_unrolled_layers_are_one_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    scan = ya.scan
    monkeypatch.setattr(ya, "scan", lambda *args, **kwargs: (seen.append(kwargs["unroll"]), scan(*args, **kwargs))[1])
    params, batch = small()
    losses = [loss_of(names.read(name), SHAPE)(params, batch).total for name in ("zero3", "zero3-unroll3")]
    assert seen == [1, 3]
    assert torch.equal(*losses)


@pytest.mark.parametrize("fused", [True, False])
def test_the_optimizer_has_a_kernel_or_has_not(fused: bool) -> None:
    tx = adamw(fused=fused)
    state = tx.init({"w": torch.zeros(8)})
    assert (recognise(list(stages(tx, state))) is not None) == fused
