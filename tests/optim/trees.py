"""Small trees, and the step as it is defined: the oracle of `step_`."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.gpu import ON_GPU
from tests.harness.oracle import plain
from yafsdp_fn import optim

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


class Layer(NamedTuple):
    weight: Tensor
    norm: Tensor


class Model(NamedTuple):
    """A stack of layers [L, ...], a vector, and a leaf that is absent."""

    layers: Layer
    bias: Tensor
    frozen: None = None


def model(seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return Model(Layer(leaf(3, 5, 7), leaf(3, 7)), leaf(13))


def plain_state(abstract: Any, tx: Any) -> ya.PlainState:
    """The plain state in float64 with the values of `ya.init(abstract)`."""
    return ya.PlainState.create(optree.tree_map(Tensor.double, plain(abstract)), tx)


def matrices(path: str, param: Any) -> bool:
    return path == "layers.weight"


def clone(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def bits(tree: Any) -> list[bytes]:
    return [leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for leaf in flat(tree)]


def flat(tree: Any) -> list[Tensor]:
    return [leaf.reshape(-1) for leaf in optree.tree_leaves(tree)]


def defined_step(tx: Any, params: Any, grads: Any, state: Any, scale: float = 1.0) -> tuple[Any, Any]:
    """New parameters and state, by `update` alone."""
    updates, state = tx.update(optree.tree_map(lambda g: g / scale, grads), state, params)
    return optim.apply_updates(params, updates), state


def assert_close(actual: Any, expected: Any, rtol: float) -> None:
    assert optree.tree_structure(actual) == optree.tree_structure(expected)
    for a, e in zip(optree.tree_leaves(actual), optree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol)
