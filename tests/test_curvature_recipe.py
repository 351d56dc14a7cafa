"""docs/recipes/curvature.py and influence.py are right, at one, two and four ranks, against dense matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import optree
import pytest
import torch
import torch.func as tf
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import on
from tests.harness.pool import Pools
from tests.harness.recipes import recipe
from tests.harness.small import Model, batch, block, embed, model

DAMPING = 1.5
TX = ya.optim.sgd(0.1)


def logits(params: Model, batch: Any) -> Tensor:
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(block, x, params.layers)
    return ya.apply(lambda w, x: (x * w["norm"]) @ w["weight"].T, params.head, x)


def loss_of_logits(logits: Tensor, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def loss(params: Model, batch: Any) -> Tensor:
    return loss_of_logits(logits(params, batch), batch)


def sharded(mesh: Any) -> list[Tensor]:
    params = ya.init(model(2), TX, mesh=mesh, precision=ya.Precision(torch.float64)).params
    own, test = (ya.shard_batch(batch(seed), mesh) for seed in (0, 1))
    hessian = partial(recipe("curvature").hessian, loss, params, own)
    gauss_newton = partial(recipe("curvature").gauss_newton, logits, loss_of_logits, params, own)
    v = ya.normal_like(3, params)
    top = recipe("curvature").top_eigenvalues(gauss_newton, v, 2, products=30)
    s = recipe("influence").solve(gauss_newton, ya.grad(loss)(params, test), DAMPING, products=20)
    rises = recipe("influence").influences(loss, params, own, s)
    every = [torch.empty_like(rises) for _ in range(mesh.size())]
    torch.distributed.all_gather(every, rises)
    of_rows = torch.cat(every).unflatten(0, (-1, len(rises))).unique(dim=0).flatten()
    return [vector(v), vector(hessian(v)), vector(gauss_newton(v)), top, vector(s), of_rows]


def vector(tree: Any) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in optree.tree_leaves(ya.unshard(tree))])


def dense(v: Tensor) -> list[Tensor]:
    """The same of one vector of all parameters; rows' influences in the order of their values."""
    leaves, spec = optree.tree_flatten(optree.tree_map(Tensor.double, ya.materialize(model(2))))
    at = torch.cat([leaf.flatten() for leaf in leaves])

    def tree(flat: Tensor) -> Any:
        parts = flat.split([leaf.numel() for leaf in leaves])
        return optree.tree_unflatten(spec, [p.view(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)])

    own, test = batch(0), batch(1)
    hessian = tf.hessian(lambda p: loss(tree(p), own))(at)
    z, jacobian = logits(tree(at), own), tf.jacrev(lambda p: logits(tree(p), own).flatten())(at)
    inner = tf.hessian(lambda flat: loss_of_logits(flat.view_as(z), own))(z.flatten())
    gauss_newton = jacobian.T @ inner @ jacobian
    slope = tf.grad(lambda p: loss(tree(p), test))(at)
    s = torch.linalg.solve(gauss_newton + DAMPING * torch.eye(len(at)).double(), slope)
    rows = [{key: value[i : i + 1] for key, value in own.items()} for i in range(len(own["tokens"]))]
    rises = torch.stack([-tf.grad(lambda p, row=row: loss(tree(p), row))(at) @ s for row in rows])
    top = torch.linalg.eigvalsh(gauss_newton).flip(0)[:2]
    return [v, hessian @ v, gauss_newton @ v, top, s, rises]


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "axes"), [(1, "shard"), (2, "shard"), (4, "replicate")])
def test_it_is_exact(pools: Pools, world: int, axes: str) -> None:
    for found in pools[world].run(on, axes, sharded):
        for name, got, expected in zip(
            ("v", "hessian", "gauss_newton", "top", "solve", "influences"), found, dense(found[0]), strict=True
        ):
            if name == "influences":
                got = got.sort().values
                expected = expected.sort().values
            assert float((got - expected).norm() / expected.norm()) < 1e-9, name
