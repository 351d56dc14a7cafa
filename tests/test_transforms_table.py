"""The table of docs/transforms.md: every transform of a sharded loss is that of the plain one, or is refused by name.

    transforms x (plain, one rank, two ranks) x (one stack, two stacks, tied, uneven weights, dropout)
    the same inside the loss of a step x remat (none, all)

What ranks return is averaged: numbers are each rank's own, trees are the same on all. The expected is the plain tree's
on the mean over all ranks' batches, in float64; and the plain tree's is that of a loss written without the library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
from tests.harness.oracle import batch_of, compare, joined, noting, plain, whole
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import (
    PROBLEMS,
    TX,
    Batch,
    Head,
    Layer,
    Params,
    base_params,
    block,
    embed,
    head,
    tied_head,
)
from tests.steps.test_collectives import recorded
from tests.test_transforms_doc import PAGE
from yafsdp_fn.schedules import Trace
from yafsdp_fn.util.randomness import VisitCounter, counting

pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's, of linearize

Tree = Any
BOUND, ROWS = 1e-12, 3
DOUBLE = ya.Precision(torch.float64)
LossOf = Callable[[Tree, Batch], Tensor]
Within = Callable[[], contextlib.AbstractContextManager[None]]


class Loss:
    """A loss of parameters in the forms that transforms want: the mean over `batches`, a rank's own or those of all.

    within: what is entered to draw the random numbers of each batch's rank
    """

    def __init__(self, loss: LossOf, batches: list[Batch], within: Sequence[Within] = ()) -> None:
        self._loss, self._batches = loss, batches
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


TRANSFORMS = {
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


def abstract(name: str) -> Tree:
    """As dictionaries, since torch's pytrees take None for a leaf."""
    given = PROBLEMS[name].params(1 if name == "stacks" else 2)  # of two stacks the second is a layer longer
    return {key: value for key, value in given._asdict().items() if value is not None}


def loss_of(name: str, weighted: bool) -> LossOf:
    def mean(p: Tree, batch: Batch) -> ya.Mean:
        return PROBLEMS[name].loss(Params(**({"more": None} | p)), batch)

    return ya.functional_loss(mean) if weighted else lambda p, batch: mean(p, batch).total / 10


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


class Plain:
    """Parameters and two directions on one process, and the mean over the batches of `ranks`."""

    def __init__(self, name: str, ranks: int, kind: str = "") -> None:
        marked = optree.tree_map(Tensor.double, plain(abstract(name)))
        self.given = tuple(map(whole, (marked, ya.normal_like(1, marked), ya.normal_like(2, marked))))
        batches, weighted = [batch_of(rank) for rank in range(ranks)], kind == "uneven"
        within = {"dropout": seeded_for, "dropout in a step": counted_for}.get(kind)
        draws = [] if within is None else [within(rank) for rank in range(ranks)]
        self.loss = Loss(loss_of(name, weighted), [joined(batches)] if weighted else batches, draws)
        self.by_hand = Loss(by_hand, batches)


def sharded(mesh: Any, name: str, kind: str) -> tuple[Loss, Tree, Tree, Tree]:
    p = ya.init(abstract(name), TX, mesh=mesh, precision=DOUBLE).params
    rank = mesh.get_rank()
    f = Loss(loss_of(name, kind == "uneven"), [batch_of(rank)], [seeded_for(rank)] if kind == "dropout" else [])
    return f, p, ya.normal_like(1, p), ya.normal_like(2, p)


def over_ranks(part: Tensor) -> Tensor:
    mean = part.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()


def expect(transform: str, run: Callable[[], Tree], expected: Callable[[], Tree], refused: dict[str, str]) -> None:
    """It is refused, where the table says so; else the mean over ranks of what comes out is what is expected."""
    if transform in refused:
        with pytest.raises(RuntimeError) as error:
            run()
        assert str(error.value).startswith(refused[transform]), f"{transform}: {error.value}"
        return
    compare(optree.tree_map(over_ranks, whole(run())), expected(), BOUND, transform)


# ---- of a loss


def test_plain_trees_are_torch() -> None:
    for name in ("base", "stacks", "tied"):
        one = Plain(name, 2)
        for transform in TRANSFORMS if name == "base" else list(PLAIN)[:-1]:
            got, expected = (of[transform](f, *one.given) for of, f in ((TRANSFORMS, one.loss), (PLAIN, one.by_hand)))
            compare(got, expected, BOUND, f"{name}: {transform}")
    p, u, v = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), one.given)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        of_step(one.by_hand, u, v, forward_by_hand)(p).backward()


CASES = {
    "one stack": ("base", ""),
    "two stacks": ("stacks", ""),
    "tied": ("tied", ""),
    "uneven": ("base", "uneven"),
    "dropout": ("dropout", "dropout"),
}


@pytest.mark.sampled
@on_ranks()
@pytest.mark.parametrize(
    ("world", "name", "kind"),
    [
        (pytest.param if case in ("two stacks", "dropout") else nightly)(world, *CASES[case], id=f"{case}-{world}")
        for world in (1, 2)
        for case in CASES
    ],
)
def test_of_a_loss(mesh: Any, name: str, kind: str) -> None:
    one, given = Plain(name, mesh.size(), kind), sharded(mesh, name, kind)
    plain_of = TRANSFORMS if kind == "dropout" else PLAIN  # what linearize records draws new numbers when it is run
    refused = (OF_DROPOUT if kind == "dropout" else {}) | (ON_RANKS if mesh.size() > 1 else {})
    for transform, of in TRANSFORMS.items():
        expect(transform, partial(of, *given), partial(plain_of[transform], one.loss, *one.given), refused)


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
    one, (f, p, u, v) = Plain(name, mesh.size()), sharded(mesh, name, "")
    plain_p, plain_u, plain_v = one.given
    refused = (ON_RANKS if mesh.size() > 1 else {}) | IN_A_STEP
    for transform, of in TRANSFORMS.items():
        loss, traces = of_step(f, u, v, of), list[Trace]()
        on_plain = cache(partial(tf.grad(of_step(one.loss, plain_u, plain_v, PLAIN[transform])), plain_p))
        first = ya.grad(loss, schedule=noting(ya.schedules.zero3(remat="none"), traces))
        expect(transform, partial(again, first, p), lambda of=on_plain: 2 * [of()], refused)
        if traces:
            second = ya.grad(loss, schedule=ya.schedules.zero3(remat="all")(traces[0]))
            expect(transform, partial(second, p), on_plain, refused)


@on_ranks(nightly(1), 2)
def test_dropout_in_a_step(mesh: Any) -> None:
    f, p, u, v = sharded(mesh, "dropout", "")
    refused = OF_DROPOUT | (ON_RANKS if mesh.size() > 1 else {}) | IN_A_STEP

    def of_plain(transform: str) -> list[Tree]:
        one = Plain("dropout", mesh.size(), "dropout in a step")
        p, u, v = one.given
        return 2 * [tf.grad(of_step(one.loss, u, v, PLAIN[transform]))(p)]

    for transform, of in TRANSFORMS.items():
        step = ya.grad(of_step(f, u, v, of))
        expect(transform, partial(again, step, p), partial(of_plain, transform), refused)


# ---- what it costs

COSTS = {
    "the loss": lambda f, p, u: f(p),
    "grad": lambda f, p, u: tf.grad(f)(p),
    "jvp": lambda f, p, u: tf.jvp(f, (p,), (u,)),
    "grad of jvp": lambda f, p, u: tf.grad(lambda q: tf.jvp(f, (q,), (u,))[1])(p),
    "vjp of grad": lambda f, p, u: tf.vjp(tf.grad(f), p)[1](u),
    "jvp of grad": lambda f, p, u: tf.jvp(tf.grad(f), (p,), (u,)),
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

    abstract = {key: value for key, value in base_params(layers)._asdict().items() if value is not None}
    p = ya.init(abstract, TX, mesh=mesh, precision=DOUBLE).params
    for name, run in COSTS.items():
        runs = 0
        with recorded() as calls:
            run(loss, p, ya.normal_like(1, p))
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
