"""torch.func on losses with sharded parameters: the pure path, against the same transforms on plain tensors.

Gradients are those of the mean of all ranks' losses; forward derivatives are this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.oracle import batch_of, compare, global_batch, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, TX, Batch, Params

NAMES = ("base", "tied", "stacks", "pairs", "units", "pinned", "rich", "unrolled", "twice", "part")
Tree = dict[str, Any]


class Setting:
    """A problem as a function of a dictionary (torch's pytrees take None for a leaf) of sharded or plain parameters."""

    def __init__(self, mesh: Any, name: str, layers: int = 3) -> None:
        problem = PROBLEMS[name]
        abstract = {key: value for key, value in problem.params(layers)._asdict().items() if value is not None}
        self.sharded: Tree = ya.init(abstract, TX, mesh=mesh).params
        marked = plain(abstract)
        self.plain: Tree = ya.params.without_markers(marked)
        self.leaves, self.spec = optree.tree_flatten(self.plain)
        self.sharded_tangents = ya.normal_like(1, self.sharded)
        self.tangents = optree.tree_leaves(ya.normal_like(1, marked))  # markers say what is a stack of layers
        self.ranks, self.rank = mesh.size(), mesh.get_rank()
        self._loss = problem.loss

    def total(self, params: Tree, batch: Batch) -> Tensor:
        """The sum over the batch."""
        return self._loss(Params(**({"more": None} | params)), batch).total

    def share(self, leaves: list[Tensor]) -> list[Tensor]:
        """Of gradients over the batches of all ranks, those of the mean of what each rank has."""
        return [leaf / self.ranks for leaf in leaves]

    def of_leaves(self, transformed: Callable[[Callable[..., Tensor]], Any]) -> Any:
        """`transformed(f)` with `f` a function of the list of plain leaves."""
        return transformed(lambda leaves, batch: self.total(optree.tree_unflatten(self.spec, leaves), batch))

    def check(self, got: Tree, expected: list[Tensor], tolerance: float, what: str) -> None:
        compare(ya.unshard(got), optree.tree_unflatten(self.spec, expected), tolerance, what)


def gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def first_order(mesh: Any, name: str) -> None:
    s = Setting(mesh, name)
    own, everything = batch_of(s.rank), global_batch(s.ranks)
    expected, value = s.of_leaves(grad_and_value)(s.leaves, everything)
    expected = s.share(expected)
    s.check(grad(s.total)(s.sharded, own), expected, 1e-6, f"{name}: grad")

    got, got_value = grad_and_value(s.total)(s.sharded, own)
    s.check(got, expected, 1e-6, f"{name}: grad_and_value")
    compare(got_value, s.total(s.plain, own), 1e-6, f"{name}: value")

    out, backward = vjp(lambda params: s.total(params, own), s.sharded)
    for scale in (1.0, 2.0):
        s.check(backward(torch.full_like(out, scale))[0], [scale * g for g in expected], 1e-6, f"{name}: vjp")

    leaves = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), s.sharded)
    s.total(leaves, own).backward()
    s.check(optree.tree_map(gradient_of, leaves), expected, 1e-6, f"{name}: backward to leaves of our own")

    if s.ranks == 1:
        compare(got_value, value, 0.0, f"{name}: bits of the value")


@on_ranks()
@pytest.mark.parametrize(
    ("world", "names"),
    [(1, NAMES[::2]), (2, NAMES[1::2]), (3, NAMES[::4]), *(nightly(world, NAMES) for world in (1, 2, 3))],
)
def test_grad_and_vjp(mesh: Any, names: tuple[str, ...]) -> None:
    for name in names:
        first_order(mesh, name)


@on_ranks(1, 2, 3)
def test_grad_with_dropout(mesh: Any) -> None:
    """Outside a session blocks draw from the default generator, and draw the same again when they are recomputed."""
    s = Setting(mesh, "dropout")
    torch.manual_seed(s.rank)
    got = grad(s.total)(s.sharded, batch_of(s.rank))
    expected = [torch.zeros_like(leaf) for leaf in s.leaves]
    for rank in range(s.ranks):
        torch.manual_seed(rank)
        expected = [a + b for a, b in zip(expected, s.of_leaves(grad)(s.leaves, batch_of(rank)), strict=True)]
    s.check(got, s.share(expected), 1e-6, "dropout: grad")


def rows(batch: Batch) -> Batch:
    return {key: value.unsqueeze(1) for key, value in batch.items()}


@on_ranks(1, 2)
def test_vmap_with_dropout(mesh: Any) -> None:
    """Each row draws numbers of its own, or none may be drawn."""
    s, found = Setting(mesh, "dropout"), []
    own = rows(batch_of(s.rank))
    for params in (s.sharded, s.plain):
        torch.manual_seed(0)
        found.append(vmap(s.total, in_dims=(None, 0), randomness="different")(params, own))
    compare(*found, 1e-6, "dropout: vmap")
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(s.total, in_dims=(None, 0))(s.sharded, own)


def forward_mode(mesh: Any, name: str) -> None:
    s = Setting(mesh, name)
    own = batch_of(s.rank)
    got = jvp(lambda params: s.total(params, own), (s.sharded,), (s.sharded_tangents,))
    f = s.of_leaves(lambda f: f)
    expected = jvp(lambda leaves: f(leaves, own), (s.leaves,), (s.tangents,))
    compare(got, expected, 1e-5, f"{name}: jvp")


def per_example(mesh: Any, name: str) -> None:
    """Gradients of each row of the batch; those of equal place in the batch are averaged over ranks."""
    s = Setting(mesh, name)
    got = vmap(grad(s.total), in_dims=(None, 0))(s.sharded, rows(batch_of(s.rank)))
    plain_rows = s.of_leaves(lambda f: vmap(grad(f), in_dims=(None, 0)))
    of_ranks = [plain_rows(s.leaves, rows(batch_of(rank))) for rank in range(s.ranks)]
    for row in range(3):
        expected = [sum(leaf[row] for leaf in leaves) for leaves in zip(*of_ranks, strict=True)]
        s.check(optree.tree_map(lambda g, at=row: g[at], got), s.share(expected), 1e-5, f"{name}: row {row}")


def curvature(f: Callable[[Any], Tensor], at: Any, along: Any) -> Tensor:
    """The second derivative of `f` along a direction."""
    slope: Tensor = jvp(lambda here: jvp(f, (here,), (along,))[1], (at,), (along,))[1]
    return slope


def second_order(mesh: Any, name: str) -> None:
    s = Setting(mesh, name)
    own, everything = batch_of(s.rank), global_batch(s.ranks)
    f = s.of_leaves(lambda f: f)
    expected = s.share(jvp(lambda leaves: grad(f)(leaves, everything), (s.leaves,), (s.tangents,))[1])
    got = jvp(lambda params: grad(s.total)(params, own), (s.sharded,), (s.sharded_tangents,))[1]
    s.check(got, expected, 1e-5, f"{name}: jvp of grad")

    def along(params: Tree) -> Tensor:
        return ya.vdot(grad(s.total)(params, own), s.sharded_tangents)

    s.check(grad(along)(s.sharded), expected, 1e-5, f"{name}: grad of grad")

    expected = curvature(lambda leaves: f(leaves, own), s.leaves, s.tangents)
    got = curvature(lambda params: s.total(params, own), s.sharded, s.sharded_tangents)
    compare(got, expected, 1e-5, f"{name}: jvp of jvp")


@on_ranks(1, 2)
@pytest.mark.parametrize("check", [forward_mode, per_example, second_order])
@pytest.mark.parametrize(
    "names",
    [("base", "rich", "twice"), nightly(NAMES)],
    ids=["some visits", "all visits"],
)
def test_other_transforms(mesh: Any, names: tuple[str, ...], check: Callable[[Any, str], None]) -> None:
    for name in names:
        check(mesh, name)
