"""A gradient means the same at every number of ranks, with replicas too: what a plain tree gives on the whole batch.

Each rank differentiates the mean over its own rows, and the objective is the mean over ranks; parts are equal but where
a loss is weighted (`ya.functional_loss`). All in float64.
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
from tests.harness.marks import by_day, nightly
from tests.harness.meshes import MESHES, made
from tests.harness.oracle import batch_of, compare, joined, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, TX, Batch, Params, block, embed, head

sum_over_ranks = ya.params.sum_over_ranks
DOUBLE = ya.Precision(torch.float64)
BOUND = 1e-12
LR = 0.1
Tree = Any
Loss = Callable[[Tree, Batch], Tensor]
WORLDS = [
    (1, "shard"),
    (2, "shard"),
    (2, "copies"),
    nightly(3, "shard"),
    nightly(4, "shard"),
    nightly(4, "replicate"),
    (4, "replicate-nodes"),
]


class Setting:
    """A problem on this rank and on one process. batches: of all ranks, `own` among them"""

    def __init__(self, axes: str, name: str, *, layers: int = 2, same_data: bool = False) -> None:
        mesh, problem = made(axes), PROBLEMS[name]
        # torch's pytrees take None for a leaf
        abstract = {key: value for key, value in problem.params(layers)._asdict().items() if value is not None}
        self.sharded = ya.init(abstract, TX, mesh=mesh, precision=DOUBLE).params
        marked = optree.tree_map(Tensor.double, plain(abstract))
        self.plain = ya.params.without_markers(marked)
        self.directions = [
            (ya.normal_like(seed, self.sharded), ya.params.without_markers(ya.normal_like(seed, marked)))
            for seed in (1, 2)
        ]
        self.batches = [batch_of(0 if same_data else rank) for rank in range(mesh.size())]
        self.own = self.batches[mesh.get_rank()]
        self._loss = problem.loss

    def mean(self, params: Tree, batch: Batch) -> ya.Mean:
        return self._loss(Params(**({"more": None} | params)), batch)

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        """The mean over as many rows as each rank has."""
        return self.mean(params, batch).total / 10

    def whole(self, params: Tree, loss: Loss | None = None) -> Tensor:
        """On a plain tree: the mean over all ranks' batches."""
        return torch.stack([(loss or self.loss)(params, batch) for batch in self.batches]).mean()


def axpy(a: float | Tensor, x: Tree, y: Tree) -> Tree:
    return optree.tree_map(lambda x, y: a * x + y, x, y)


# ---- what is computed, alike on sharded trees (loss on the own batch) and on plain ones (loss on all of them):
# `(loss of parameters, parameters, two directions)` -> trees or numbers


def vjp_twice(f: Any, p: Tree, u: Tree, v: Tree) -> Tree:
    _, back = tf.vjp(f, p)
    return [back(torch.tensor(cotangent).double())[0] for cotangent in (1.0, 2.0)]


def backward_to_leaves(f: Any, p: Tree, u: Tree, v: Tree) -> Tree:
    """By autograd, to leaves of one's own."""
    leaves = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), p)
    f(leaves).backward()
    return optree.tree_map(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, leaves)


def hvp_jvp(f: Any, p: Tree, u: Tree, v: Tree) -> Tree:
    return tf.jvp(tf.grad(f), (p,), (u,))[1]


def hvp_ya(f: Any, p: Tree, u: Tree, v: Tree, *, inner: Any = tf.grad) -> Tree:
    return ya.grad(lambda q: ya.vdot(inner(f)(q), u))(p)


def maml(f: Any, p: Tree, u: Tree, v: Tree, *, inner: Any = tf.grad, outer: Any = tf.grad) -> Tree:
    return outer(lambda q: f(axpy(-LR, inner(f)(q), q)))(p)


def third(f: Any, p: Tree, u: Tree, v: Tree) -> Tree:
    along = lambda q: ya.vdot(tf.grad(f)(q), u)  # noqa: E731
    return tf.grad(lambda q: ya.vdot(tf.grad(along)(q), v))(p)


def penalty(tree: Tree) -> Tensor:
    return ya.global_norm(tree) + ya.vdot(tree, tree)


def norms(f: Any, p: Tree, u: Tree, v: Tree, *, outer: Any = tf.grad) -> Tree:
    """A norm of the parameters and one of the gradient, as regularisers."""
    return outer(lambda q: f(q) + 0.1 * ya.global_norm(q) + 0.1 * ya.global_norm(tf.grad(f)(q)))(p)


KITS = {
    "tf.grad": lambda f, p, u, v: tf.grad(f)(p),
    "vjp, called twice": vjp_twice,
    "backward to leaves": backward_to_leaves,
    "hvp by jvp": hvp_jvp,
    "hvp by tf.grad": lambda f, p, u, v: tf.grad(lambda q: ya.vdot(tf.grad(f)(q), u))(p),
    "hvp by ya.grad": hvp_ya,
    "hvp by ya.grad of ya.grad": lambda *a: hvp_ya(*a, inner=ya.grad),
    "gradient of jvp of jvp": lambda f, p, u, v: tf.grad(
        lambda q: tf.jvp(lambda q: tf.jvp(f, (q,), (u,))[1], (q,), (v,))[1]
    )(p),
    "MAML": maml,
    "MAML by ya.grad": lambda *a: maml(*a, outer=ya.grad),
    "MAML by ya.grad of ya.grad": lambda *a: maml(*a, inner=ya.grad, outer=ya.grad),
    "MAML by tf.grad of ya.grad": lambda *a: maml(*a, inner=ya.grad),
    "third order": third,
    "norms": norms,
    "a regulariser": lambda f, p, u, v: tf.grad(lambda q: f(q) + 0.1 * penalty(q))(p),
    "along its gradient": lambda f, p, u, v: tf.grad(lambda q: ya.vdot(tf.grad(penalty)(q), u))(p),
    "norms in a step": lambda *a: norms(*a, outer=ya.grad),
}


def same(s: Setting, name: str, kits: list[str]) -> None:
    (u, plain_u), (v, plain_v) = s.directions
    for kit in kits:
        got = KITS[kit](lambda p: s.loss(p, s.own), s.sharded, u, v)
        expected = KITS[kit](s.whole, s.plain, plain_u, plain_v)
        compare(got, expected, BOUND, f"{name}: {kit}")


@pytest.mark.sampled
@on_ranks()
@pytest.mark.parametrize(
    ("world", "axes", "same_data"),
    [
        nightly(1, "shard", False),  # by day the table of transforms
        (2, "shard", False),
        nightly(2, "copies", False),
        nightly(4, "replicate", False),
        nightly(4, "replicate-nodes", False),
        (2, "shard", True),
    ],
)
def test_transforms(mesh: Any, axes: str, same_data: bool) -> None:
    """All of them on one rank, by night, on two, and on two that hold all; on four, and of the same data, some."""
    few = ["tf.grad", "hvp by jvp", "hvp by ya.grad", "MAML by ya.grad"]
    most = [*few, "vjp, called twice", "hvp by ya.grad of ya.grad", "third order", "norms", "norms in a step"]
    kits = {"replicate": most, "replicate-nodes": few}.get(axes, few if same_data else list(KITS))
    same(Setting(axes, "base", same_data=same_data), "base", kits)
    for name in ("twice", "stacks", "pinned") if mesh.size() < 4 and not same_data else ("pinned",):
        same(Setting(axes, name, same_data=same_data), name, few)


NAMES = ["base", "tied", "stacks", "pairs", "units", "pinned", "rich", "unrolled", "twice", "part"]


@on_ranks()
@pytest.mark.parametrize(
    ("world", "axes", "names"),
    [
        *((1, "shard", NAMES[::2]), (2, "shard", NAMES[1::2]), (3, "shard", NAMES[::4])),
        *(nightly(world, "shard", NAMES) for world in (1, 2, 3)),
        (4, "replicate-nodes", ["tied", "rich"]),
        *(nightly(4, axes, ["tied", "rich"]) for axes in ("replicate", "copies", "nodes")),
    ],
)
def test_first_derivatives_of_every_kind_of_visit(mesh: Any, axes: str, names: list[str]) -> None:
    for name in names:
        same(Setting(axes, name, layers=3), name, ["tf.grad", "vjp, called twice", "backward to leaves"])


def rows_of(batch: Batch) -> Batch:
    """Batches of a row each."""
    return {key: value.unsqueeze(1) for key, value in batch.items()}


def curvature(f: Any, p: Tree, u: Tree) -> Tensor:
    """The second derivative of `f` along a direction."""
    slope: Tensor = tf.jvp(lambda q: tf.jvp(f, (q,), (u,))[1], (p,), (u,))[1]
    return slope


def of_each_rank(s: Setting, name: str) -> None:
    """Values and forward derivatives, each rank's own; and gradients of rows, whose mean over ranks is that of rows in
    equal places."""

    def own(params: Tree) -> Tensor:
        return s.loss(params, s.own)

    (u, plain_u), _ = s.directions
    compare(own(s.sharded), own(s.plain), BOUND if len(s.batches) > 1 else 0.0, f"{name}: value")
    compare(tf.jvp(own, (s.sharded,), (u,)), tf.jvp(own, (s.plain,), (plain_u,)), BOUND, f"{name}: jvp")
    compare(curvature(own, s.sharded, u), curvature(own, s.plain, plain_u), BOUND, f"{name}: jvp of jvp")
    each = tf.vmap(tf.grad(s.loss), in_dims=(None, 0))
    every = [each(s.plain, rows_of(batch)) for batch in s.batches]
    mean = optree.tree_map(lambda *rows: torch.stack(rows).mean(0), *every)
    compare(each(s.sharded, rows_of(s.own)), mean, BOUND, f"{name}: gradients of rows")


SOME = ["base", "rich", "twice"]


@on_ranks()
@pytest.mark.parametrize(
    ("world", "axes", "names"),
    [
        *((1, "shard", SOME), (2, "shard", SOME), nightly(1, "shard", NAMES), nightly(2, "shard", NAMES)),
        (4, "copies", ["base"]),
        *(nightly(4, axes, ["base"]) for axes in ("replicate", "nodes", "replicate-nodes")),
    ],
)
def test_other_derivatives_of_every_kind_of_visit(mesh: Any, axes: str, names: list[str]) -> None:
    for name in names:
        s = Setting(axes, name, layers=3)
        same(s, name, ["hvp by jvp", "hvp by tf.grad"])
        of_each_rank(s, name)


@on_ranks(4)
@pytest.mark.parametrize("axes", by_day(MESHES, "copies", "replicate-nodes"))
def test_regularisers(_: Any, axes: str) -> None:
    """Numbers over trees stand on every rank, as parts that count equally; gradients are complete on every replica."""
    same(Setting(axes, "base", layers=3), "base", ["a regulariser", "along its gradient"])


@on_ranks(1, 2, 3)
def test_a_gradient_with_dropout(mesh: Any) -> None:
    """Outside a step blocks draw from the default generator, and draw the same again when they are recomputed."""
    s = Setting("shard", "dropout", layers=3)
    every = []
    for rank, batch in enumerate(s.batches):
        torch.manual_seed(rank)
        every.append(tf.grad(s.loss)(s.plain, batch))
    torch.manual_seed(mesh.get_rank())
    got = tf.grad(s.loss)(s.sharded, s.own)
    compare(got, optree.tree_map(lambda *grads: torch.stack(grads).mean(0), *every), BOUND, "dropout")


@on_ranks(1, 2)
def test_rows_with_dropout(_: Any) -> None:
    """Each row draws numbers of its own, or none may be drawn."""
    s = Setting("shard", "dropout")
    own = rows_of(s.own)
    found = []
    for params in (s.sharded, s.plain):
        torch.manual_seed(0)
        found.append(tf.vmap(s.loss, in_dims=(None, 0), randomness="different")(params, own))
    compare(*found, BOUND, "dropout: vmap")
    with pytest.raises(RuntimeError, match="randomness"):
        tf.vmap(s.loss, in_dims=(None, 0))(s.sharded, own)


@on_ranks()
@pytest.mark.parametrize(("world", "axes"), WORLDS)
def test_weighted_losses(mesh: Any, axes: str) -> None:
    """Losses of uneven weights, by `ya.functional_loss`: ya.grad's gradient, and the plain tree's on the whole
    batch."""
    s = Setting(axes, "base")
    everything, objective = joined(s.batches), ya.functional_loss(s.mean)
    expected, value = tf.grad_and_value(objective)(s.plain, everything)
    got = tf.grad_and_value(objective)(s.sharded, s.own)
    compare(got, (expected, value), BOUND, "objective, and its value")
    compare(ya.value_and_grad(s.mean)(s.sharded, s.own), (value, expected), BOUND, "ya.grad, and its value")
    (u, plain_u), _ = s.directions
    hvp = tf.jvp(lambda p: tf.grad(objective)(p, s.own), (s.sharded,), (u,))[1]
    plain_hvp = tf.jvp(lambda p: tf.grad(objective)(p, everything), (s.plain,), (plain_u,))[1]
    compare(hvp, plain_hvp, BOUND, "Hessian-vector product of the objective")
    composed = ya.grad(lambda p: ya.vdot(ya.grad(s.mean)(p, s.own), u))(s.sharded)
    compare(composed, plain_hvp, BOUND, "by ya.grad of ya.grad")
    tangent = tf.jvp(lambda p: objective(p, s.own), (s.sharded,), (u,))
    plain_tangent = tf.jvp(lambda p: objective(p, everything), (s.plain,), (plain_u,))
    compare(tangent, plain_tangent, BOUND, "jvp of the objective")


@on_ranks()
@pytest.mark.parametrize(("world", "axes"), WORLDS)
def test_plain_arguments_and_examples(mesh: Any, axes: str) -> None:
    """A gradient of what is no shard: of ya.grad a rank's part of the mean, inside another derivative too."""
    s = Setting(axes, "base")
    ranks, scale = mesh.size(), torch.tensor(1.5).double()

    def scaled(scale: Tensor, params: Tree, batch: Batch) -> Tensor:
        return s.loss(params, batch) * scale.square()

    got = ya.grad(scaled)(scale, s.sharded, s.own)
    compare(got, 3.0 * s.loss(s.plain, s.own) / ranks, BOUND, "ya.grad")
    inner = ya.grad(lambda p: ya.grad(scaled)(scale, p, s.own))(s.sharded)
    expected = tf.grad(lambda p: 3.0 * s.whole(p) / ranks)(s.plain)
    compare(inner, expected, BOUND, "ya.grad of it")
    compare(tf.grad(scaled)(scale, s.sharded, s.own), 3.0 * s.loss(s.plain, s.own), BOUND, "torch.func.grad")
    whole = ya.unshard(s.sharded)
    rows, each = rows_of(s.own), tf.vmap(tf.grad(s.loss), in_dims=(None, 0))
    compare(each(whole, rows), each(s.plain, rows), BOUND, "a whole tree: each rank's own examples, nothing else")


def adapted(s: Setting, loss: Loss, inner: Any, path: str) -> Callable[[Tensor, Tree], Tensor]:
    """One step by a learned rate, then the loss: the rate meets shards, or a rank's value, or both."""

    def value(rate: Tensor, params: Tree) -> Tensor:
        far = 0.3 if path == "loss" else ya.params.to_shards(rate, params)
        new = loss(axpy(-far, inner(lambda p: loss(p, s.own))(params), params), s.own)
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
    s, rate = Setting(axes, "base"), torch.tensor(0.3).double()
    ranks, weighted = mesh.size(), ya.functional_loss(s.mean)
    everything = joined(s.batches)
    losses = {"functional": (weighted, lambda p, _: weighted(p, everything)), "bare": (s.loss, lambda p, _: s.whole(p))}
    for (name, (loss, whole)), path in itertools.product(losses.items(), ("shards", "loss", "both")):
        inner = tf.grad if name == "bare" else ya.grad
        of, on_plain = adapted(s, loss, inner, path), adapted(s, whole, tf.grad, path)
        expected, what = tf.grad(on_plain)(rate, s.plain), f"{name}, by {path}"
        for outer, by in ((ya.grad, 1), (tf.grad, ranks)):
            got = sum_over_ranks(outer(of)(rate, s.sharded), s.sharded) / by
            compare(got, expected, BOUND, f"{what}: {outer.__module__}")
    expected = tf.grad(lambda p: tf.grad(on_plain)(rate, p).square())(s.plain)
    for outer in (tf.grad, ya.grad):
        got = outer(lambda p: sum_over_ranks(ya.grad(of)(rate, p), p).square())(s.sharded)
        compare(got, expected, BOUND, f"{what}: {outer.__module__} of the square of ya.grad")
    with pytest.raises(TypeError, match="sum_over_ranks: 'embed' is sharded"):
        sum_over_ranks(s.sharded, s.sharded)
    assert sum_over_ranks(rate, s.plain) is rate


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
    s = Setting(axes, "base")
    (u, plain_u), _ = s.directions
    x = torch.rand(3, generator=torch.Generator().manual_seed(1)).double()

    def scaled(params: Tree, batch: Batch, x: Tensor) -> Tensor:
        h = ya.apply(lambda w, tokens, x: embed(w, tokens) * x.sum(), params["embed"], batch["tokens"], x)
        h, _ = ya.scan(lambda h, w, x: (block(h * x[0], w)[0], None), h, params["layers"], consts=x)
        mean = ya.apply(head, params["head"], h * x[1], batch["targets"])
        return mean.total / 10 * x[2].exp()

    def along(p: Tree, u: Tree) -> Callable[[Tensor], Tensor]:
        return lambda x: tf.jvp(lambda p: scaled(p, s.own, x), (p,), (u,))[1]

    for name, of in PLAIN_ARGUMENTS.items():
        expected = of(lambda x: scaled(s.plain, s.own, x))(x)
        compare(of(lambda x: scaled(s.sharded, s.own, x))(x), expected, BOUND, name)
    got, expected = (tf.jacfwd(along(*of))(x) for of in ((s.sharded, u), (s.plain, plain_u)))
    compare(got, expected, BOUND, "jacfwd of a derivative by shards")
    mixed = tf.jacfwd(lambda x: tf.grad(lambda p: scaled(p, s.own, x))(s.sharded))(x)
    plain_mixed = tf.jacfwd(lambda x: tf.grad(lambda p: s.whole(p, lambda p, b: scaled(p, b, x)))(s.plain))(x)
    for k in range(3):
        got, expected = (optree.tree_map(lambda leaf, k=k: leaf[..., k], tree) for tree in (mixed, plain_mixed))
        compare(got, expected, BOUND, f"jacfwd of a gradient by shards, {k}")
    rate = torch.tensor(0.3).double()
    onward = lambda p, u: lambda rate: s.loss(axpy(rate, u, p), s.own)  # noqa: E731
    one = torch.ones_like(rate)
    got, expected = (tf.jvp(onward(*of), (rate,), (one,)) for of in ((s.sharded, u), (s.plain, plain_u)))
    compare(got, expected, BOUND, "jvp by how far to go")
    if mesh.size() > 1:  # what is a plain argument, and what a shard, cannot be told apart there
        for columns in (tf.jacfwd, tf.hessian):
            with pytest.raises(RuntimeError, match="jacfwd or hessian with respect to sharded parameters, or to what"):
                columns(onward(s.sharded, u))(rate)


@on_ranks(2)
def test_what_would_not_be_differentiated_is_refused(mesh: Any) -> None:
    s = Setting("shard", "base")
    for options in ({"has_aux": True}, {"microbatches": 3}):
        inner = ya.grad(s.mean, **options)
        with pytest.raises(RuntimeError, match="inside another derivative takes no has_aux and no microbatches"):
            tf.grad(lambda p, inner=inner: ya.vdot(inner(p, s.own), s.directions[0][0]))(s.sharded)
