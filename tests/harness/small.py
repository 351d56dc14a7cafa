"""A small model for unit tests on one rank: an embedding, a stack and a head, of sizes that nothing divides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya

V, E, F, L = 11, 5, 7, 3
B = 4
S = 3


Loss = Callable[["Model", Any], ya.Mean]


class Model(NamedTuple):
    embed: Any
    layers: Any
    head: Any


@functools.cache
def one_rank() -> DeviceMesh:
    """The mesh of this process alone."""
    return ya.mesh(device="cpu")


def param(*shape: int, std: float = 0.5) -> ya.Param:
    return ya.Param(shape, init=ya.params.initializers.normal(std))


def model(count: int = L) -> Model:
    return Model(
        embed={"weight": param(V, E)},
        layers=ya.Stacked({"up": param(count, F, E), "bias": param(count, F), "down": param(count, E, F)}),
        head={"norm": param(E), "weight": param(V, E)},
    )


def embed(weights: Any, tokens: Tensor) -> Tensor:
    return torch.nn.functional.embedding(tokens, weights["weight"])


def block(x: Tensor, weights: Any) -> tuple[Tensor, None]:
    hidden = torch.tanh(torch.nn.functional.linear(x, weights["up"], weights["bias"]))
    return x + torch.nn.functional.linear(hidden, weights["down"]), None


def dropout_block(x: Tensor, weights: Any) -> tuple[Tensor, None]:
    return torch.nn.functional.dropout(block(x, weights)[0], 0.3), None


def head(weights: Any, x: Tensor, targets: Tensor) -> ya.Mean:
    logits = torch.nn.functional.linear(x * weights["norm"], weights["weight"])
    total = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return ya.Mean(total, targets.numel())


def with_ends(middle: Callable[[Model, Tensor], Any]) -> Loss:
    """The loss of the model with `middle(params, x)` between the embedding and the head."""

    def run(params: Model, batch: Any) -> ya.Mean:
        x = middle(params, ya.apply(embed, params.embed, batch["tokens"]))
        return ya.apply(head, params.head, x, batch["targets"])

    return run


def with_block(block: Callable[..., Any], **scan: Any) -> Loss:
    """The loss of the model whose layers are `block`; scan: options of `ya.scan`."""
    return with_ends(lambda params, x: ya.scan(block, x, params.layers, **scan)[0])


loss = with_block(block)


def states(tree: Any = None, seed: int = 0) -> tuple[Any, Any]:
    """The same parameters, sharded and plain; those of the model, if no tree is given."""
    state = ya.init(model() if tree is None else tree, ya.optim.adamw(1e-2), mesh=one_rank(), seed=seed)
    return state.params, ya.unshard(state)


def batch(seed: int = 0, rows: int = B) -> dict[str, Tensor]:
    tokens = torch.randint(0, V, (rows, S), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "targets": tokens.roll(1, 1)}


def batches(mesh: Any, steps: int) -> Iterator[tuple[Any, Any]]:
    """The batch of this rank, and that of all ranks as one, for each of some steps."""
    rank = mesh.get_rank()
    ranks = mesh.size()
    for number in range(steps):
        each = [batch(ranks * number + r) for r in range(ranks)]
        yield each[rank], {key: torch.cat([own[key] for own in each]) for key in each[0]}


def leaves(tree: Any) -> list[Tensor]:
    """Whole tensors of any tree, sharded ones unsharded."""
    return [leaf for leaf in optree.tree_leaves(ya.unshard(tree)) if isinstance(leaf, Tensor)]


def assert_equal(a: Any, b: Any) -> None:
    """Bit-equal trees (handles are unsharded)."""
    first = leaves(a)
    second = leaves(b)
    assert len(first) == len(second) > 0
    for x, y in zip(first, second, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), f"{x}\n{y}"


def assert_close(a: Any, b: Any, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    first = leaves(a)
    second = leaves(b)
    assert len(first) == len(second) > 0
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


def total(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def slot_bytes(slots: Any) -> int:
    """The bytes that a slot set has allocated for weights, gradients and secondary shards."""
    buffers = *slots._weights.values(), *slots._grads.values(), *slots._secondary.values()
    return sum(buffer.numel() for buffer in buffers)
