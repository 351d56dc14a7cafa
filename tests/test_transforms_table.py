"""The table of docs/transforms.md: every transform of a sharded loss is that of the plain one, or is refused by name.

    transforms x (plain, 1 to 4 ranks, replicas, nodes) x (kinds of visits, uneven weights, dropout)
    the same inside the loss of a step x remat (none, all)

Numbers are each rank's own, of its batch; trees are the same on all ranks, of the mean over all of their batches. The
expected is the plain tree's, in float64; and the plain tree's is that of a loss written without the library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import optree
import pytest
import torch
import torch.func as tf
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch.autograd import forward_ad

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.meshes import made
from tests.harness.oracle import batch_of, compare, joined, noting, plain, whole
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import (
    PROBLEMS,
    TX,
    Batch,
    Head,
    Layer,
    Params,
    block,
    embed,
    head,
    tied_head,
)
from tests.harness.small import one_rank
from tests.harness.watching import recorded
from tests.test_transforms_doc import PAGE
from yafsdp_fn.schedules import Trace
from yafsdp_fn.util.randomness import VisitCounter, counting

pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's, of linearize

Tree = Any
BOUND = 1e-12
ROWS = 3
DOUBLE = ya.Precision(torch.float64)
LossOf = Callable[[Tree, Batch], Tensor]
Within = Callable[[], contextlib.AbstractContextManager[None]]


class Loss:
    """A loss of parameters in the forms that transforms want: the mean over `batches`, a rank's own or those of all.

    within: what is entered to draw the random numbers of each batch's rank
    """

    def __init__(self, loss: LossOf, batches: Sequence[Batch], within: Sequence[Within] = ()) -> None:
        self._loss = loss
        self._batches = batches
        self._within = within or [contextlib.nullcontext] * len(batches)

    def __call__(self, p: Tree) -> Tensor:
        return self._mean(lambda batch: self._loss(p, batch))

    def two(self, p: Tree) -> Tensor:
        """Two numbers of each rank, [2]."""

        def both(batch: Batch) -> Tensor:
            value = self._loss(p, batch)
            return torch.stack([value, value.square()])

        return self._mean(both)

    def row(self, p: Tree, at: Tensor) -> Tensor:
        """Of the row `at` of each rank's batch, which are ROWS apart where batches are joined."""

        def alone(batch: Batch) -> Tensor:
            rows = at + torch.arange(0, len(batch["tokens"]), ROWS)
            return self._loss(p, {key: value.index_select(0, rows) for key, value in batch.items()})

        return self._mean(alone)

    def _mean(self, of_batch: Callable[[Batch], Tensor]) -> Tensor:
        values = []
        for batch, within in zip(self._batches, self._within, strict=True):
            with within():
                values.append(of_batch(batch))
        return torch.stack(values).mean(0)


# ---- what is computed, alike of sharded and of plain trees


def vjp_twice(f: Loss, p: Tree, u: Tree, v: Tree) -> Tree:
    _, back = tf.vjp(f, p)
    return [back(torch.tensor(cotangent).double())[0] for cotangent in (1.0, -3.0)]


def hessian(f: Loss, p: Tree, u: Tree, v: Tree) -> Tree:
    """The matrix, a tree of trees, times a tree."""
    blocks, (vs, spec) = torch_pytree.tree_leaves(tf.hessian(f)(p)), torch_pytree.tree_flatten(v)
    rows = [blocks[i : i + len(vs)] for i in range(0, len(blocks), len(vs))]
    return spec.unflatten([sum(torch.tensordot(b, w, w.ndim) for b, w in zip(row, vs, strict=True)) for row in rows])


def linearize(f: Loss, p: Tree, u: Tree, v: Tree) -> Tree:
    value, along = tf.linearize(f, p)
    return [value, along(u), along(v)]


def forward_by_hand(f: Loss, p: Tree, u: Tree, v: Tree) -> Tree:
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(f(optree.tree_map(forward_ad.make_dual, p, u)))
        return [dual.primal.clone(), dual.tangent]


Transform = Callable[[Any, Tree, Tree, Tree], Tree]
"""Of a loss, parameters and two directions."""

TRANSFORMS: dict[str, Transform] = {
    "grad": lambda f, p, u, v: tf.grad(f)(p),
    "vjp, called twice": vjp_twice,
    "jvp": lambda f, p, u, v: list(tf.jvp(f, (p,), (u,))),
    "vmap over examples": lambda f, p, u, v: tf.vmap(f.row, (None, 0))(p, torch.arange(ROWS)),
    "per-example gradients": lambda f, p, u, v: tf.vmap(tf.grad(f.row), (None, 0))(p, torch.arange(ROWS)),
    "jacrev": lambda f, p, u, v: tf.jacrev(f.two)(p),
    "jacfwd": lambda f, p, u, v: tf.jacfwd(f.two)(p),
    "hessian": hessian,
    "jvp of jvp": lambda f, p, u, v: list(tf.jvp(lambda q: tf.jvp(f, (q,), (u,))[1], (p,), (v,))),
    "jvp of grad": lambda f, p, u, v: list(tf.jvp(tf.grad(f), (p,), (u,))),
    "vjp of grad": lambda f, p, u, v: tf.vjp(tf.grad(f), p)[1](u)[0],
    "grad of grad": lambda f, p, u, v: tf.grad(lambda q: ya.vdot(tf.grad(f)(q), u))(p),
    "forward_ad": forward_by_hand,
    "linearize": linearize,
}
PLAIN = TRANSFORMS | {"linearize": lambda f, p, u, v: [f(p), *(tf.jvp(f, (p,), (along,))[1] for along in (u, v))]}
"""What is expected: torch takes its time to record."""


# ---- beyond the table: by autograd and `ya.grad`, of a higher order, with norms


def backward_to_leaves(f: Loss, p: Tree, u: Tree, v: Tree) -> Tree:
    """By autograd, to leaves of one's own."""
    leaves = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), p)
    f(leaves).backward()
    return optree.tree_map(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, leaves)


def axpy(a: float | Tensor, x: Tree, y: Tree) -> Tree:
    return optree.tree_map(lambda x, y: a * x + y, x, y)


def hvp(inner: Any) -> Transform:
    return lambda f, p, u, v: ya.grad(lambda q: ya.vdot(inner(f)(q), u))(p)


def maml(inner: Any, outer: Any) -> Transform:
    return lambda f, p, u, v: outer(lambda q: f(axpy(-0.1, inner(f)(q), q)))(p)


def third(f: Loss, p: Tree, u: Tree, v: Tree) -> Tree:
    along = lambda q: ya.vdot(tf.grad(f)(q), u)  # noqa: E731
    return tf.grad(lambda q: ya.vdot(tf.grad(along)(q), v))(p)


def penalty(tree: Tree) -> Tensor:
    return ya.global_norm(tree) + ya.vdot(tree, tree)


def norms(outer: Any) -> Transform:
    """A norm of the parameters and one of the gradient, as regularisers."""
    return lambda f, p, u, v: outer(lambda q: f(q) + 0.1 * ya.global_norm(q) + 0.1 * ya.global_norm(tf.grad(f)(q)))(p)


EVERY = TRANSFORMS | {
    "value": lambda f, p, u, v: f(p),
    "backward to leaves": backward_to_leaves,
    "hvp by ya.grad": hvp(tf.grad),
    "hvp by ya.grad of ya.grad": hvp(ya.grad),
    "gradient of jvp of jvp": lambda f, p, u, v: tf.grad(
        lambda q: tf.jvp(lambda q: tf.jvp(f, (q,), (u,))[1], (q,), (v,))[1]
    )(p),
    "MAML": maml(tf.grad, tf.grad),
    "MAML by ya.grad": maml(tf.grad, ya.grad),
    "MAML by ya.grad of ya.grad": maml(ya.grad, ya.grad),
    "MAML by tf.grad of ya.grad": maml(ya.grad, tf.grad),
    "third order": third,
    "norms": norms(tf.grad),
    "norms in a step": norms(ya.grad),
    "a regulariser": lambda f, p, u, v: tf.grad(lambda q: f(q) + 0.1 * penalty(q))(p),
    "along its gradient": lambda f, p, u, v: tf.grad(lambda q: ya.vdot(tf.grad(penalty)(q), u))(p),
}
NUMBERS = {"value", "jvp", "vmap over examples", "jvp of jvp", "forward_ad", "linearize"}
"""Each rank's own."""

NO_BASIS = "jacfwd or hessian with respect to sharded parameters"
NO_RECORD = "torch.func.linearize of what is sharded over several ranks"
NOT_IN_A_STEP = "torch.func.linearize inside of a step or ya.grad"
IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"
RANDOM = "vmap: called random operation while in randomness error mode"
ON_RANKS = {"jacfwd": NO_BASIS, "hessian": NO_BASIS, "linearize": NO_RECORD}
"""Refused on several ranks."""
IN_A_STEP = {"linearize": NOT_IN_A_STEP, "forward_ad": IN_PLACE}
"""The latter by torch, of a cross entropy, and of plain trees under plain autograd too."""
OF_DROPOUT = dict.fromkeys(["vmap over examples", "per-example gradients", "jacrev", "jacfwd", "hessian"], RANDOM)
"""Refused by torch, which makes all of these of vmap; of plain trees all but jacrev, since nothing is recomputed."""


def number(result: Tree, u: Tree) -> Tensor:
    """One number of a result, for the loss of a step: of trees their inner product with u, of numbers their sum."""
    if isinstance(result, list):
        return torch.stack([number(part, u) for part in result]).sum()
    return result.sum() if isinstance(result, Tensor) else ya.vdot(result, u)


# ---- problems, sharded and plain


def abstract(name: str, layers: int) -> Tree:
    """As dictionaries, since torch's pytrees take None for a leaf."""
    return {key: value for key, value in PROBLEMS[name].params(layers)._asdict().items() if value is not None}


def mean_of(name: str) -> Callable[[Tree, Batch], ya.Mean]:
    return lambda p, batch: PROBLEMS[name].loss(Params(**({"more": None} | p)), batch)


def loss_of(name: str) -> LossOf:
    """The mean over as many rows as each rank has."""
    return lambda p, batch: mean_of(name)(p, batch).total / 10


def by_hand(p: Tree, batch: Batch) -> Tensor:
    """`loss_of` any of the problems, without the library."""
    x = embed(p["embed"], batch["tokens"])
    for stack in (p["layers"], p.get("more", ())):
        for layer in zip(*stack, strict=True):
            x, _ = block(x, Layer(*layer))
    mean = head(p["head"], x, batch["targets"]) if isinstance(p["head"], Head) else None
    return (mean or tied_head((p["head"], p["embed"]), x, batch["targets"])).total / 10


def seeded_for(rank: int) -> Within:
    """Outside of a step blocks draw from the default generator: the same numbers in every call."""

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        torch.manual_seed(rank)
        yield

    return within


def counted_for(rank: int) -> Within:
    """Inside of a step visits are numbered, and draw by seed, step, visit and rank."""
    return partial(counting, VisitCounter(0, 0, 0, rank))


class Setting:
    """A problem on this rank, and on one process.

    sharded, plain: the parameters, and two directions
    batches: of all ranks; loss: of this rank's; own, mean: on plain trees the same, and the mean over all ranks
    """

    def __init__(self, mesh: Any, name: str, kind: str = "", *, layers: int = 2, same_data: bool = False) -> None:
        tree = abstract(name, layers)
        ranks = range(mesh.size())
        here = slice(mesh.get_rank(), mesh.get_rank() + 1)
        params = ya.init(tree, TX, mesh=mesh, precision=DOUBLE).params
        marked = optree.tree_map(Tensor.double, plain(tree))
        self.sharded = params, ya.normal_like(1, params), ya.normal_like(2, params)
        self.plain = tuple(map(whole, (marked, ya.normal_like(1, marked), ya.normal_like(2, marked))))
        self.batches = [batch_of(0 if same_data else rank) for rank in ranks]
        draws = [seeded_for(rank) for rank in ranks] if kind == "dropout" else []
        loss = ya.functional_loss(mean_of(name)) if kind == "uneven" else loss_of(name)
        self.loss = self.own = Loss(loss, self.batches[here], draws[here])
        self.mean = Loss(loss, self.batches, draws)
        if kind == "uneven":  # a rank's value is that of all
            self.mean = self.own = Loss(loss, [joined(self.batches)])


def expect(
    transform: str, run: Callable[[], Tree], expected: Callable[[], Tree], refused: Mapping[str, str], bound: float
) -> None:
    """It is refused, where the table says so; else it is what is expected."""
    if transform in refused:
        with pytest.raises(RuntimeError) as error:
            run()
        assert str(error.value).startswith(refused[transform]), f"{transform}: {error.value}"
        return
    compare(run(), expected(), bound, transform)


# ---- of a loss


def test_plain_trees_are_torch() -> None:
    for name in ("base", "stacks", "tied"):
        one = Setting(one_rank(), name, layers=1 if name == "stacks" else 2)
        for transform in TRANSFORMS if name == "base" else list(PLAIN)[:-1]:
            got = TRANSFORMS[transform](one.mean, *one.plain)
            expected = PLAIN[transform](Loss(by_hand, one.batches), *one.plain)
            compare(got, expected, BOUND, f"{name}: {transform}")
    p, u, v = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), one.plain)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        of_step(Loss(by_hand, one.batches), u, v, forward_by_hand)(p).backward()


def of_a_loss(mesh: Any, names: Iterable[str], transforms: Iterable[str], kind: str = "", **how: Any) -> None:
    plain_of = EVERY if kind == "dropout" else EVERY | PLAIN  # what linearize records draws new numbers when it is run
    refused = (OF_DROPOUT if kind == "dropout" else {}) | (ON_RANKS if mesh.size() > 1 else {})
    for name in names:
        s = Setting(mesh, name, kind, **how)
        for transform in transforms:
            same = s.own if transform in NUMBERS else s.mean
            run = partial(EVERY[transform], s.loss, *s.sharded)
            expected = partial(plain_of[transform], same, *s.plain)
            bound = 0.0 if (transform, mesh.size()) == ("value", 1) else BOUND
            expect(transform, run, expected, refused, bound)


FEW = ["grad", "jvp of grad", "hvp by ya.grad", "MAML by ya.grad"]
MOST = [*FEW, "vjp, called twice", "hvp by ya.grad of ya.grad", "third order", "norms", "norms in a step"]
FIRST = ["grad", "vjp, called twice", "backward to leaves"]
OTHER = ["jvp of grad", "grad of grad", "value", "jvp", "jvp of jvp", "per-example gradients"]
REGULAR = ["a regulariser", "along its gradient"]

VISITS = ["base", "tied", "stacks", "pairs", "units", "pinned", "rich", "unrolled", "twice", "part"]
SOME = ["base", "rich", "twice"]
TWO = ["tied", "rich"]


def row(of: Any, what: str, world: int, axes: str, names: list[str], transforms: Iterable[str], **how: Any) -> Any:
    return of(world, axes, names, [*transforms], how, id=f"{world} {axes}, {what}")


by_day = partial(row, pytest.param)
by_night = partial(row, nightly)
STACKS: dict[str, Any] = {"layers": 1}  # the second stack is a layer longer


@on_ranks()
@pytest.mark.parametrize(
    ("world", "axes", "names", "transforms", "how"),
    [
        by_day("two stacks", 1, "shard", ["stacks"], TRANSFORMS, **STACKS),
        by_day("one stack", 2, "shard", ["base"], EVERY),
        by_day("other visits", 2, "shard", ["twice", "stacks", "pinned"], FEW),
        by_day("the same data", 2, "shard", ["base", "pinned"], FEW, same_data=True),
        by_day("dropout", 2, "shard", ["dropout"], TRANSFORMS, kind="dropout"),
        *(by_day("gradient with dropout", world, "shard", ["dropout"], FIRST[:1], kind="dropout") for world in (1, 3)),
        *(by_day("regularisers", 4, axes, ["base"], REGULAR, layers=3) for axes in ("copies", "replicate-nodes")),
        by_day("some visits", 1, "shard", VISITS[::2], FIRST, layers=3),
        by_day("some visits", 2, "shard", VISITS[1::2], FIRST, layers=3),
        by_day("some visits", 3, "shard", VISITS[::4], FIRST, layers=3),
        by_day("some visits", 4, "replicate-nodes", TWO, FIRST, layers=3),
        *(by_day("other derivatives", world, "shard", SOME, OTHER, layers=3) for world in (1, 2)),
        by_day("other derivatives", 4, "copies", ["base"], OTHER, layers=3),
        by_night("two stacks", 2, "shard", ["stacks"], TRANSFORMS, **STACKS),
        *(by_night("tied", world, "shard", ["tied"], TRANSFORMS) for world in (1, 2)),
        *(by_night("uneven", world, "shard", ["base"], TRANSFORMS, kind="uneven") for world in (1, 2)),
        by_night("dropout", 1, "shard", ["dropout"], TRANSFORMS, kind="dropout"),
        by_night("one stack", 1, "shard", ["base"], EVERY),
        by_night("one stack", 2, "copies", ["base"], [each for each in EVERY if each not in ON_RANKS]),
        *(
            by_night("other visits", world, axes, ["twice", "stacks", "pinned"], FEW)
            for world, axes in ((1, "shard"), (2, "copies"))
        ),
        by_night("most", 4, "replicate", ["base"], MOST),
        by_night("few", 4, "replicate-nodes", ["base"], FEW),
        *(by_night("pinned", 4, axes, ["pinned"], FEW) for axes in ("replicate", "replicate-nodes")),
        *(by_night("regularisers", 4, axes, ["base"], REGULAR, layers=3) for axes in ("shard", "replicate", "nodes")),
        *(by_night("all visits", world, "shard", VISITS, FIRST, layers=3) for world in (1, 2, 3)),
        *(by_night("some visits", 4, axes, TWO, FIRST, layers=3) for axes in ("replicate", "copies", "nodes")),
        *(by_night("all visits, other derivatives", world, "shard", VISITS, OTHER, layers=3) for world in (1, 2)),
        *(
            by_night("other derivatives", 4, axes, ["base"], OTHER, layers=3)
            for axes in ("replicate", "nodes", "replicate-nodes")
        ),
    ],
)
def test_of_a_loss(_: Any, axes: str, names: list[str], transforms: list[str], how: dict[str, Any]) -> None:
    of_a_loss(made(axes), names, transforms, **how)


# ---- inside the loss of a step


def of_step(f: Loss, u: Tree, v: Tree, transform: Callable[..., Tree]) -> Callable[[Tree], Tensor]:
    return lambda p: f(p) + number(transform(f, p, u, v), u)


def again(step: Callable[[Tree], Tree], p: Tree) -> list[Tree]:
    """Of the call that is recorded, and of the program."""
    return [step(p), step(p)]


@on_ranks(nightly(1), 2)
@pytest.mark.parametrize("name", ["stacks", nightly("tied")], ids=["two stacks", "one stack and a tied embedding"])
def test_in_a_step(mesh: Any, name: str) -> None:
    """By programs that recompute nothing, and all."""
    s = Setting(mesh, name, layers=1 if name == "stacks" else 2)
    (p, u, v), (plain_p, plain_u, plain_v) = s.sharded, s.plain
    refused = (ON_RANKS if mesh.size() > 1 else {}) | IN_A_STEP
    for transform, of in TRANSFORMS.items():
        loss = of_step(s.loss, u, v, of)
        traces = list[Trace]()
        on_plain = cache(partial(tf.grad(of_step(s.mean, plain_u, plain_v, PLAIN[transform])), plain_p))
        first = ya.grad(loss, schedule=noting(ya.schedules.zero3(remat="none"), traces))
        expect(transform, partial(again, first, p), lambda of=on_plain: 2 * [of()], refused, BOUND)
        if traces:
            second = ya.grad(loss, schedule=ya.schedules.zero3(remat="all")(traces[0]))
            expect(transform, partial(second, p), on_plain, refused, BOUND)


@on_ranks(nightly(1), 2)
def test_dropout_in_a_step(mesh: Any) -> None:
    s = Setting(mesh, "dropout")
    (p, u, v), (plain_p, plain_u, plain_v) = s.sharded, s.plain
    refused = OF_DROPOUT | (ON_RANKS if mesh.size() > 1 else {}) | IN_A_STEP

    def of_plain(transform: str) -> list[Tree]:
        mean = Loss(loss_of("dropout"), s.batches, [counted_for(rank) for rank in range(mesh.size())])
        return 2 * [tf.grad(of_step(mean, plain_u, plain_v, PLAIN[transform]))(plain_p)]

    for transform, of in TRANSFORMS.items():
        step = ya.grad(of_step(s.loss, u, v, of))
        expect(transform, partial(again, step, p), partial(of_plain, transform), refused, BOUND)


# ---- what it costs

COSTS: dict[str, Transform] = {
    "the loss": EVERY["value"],
    "grad of jvp": lambda f, p, u, v: tf.grad(lambda q: tf.jvp(f, (q,), (u,))[1])(p),
    **{name: TRANSFORMS[name] for name in ("grad", "jvp", "vjp of grad", "jvp of grad")},
}


def costs(mesh: Any, layers: int) -> dict[str, list[int]]:
    """Gathers, reductions, and runs of the block."""
    found = {}
    runs = 0

    def counted(x: Tensor, w: Layer) -> tuple[Tensor, None]:
        nonlocal runs
        runs += 1
        return block(x, w)

    def loss(p: Tree) -> Tensor:
        x = ya.apply(embed, p["embed"], batch_of(mesh.get_rank())["tokens"])
        x, _ = ya.scan(counted, x, p["layers"])
        return ya.apply(head, p["head"], x, batch_of(mesh.get_rank())["targets"]).total / 10

    p = ya.init(abstract("base", layers), TX, mesh=mesh, precision=DOUBLE).params
    for name, run in COSTS.items():
        runs = 0
        with recorded() as calls:
            run(loss, p, ya.normal_like(1, p), None)
        kinds = [call.kind for call in calls]
        found[name] = [kinds.count("gather"), kinds.count("reduce"), runs]
    return found


def test_costs(pools: Pools) -> None:
    """Of each layer beyond the first what a further layer adds; of the first, the embedding and the head the rest."""
    (two, _), (four, _) = (pools[2].run(costs, layers) for layers in (2, 4))
    for name in COSTS:
        layer = [(b - a) // 2 for a, b in zip(two[name], four[name], strict=True)]
        gathers, reductions, runs = (a - b for a, b in zip(two[name], layer, strict=True))
        row = [*layer, gathers // 3, reductions // 3, runs]
        assert f"| {name} | {' | '.join(map(str, row))} |" in PAGE, f"{name}: {row}"


def test_the_page_has_the_errors() -> None:
    for text in (NO_BASIS, NO_RECORD, NOT_IN_A_STEP, IN_PLACE, RANDOM):
        assert text in PAGE
