"""The peers' module is the functional model: the same loss and gradients to the bit, the same names."""

from __future__ import annotations

from typing import Any

import optree
import torch

from benchmarks.contenders import Llama, make_batches, materialize
from benchmarks.shapes import SHAPES
from models.llama import model as llama

CPU = torch.device("cpu")


def test_the_module_is_the_functional_model() -> None:
    shape = SHAPES["tiny"]
    config = shape.llama()
    params = materialize(config, seed=3, device=CPU)
    (batch,) = make_batches(shape, 1, seed=0, rank=0, device=CPU)
    module = Llama(config, params)
    loss = module(batch["tokens"], batch["targets"])
    loss.backward()

    leaves: Any = optree.tree_map(lambda t: t.requires_grad_(), params)
    mean = llama.loss(config)(leaves, batch)
    expected = mean.total / mean.weight
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(module.embed.weight.grad, leaves.embed["weight"].grad)
    for l, layer in enumerate(module.layers):
        assert sorted(name for name, _ in layer.named_parameters()) == sorted(leaves.layers)
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, leaves.layers[name].grad[l]), f"layer {l}, {name}"


def test_batches_differ_between_ranks_and_steps_and_not_between_calls() -> None:
    def tokens(rank: int) -> list[torch.Tensor]:
        return [b["tokens"] for b in make_batches(SHAPES["tiny"], 2, seed=0, rank=rank, device=CPU)]

    assert all(torch.equal(a, b) for a, b in zip(tokens(0), tokens(0), strict=True))
    assert not torch.equal(tokens(0)[0], tokens(1)[0])
    assert not torch.equal(tokens(0)[0], tokens(0)[1])
