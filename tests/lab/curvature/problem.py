"""A small classifier of tokens in float64, with uneven weights, and all that is to be known of it as dense matrices.

Four examples of three targets, some of which do not count: the same four at every number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch
import torch.func as tf
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import on
from tests.harness.pool import Pool
from tests.harness.small import E, Model, V, block, embed, model

Tree = Any
TX = ya.optim.sgd(0.1)
DOUBLE = ya.Precision(torch.float64)
ROWS, IGNORED = 4, -1
DAMPING = 1.5
"""Of Gauss-Newton products, whose largest eigenvalue is 1.4: a dozen steps solve to all digits."""
BOUND = 1e-10
"""Of results in float64, against dense matrices."""

WORLDS = [(1, "shard"), (2, "shard"), (4, "shard"), (4, "replicate")]
"""Ranks, and the name of their mesh: the last one is 2 x 2, with replicas."""


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, V, (2, ROWS, 3), generator=generator)
    dropped = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 1], [0, 0, 1]]).bool()
    return {"tokens": tokens, "targets": targets.masked_fill(dropped, IGNORED)}


def logits(params: Model, batch: Any) -> Tensor:
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(block, x, params.layers)
    out: Tensor = ya.apply(lambda w, x: (x * w["norm"]) @ w["weight"].T, params.head, x)
    return out


def loss_of_logits(logits: Tensor, batch: Any) -> ya.Mean:
    targets = batch["targets"].flatten()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    return ya.Mean(total, (targets != IGNORED).sum())


def loss(params: Model, batch: Any) -> ya.Mean:
    return loss_of_logits(logits(params, batch), batch)


def abstract(frozen: bool) -> Model:
    """frozen: the embedding, which is the first V * E parameters"""
    given = model(2)
    return given._replace(embed=ya.frozen(given.embed)) if frozen else given


class Here(NamedTuple):
    """The model on this rank, and this rank's part of the batches."""

    params: Any
    batch: Any
    test: Any


def here(mesh: Any, frozen: bool = False) -> Here:
    state = ya.init(abstract(frozen), TX, mesh=mesh, precision=DOUBLE)
    return Here(state.params, ya.shard_batch(batch(), mesh), ya.shard_batch(batch(1), mesh))


class Dense:
    """The same on one process, of a vector of all parameters [n].

    trained: 0 where they are frozen, else 1
    """

    def __init__(self, frozen: bool = False) -> None:
        state = ya.PlainState.create(abstract(frozen), TX, seed=0)
        self.marked = optree.tree_map(Tensor.double, state.params)
        leaves, self._spec = optree.tree_flatten(ya.params.without_markers(self.marked))
        self._shapes = [leaf.shape for leaf in leaves]
        self.params = torch.cat([leaf.flatten() for leaf in leaves])
        self.trained = torch.ones_like(self.params)
        self.trained[: V * E * frozen] = 0

    def tree(self, vector: Tensor) -> Any:
        parts = vector.split([shape.numel() for shape in self._shapes])
        return optree.tree_unflatten(self._spec, [p.view(s) for p, s in zip(parts, self._shapes, strict=True)])

    @staticmethod
    def vector(tree: Tree) -> Tensor:
        return torch.cat([leaf.flatten() for leaf in optree.tree_leaves(ya.params.without_markers(tree))])

    def objective(self, vector: Tensor, batch: Any) -> Tensor:
        total, weight = loss(self.tree(vector), batch)
        return total / weight

    @cached_property
    def hessian(self) -> Tensor:
        return self.of_trained(tf.hessian(self.objective)(self.params, batch()))

    @cached_property
    def gauss_newton(self) -> Tensor:
        whole, z = batch(), logits(self.tree(self.params), batch())

        def mean(flat: Tensor) -> Tensor:
            total, weight = loss_of_logits(flat.view_as(z), whole)
            return total / weight

        jacobian = tf.jacrev(lambda p: logits(self.tree(p), whole).flatten())(self.params)
        return self.of_trained(jacobian.T @ tf.hessian(mean)(z.flatten()) @ jacobian)

    @cached_property
    def examples(self) -> Tensor:
        """Gradients of the examples' shares of the objective [ROWS, n], whose mean is the gradient."""
        rows = [{key: value[i : i + 1] for key, value in batch().items()} for i in range(ROWS)]
        weight = float(loss(self.tree(self.params), batch()).weight) / ROWS
        grads = [tf.grad(lambda p, row=row: loss(self.tree(p), row).total)(self.params) for row in rows]
        return torch.stack(grads) / weight * self.trained

    def gradient(self, batch: Any) -> Tensor:
        return tf.grad(self.objective)(self.params, batch) * self.trained

    def of_trained(self, matrix: Tensor) -> Tensor:
        return matrix * self.trained * self.trained[:, None]

    def direction(self, seed: int) -> Tensor:
        """`directions(seed, params)`."""
        return self.vector(ya.normal_like(seed, self.marked)) * self.trained


def vector(tree: Tree) -> Tensor:
    """[n], whole, on every rank."""
    return Dense.vector(ya.unshard(tree))


def off(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    assert got.shape == expected.shape and got.dtype == expected.dtype == torch.float64
    return float((got - expected).norm() / expected.norm())


def everywhere(pools: dict[int, Pool], function: Callable[..., Any], frozen: bool = False) -> dict[str, list[Any]]:
    """What `function(mesh, frozen)` returns on the ranks of each mesh of WORLDS; where something is frozen, of two."""
    places = [(2, "shard")] if frozen else WORLDS
    return {f"{axes} at {world}": pools[world].run(on, axes, function, frozen) for world, axes in places}
