"""A gradient means the same at every number of ranks, with replicas too: what a plain tree gives on the whole batch.

Each rank differentiates the mean over its own rows, and the objective is the mean over ranks; parts are equal but where
a loss is weighted (`ya.functional_loss`). All in float64. test_transforms_table.py has what each transform gives; here
are weights, plain arguments beside sharded ones, and examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.func as tf
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.meshes import made
from tests.harness.oracle import compare
from tests.harness.pool import on_ranks
from tests.harness.problems import Batch, block, embed, head
from tests.test_transforms_table import BOUND, EVERY, Loss, Setting, axpy, loss_of, mean_of, of_a_loss

sum_over_ranks = ya.params.sum_over_ranks
Tree = Any
WORLDS = [
    (1, "shard"),
    (2, "shard"),
    (2, "copies"),
    nightly(3, "shard"),
    nightly(4, "shard"),
    nightly(4, "replicate"),
    (4, "replicate-nodes"),
]
mean = mean_of("base")
loss = loss_of("base")


def rows_of(batch: Batch) -> Batch:
    """Batches of a row each."""
    return {key: value.unsqueeze(1) for key, value in batch.items()}


@on_ranks(1, 2)
def test_rows_with_dropout(mesh: Any) -> None:
    """Each row draws numbers of its own; that none may be drawn is in the table."""
    s = Setting(mesh, "dropout")
    rows = rows_of(s.batches[mesh.get_rank()])
    found = []
    for params in (s.sharded[0], s.plain[0]):
        torch.manual_seed(0)
        found.append(tf.vmap(loss_of("dropout"), in_dims=(None, 0), randomness="different")(params, rows))
    compare(*found, BOUND, "dropout: vmap")


@on_ranks()
@pytest.mark.parametrize(("world", "axes"), WORLDS)
def test_weighted_losses(mesh: Any, axes: str) -> None:
    """Losses of uneven weights, by `ya.functional_loss`, and ya.grad's gradient: the plain tree's on all rows."""
    of_a_loss(made(axes), ["base"], ["value", "grad", "jvp", "jvp of grad"], "uneven")
    s = Setting(made(axes), "base", "uneven")
    (p, u, _), batch = s.sharded, s.batches[mesh.get_rank()]
    gradient, value = tf.grad_and_value(s.mean)(s.plain[0])
    compare(ya.value_and_grad(mean)(p, batch), (value, gradient), BOUND, "ya.grad, and its value")
    composed = ya.grad(lambda p: ya.vdot(ya.grad(mean)(p, batch), u))(p)
    compare(composed, EVERY["grad of grad"](s.mean, *s.plain), BOUND, "by ya.grad of ya.grad")


@on_ranks()
@pytest.mark.parametrize(("world", "axes"), WORLDS)
def test_plain_arguments_and_examples(mesh: Any, axes: str) -> None:
    """A gradient of what is no shard: of ya.grad a rank's part of the mean, inside another derivative too."""
    s = Setting(made(axes), "base")
    p, plain, ranks, scale = s.sharded[0], s.plain[0], mesh.size(), torch.tensor(1.5).double()

    def scaled(scale: Tensor, params: Tree) -> Tensor:
        return s.loss(params) * scale.square()

    compare(ya.grad(scaled)(scale, p), 3.0 * s.own(plain) / ranks, BOUND, "ya.grad")
    inner = ya.grad(lambda p: ya.grad(scaled)(scale, p))(p)
    compare(inner, tf.grad(lambda p: 3.0 * s.mean(p) / ranks)(plain), BOUND, "ya.grad of it")
    compare(tf.grad(scaled)(scale, p), 3.0 * s.own(plain), BOUND, "torch.func.grad")
    rows = rows_of(s.batches[mesh.get_rank()])
    each = tf.vmap(tf.grad(loss), in_dims=(None, 0))
    what = "a whole tree: each rank's own examples, nothing else"
    compare(each(ya.unshard(p), rows), each(plain, rows), BOUND, what)


def adapted(loss: Loss, inner: Any, path: str) -> Callable[[Tensor, Tree], Tensor]:
    """One step by a learned rate, then the loss: the rate meets shards, or a rank's value, or both."""

    def value(rate: Tensor, params: Tree) -> Tensor:
        far = 0.3 if path == "loss" else ya.params.to_shards(rate, params)
        new = loss(axpy(-far, inner(loss)(params), params))
        return new if path == "shards" else new * rate.square()

    return value


@on_ranks()
@pytest.mark.parametrize(
    ("world", "axes"),
    [(1, "shard"), (2, "shard"), nightly(2, "copies"), nightly(4, "replicate")],
)
def test_arguments_that_ranks_share(mesh: Any, axes: str) -> None:
    """The derivative by a plain argument that all ranks share, on each of them: parts of ya.grad are added up, and what
    torch.func gives on each rank is averaged."""
    rate = torch.tensor(0.3).double()
    for kind, path in itertools.product(("uneven", ""), ("shards", "loss", "both")):
        s = Setting(made(axes), "base", kind)
        inner = ya.grad if kind else tf.grad
        of, on_plain = adapted(s.loss, inner, path), adapted(s.mean, tf.grad, path)
        expected = tf.grad(on_plain)(rate, s.plain[0])
        p = s.sharded[0]
        for outer, by in ((ya.grad, 1), (tf.grad, mesh.size())):
            got = sum_over_ranks(outer(of)(rate, p), p) / by
            compare(got, expected, BOUND, f"{kind}, by {path}: {outer.__module__}")
    expected = tf.grad(lambda p: tf.grad(on_plain)(rate, p).square())(s.plain[0])
    for outer in (tf.grad, ya.grad):
        got = outer(lambda p: sum_over_ranks(ya.grad(of)(rate, p), p).square())(p)
        compare(got, expected, BOUND, f"{outer.__module__} of the square of ya.grad")
    with pytest.raises(TypeError, match="sum_over_ranks: 'embed' is sharded"):
        sum_over_ranks(p, p)
    assert sum_over_ranks(rate, s.plain[0]) is rate


PLAIN_ARGUMENTS = {
    "jacfwd": tf.jacfwd,
    "hessian": tf.hessian,
    "jacfwd of jacfwd": lambda f: tf.jacfwd(tf.jacfwd(f)),
    "jacrev of jacfwd": lambda f: tf.jacrev(tf.jacfwd(f)),
}


@on_ranks()
@pytest.mark.parametrize(
    ("world", "axes"),
    [
        (1, "shard"),
        nightly(2, "shard"),
        (3, "shard"),
        nightly(4, "replicate"),
    ],
)
def test_by_plain_arguments(mesh: Any, axes: str) -> None:
    """Derivatives by what no shard is: in blocks and in code beside them."""
    s = Setting(made(axes), "base")
    both, batch = (s.sharded[:2], s.plain[:2]), s.batches[mesh.get_rank()]
    (p, u), (plain, _) = both
    x = torch.rand(3, generator=torch.Generator().manual_seed(1)).double()

    def scaled(params: Tree, batch: Batch, x: Tensor) -> Tensor:
        h = ya.apply(lambda w, tokens, x: embed(w, tokens) * x.sum(), params["embed"], batch["tokens"], x)
        h, _ = ya.scan(lambda h, w, x: (block(h * x[0], w)[0], None), h, params["layers"], consts=x)
        mean = ya.apply(head, params["head"], h * x[1], batch["targets"])
        return mean.total / 10 * x[2].exp()

    def along(p: Tree, u: Tree) -> Callable[[Tensor], Tensor]:
        return lambda x: tf.jvp(lambda p: scaled(p, batch, x), (p,), (u,))[1]

    for name, of in PLAIN_ARGUMENTS.items():
        got, expected = (of(lambda x, p=p: scaled(p, batch, x))(x) for p, _ in both)
        compare(got, expected, BOUND, name)
    got, expected = (tf.jacfwd(along(*of))(x) for of in both)
    compare(got, expected, BOUND, "jacfwd of a derivative by shards")
    mixed = tf.jacfwd(lambda x: tf.grad(lambda p: scaled(p, batch, x))(p))(x)
    of_all = lambda x: Loss(lambda p, batch: scaled(p, batch, x), s.batches)  # noqa: E731
    plain_mixed = tf.jacfwd(lambda x: tf.grad(of_all(x))(plain))(x)
    for k in range(3):
        got, expected = (optree.tree_map(lambda leaf, k=k: leaf[..., k], tree) for tree in (mixed, plain_mixed))
        compare(got, expected, BOUND, f"jacfwd of a gradient by shards, {k}")
    rate = torch.tensor(0.3).double()
    onward = lambda p, u: lambda rate: s.loss(axpy(rate, u, p))  # noqa: E731
    got, expected = (tf.jvp(onward(*of), (rate,), (torch.ones_like(rate),)) for of in both)
    compare(got, expected, BOUND, "jvp by how far to go")
    if mesh.size() > 1:  # what is a plain argument, and what a shard, cannot be told apart there
        for columns in (tf.jacfwd, tf.hessian):
            with pytest.raises(RuntimeError, match="jacfwd or hessian with respect to sharded parameters, or to what"):
                columns(onward(p, u))(rate)


@on_ranks(2)
def test_what_would_not_be_differentiated_is_refused(mesh: Any) -> None:
    s = Setting(mesh, "base")
    (p, u, _), batch = s.sharded, s.batches[mesh.get_rank()]
    for options in ({"has_aux": True}, {"microbatches": 3}):
        inner = ya.grad(mean, **options)
        with pytest.raises(RuntimeError, match="inside another derivative takes no has_aux and no microbatches"):
            tf.grad(lambda p, inner=inner: ya.vdot(inner(p, batch), u))(p)
