"""Each public collective on ranks, against what it is of the tensors of all ranks; its adjoint, and transforms."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.axes.model import mesh_of
from tests.harness.pool import on_ranks
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.util.randomness import acting_over

UNEVEN = [[1, 3], [2, 0]]  # rows from rank to rank

CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], Callable[[list[Tensor], int], Tensor]]] = {
    "psum": ((2, 3), lambda x: ya.psum(x, "tensor"), lambda xs, _: xs[0] + xs[1]),
    "psum of a scalar": ((), lambda x: ya.psum(x, "tensor"), lambda xs, _: xs[0] + xs[1]),
    "all_gather": ((2, 3), lambda x: ya.all_gather(x, "tensor", axis=1), lambda xs, _: torch.stack(xs, 1)),
    "all_gather, tiled": (
        (2, 3),
        lambda x: ya.all_gather(x, "tensor", axis=-1, tiled=True),
        lambda xs, _: torch.cat(xs, 1),
    ),
    "psum_scatter": (
        (3, 2),
        lambda x: ya.psum_scatter(x, "tensor", scatter_dimension=1),
        lambda xs, rank: (xs[0] + xs[1])[:, rank],
    ),
    "psum_scatter, tiled": (
        (3, 4),
        lambda x: ya.psum_scatter(x, "tensor", scatter_dimension=-1, tiled=True),
        lambda xs, rank: (xs[0] + xs[1])[:, 2 * rank : 2 * rank + 2],
    ),
    "all_to_all": (
        (3, 2, 5),
        lambda x: ya.all_to_all(x, "tensor", 1, 0),
        lambda xs, rank: torch.stack([x[:, rank] for x in xs], 0),
    ),
    "all_to_all, tiled": (
        (3, 4),
        lambda x: ya.all_to_all(x, "tensor", 1, 0, tiled=True),
        lambda xs, rank: torch.cat([x[:, 2 * rank : 2 * rank + 2] for x in xs], 0),
    ),
    "ppermute": ((2, 3), lambda x: ya.ppermute(x, "tensor", [(0, 1), (1, 0)]), lambda xs, rank: xs[1 - rank]),
    "ppermute to one": (
        (2, 3),
        lambda x: ya.ppermute(x, "tensor", [(0, 1)]),
        lambda xs, rank: xs[0] if rank else torch.zeros_like(xs[0]),
    ),
}


def drawn(shape: tuple[int, ...], rank: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7 + rank), dtype=torch.float64)


def of_all(mesh: Any, x: Tensor) -> Tensor:
    """The sum over ranks, made beside the library."""
    out = x.detach().clone()
    torch.distributed.all_reduce(out)
    return out


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_a_collective_and_its_derivatives(_: Any, name: str) -> None:
    mesh = mesh_of(tensor=2)
    shape, call, want = CASES[name]
    rank = mesh.get_rank()
    xs = [drawn(shape, r) for r in range(2)]
    with acting_over(communicators(mesh)):
        assert ya.axis_size("tensor") == 2
        assert ya.axis_index("tensor") == rank
        assert ya.axis_size("context") == 1
        assert ya.axis_index("context") == 0
        x = xs[rank].clone().requires_grad_()
        out = call(x)
        torch.testing.assert_close(out, want(xs, rank), rtol=0, atol=1e-15)
        # the adjoint: <C x, y> = <x, C* y>, summed over ranks
        y = drawn(tuple(out.shape), 10 + rank)
        (back,) = torch.autograd.grad(out, x, y, create_graph=True)
        torch.testing.assert_close(of_all(mesh, (out * y).sum()), of_all(mesh, (x * back).sum()))
        # linear: a derivative along v is C v, in forward and in reverse over forward
        v = drawn(shape, 20 + rank)
        _, along = torch.func.jvp(call, (xs[rank],), (v,))
        torch.testing.assert_close(along, call(v))
        _, pull = torch.func.vjp(call, xs[rank])
        torch.testing.assert_close(pull(y)[0], back.detach())
        # second order: of the square, through both passes
        twice = torch.func.grad(lambda x: (torch.func.grad(lambda x: (call(x) ** 3).sum())(x) * v).sum())
        x = xs[rank].clone().requires_grad_()
        (first,) = torch.autograd.grad((call(x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * v).sum(), x)
        torch.testing.assert_close(twice(xs[rank]), second)
        # a batch of them
        many = torch.stack([xs[rank], v, -v])
        torch.testing.assert_close(torch.vmap(call)(many), torch.stack([call(each) for each in many]))


@pytest.mark.parametrize("name", CASES)
def test_on_plain_tensors_an_axis_has_one_rank(name: str) -> None:
    call = CASES[name][1]
    if name == "ppermute to one":
        assert not ya.ppermute(torch.ones(2), "tensor", []).any()
        return
    if name == "ppermute":
        assert torch.equal(ya.ppermute(torch.ones(2), "tensor", [(0, 0)]), torch.ones(2))
        return
    shape: tuple[int, ...] = (3, 1, 5) if name in ("all_to_all", "psum_scatter") else (3, 4)
    x = drawn(shape, 0)
    one: dict[str, Tensor] = {
        "all_gather": x.unsqueeze(1),
        "psum_scatter": x.squeeze(1),
        "all_to_all": x.movedim(1, 0),
    }
    assert torch.equal(call(x), one.get(name, x))
    assert ya.axis_size("tensor") == 1
    assert ya.axis_index("tensor") == 0


@on_ranks(2)
def test_maxima_trees_uneven_parts_and_large_tensors(_: Any) -> None:
    mesh = mesh_of(tensor=2)
    rank = mesh.get_rank()
    with acting_over(communicators(mesh)):
        top = ya.pmax(torch.tensor([rank, -rank]), "tensor")
        assert top.tolist() == [1, 0]
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(NotImplementedError, match=r"pmax has no derivative, as in JAX: give it x.detach\(\)"):
            ya.pmax(x, "tensor").sum().backward()
        with pytest.raises(NotImplementedError, match="pmax has no derivative"):
            torch.func.jvp(lambda x: ya.pmax(x, "tensor"), (x.detach(),), (x.detach(),))
        both = ya.psum({"a": torch.ones(2), "b": 3}, "tensor")
        assert both["a"].tolist() == [2, 2]
        assert both["b"] == 6
        # uneven parts, and back
        rows = drawn((sum(UNEVEN[rank]), 2), rank).requires_grad_()
        sizes = {"split_sizes": UNEVEN[rank], "concat_sizes": [UNEVEN[k][rank] for k in range(2)]}
        got = ya.all_to_all(rows, "tensor", 0, 0, tiled=True, **sizes)
        all_rows = [drawn((sum(UNEVEN[r]), 2), r).split(UNEVEN[r])[rank] for r in range(2)]
        assert torch.equal(got, torch.cat(all_rows))
        (back,) = torch.autograd.grad(got, rows, got.detach())
        assert torch.equal(back, rows.detach())
        # large tensors, which gloo groups treat otherwise
        large = torch.full((1 << 18,), float(rank + 1))
        assert torch.equal(ya.psum(large, "tensor"), torch.full_like(large, 3.0))


@on_ranks(2, 3, 4)
def test_bools_are_counted_and_integers_stay(every: Any) -> None:
    ranks = every.size()
    rank = every.get_rank()
    mine = slice(2 * rank, 2 * rank + 2)
    uneven = {"split_sizes": [2] * ranks, "concat_sizes": [2] * ranks}

    def of(rank: int, dtype: torch.dtype) -> Tensor:
        """Bools: true in place k of ranks k and beyond; numbers, whose sums are 201 to 406: int8 and uint8 wrap."""
        numbers = torch.full((2 * ranks,), 100 + rank)
        return torch.arange(2 * ranks) % ranks <= rank if dtype == torch.bool else numbers.to(dtype)

    def told(x: Tensor, dtype: torch.dtype, want: Tensor) -> None:
        assert x.dtype == dtype
        assert x.tolist() == want.to(dtype).tolist()

    with acting_over(communicators(mesh_of(tensor=ranks))):
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
            given = of(rank, dtype)
            all_of = torch.stack([of(r, dtype) for r in range(ranks)])
            total = all_of.long().sum(0)
            counted = torch.int64 if dtype == torch.bool else dtype
            told(ya.psum(given, "tensor"), counted, total)
            told(ya.psum_scatter(given, "tensor", tiled=True), counted, total[mine])
            told(torch.vmap(lambda x: ya.psum(x, "tensor"))(given[None])[0], counted, total)
            told(ya.pmax(given, "tensor"), dtype, all_of.amax(0))
            told(ya.all_gather(given, "tensor"), dtype, all_of)
            parts = all_of[:, mine].flatten()
            told(ya.all_to_all(given, "tensor", 0, 0, tiled=True), dtype, parts)
            told(ya.all_to_all(given, "tensor", 0, 0, tiled=True, **uneven), dtype, parts)
            there = all_of[0] if rank == ranks - 1 else torch.zeros_like(given)
            told(ya.ppermute(given, "tensor", [(0, ranks - 1)]), dtype, there)
        assert ya.psum({"a": True, "b": of(rank, torch.bool)[0]}, "tensor") == {"a": ranks, "b": ranks}
        large = ya.psum(torch.ones(3 << 20, dtype=torch.bool), "tensor")  # which gloo groups treat otherwise
        assert large.dtype == torch.int64
        assert bool((large == ranks).all())


def test_bools_of_one_rank_are_counted() -> None:
    for found in (ya.psum(torch.tensor([True]), "tensor"), ya.psum_scatter(torch.tensor([True]), "tensor")):
        assert found.dtype == torch.int64
        assert bool((found == 1).all())
    assert type(ya.psum(True, "tensor")) is int
    assert ya.psum(torch.ones(1, dtype=torch.int8), "tensor").dtype == torch.int8


@on_ranks(2, 4)
def test_a_thread_does_not_know_the_mesh(every: Any) -> None:
    ranks = every.size()
    mesh = mesh_of(tensor=ranks)
    x = torch.ones(2)
    state = ya.init({"a": {"w": ya.Param((2,))}}, ya.optim.sgd(0.1), mesh=mesh)

    def block(w: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            found: Tensor = threads.submit(ya.psum, w["w"] * x, "tensor").result()
        return found

    def loss(p: Any, x: Tensor) -> Tensor:
        return ya.apply(block, p["a"], x).sum()

    for function in (
        lambda: ya.train_step(loss, ya.optim.sgd(0.1))(state, x),
        lambda: ya.eval_step(loss)(state.params, x),
        lambda: ya.functional_loss(loss)(state.params, x),
    ):
        with pytest.raises(RuntimeError, match=r"a collective over 'tensor' in a thread of its own, .* Call it in the"):
            function()
    with acting_over(communicators(mesh)), ThreadPoolExecutor(1) as threads:
        assert threads.submit(ya.axis_size, "context").result() == 1  # an axis that is not split: plain tensors beside
        within = copy_context()
        assert threads.submit(within.run, ya.axis_size, "tensor").result() == ranks
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(ya.psum, 3, "tensor").result() == 3  # nothing runs beside it


@on_ranks(2)
def test_what_cannot_be_is_refused_by_name(_: Any) -> None:
    mesh = mesh_of(tensor=2)
    x = torch.ones(3, 2)
    uneven = partial(ya.all_to_all, x, "tensor", 0, 0, tiled=True)
    with acting_over(communicators(mesh)):
        for call, text in (
            (lambda: ya.psum(x, "shard"), r"'shard': expected the name of one axis inside blocks"),
            (
                lambda: ya.psum(x, "tensro"),
                r"axis 'tensro' is not on this mesh, which has tensor .* ya.mesh\(tensro=1\)",
            ),
            (
                lambda: ya.psum_scatter(x, "tensor", tiled=True),
                r"psum_scatter: scatter_dimension=0 of a tensor \(3, 2\) is 3 long",
            ),
            (
                lambda: ya.all_to_all(torch.ones(3, 4), "tensor", 1, 0),
                r"all_to_all: split_axis=1 of a tensor .* should be 2, or tiled=True",
            ),
            (lambda: ya.all_gather(x, "tensor", axis=4), "all_gather: axis=4 of a tensor with 3 axes"),
            (lambda: ya.ppermute(x, "tensor", [(0, 2)]), r"expected pairs .* of ranks 0 to 1 of tensor"),
            (lambda: uneven(split_sizes=[1, 2]), "uneven parts need both split_sizes and concat_sizes"),
            (
                lambda: uneven(split_sizes=[3], concat_sizes=[3]),
                "expected 2 sizes each, one for each rank of tensor",
            ),
            (
                lambda: uneven(split_sizes=[1, 1], concat_sizes=[1, 1]),
                r"is not as long as split_sizes=\(1, 1\)",
            ),
        ):
            with pytest.raises(ValueError, match=text):
                call()


def test_a_backward_does_not_know_the_mesh() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return ya.psum(grad, "tensor")

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"a collective over 'tensor' in a backward pass .* remat= of a schedule"):
        Own.apply(x).sum().backward()
