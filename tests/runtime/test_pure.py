"""The pure path: torch.func over a sharded loss, exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, func

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import (
    B,
    Model,
    assert_close,
    assert_equal,
    batch,
    block,
    dropout_block,
    embed,
    head,
    loss,
    model,
    one_rank,
)
from yafsdp_fn.runtime.pure import Rematerialised

TX = ya.optim.sgd(0.1)


def states(seed: int = 0) -> tuple[Any, Any]:
    state = ya.init(model(), TX, mesh=one_rank(), seed=seed)
    return state.params, ya.unshard(state)


def scalar(params: Model, b: Any) -> Tensor:
    mean = loss(params, b)
    return mean.total / mean.weight


def both(run: Callable[[Any, Any], Any], rtol: float = 1e-5) -> None:
    """`run(params, direction)` gives the same on sharded and on plain parameters."""
    (sharded, plain), (along, plain_along) = states(0), states(1)
    assert_close(run(sharded, along), run(plain, plain_along), rtol=rtol, atol=1e-6)


def test_forward_alone_outside_any_step() -> None:
    both(lambda p, _: scalar(p, batch()))
    with torch.no_grad():
        both(lambda p, _: scalar(p, batch()))


def test_grad() -> None:
    both(lambda p, _: func.grad(scalar)(p, batch()))


def test_the_gradient_comes_first_in_torch_func() -> None:
    sharded, _ = states()
    grads, value = func.grad_and_value(scalar)(sharded, batch())
    want_value, want = ya.value_and_grad(loss)(sharded, batch())
    assert_close(value, want_value)
    assert_close(grads, want, rtol=1e-5)


def test_vjp_called_twice() -> None:
    def run(p: Any, _: Any) -> Any:
        value, back = func.vjp(lambda q: scalar(q, batch()), p)
        return value, back(torch.tensor(1.0))[0], back(torch.tensor(2.0))[0]

    both(run)


def test_jvp() -> None:
    both(lambda p, v: func.jvp(lambda q: scalar(q, batch()), (p,), (v,)))


def test_vmap_over_the_batch() -> None:
    def one(p: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss(p, {"tokens": tokens[None], "targets": targets[None]}).total

    b = batch()
    both(lambda p, _: torch.vmap(one, in_dims=(None, 0, 0))(p, b["tokens"], b["targets"]))
    # gradients per example
    each = torch.vmap(func.grad(one), in_dims=(None, 0, 0))
    sharded, plain = states()
    got, want = (each(p, b["tokens"], b["targets"]) for p in (sharded, plain))
    for row in range(B):
        assert_close(
            optree.tree_map(lambda x, row=row: x[row], got), optree.tree_map(lambda x, row=row: x[row], want), 1e-5
        )


def test_second_order() -> None:
    both(lambda p, v: func.jvp(lambda q: func.grad(scalar)(q, batch()), (p,), (v,))[1], rtol=1e-4)

    def dot(p: Any, v: Any) -> Tensor:
        pairs = zip(optree.tree_leaves(func.grad(scalar)(p, batch())), optree.tree_leaves(v), strict=True)
        return torch.stack([(a * b).sum() for a, b in pairs]).sum()

    both(lambda p, v: func.grad(dot)(p, v), rtol=1e-4)


def test_jacobians() -> None:
    def two(p: Any) -> Tensor:
        value = scalar(p, batch())
        return torch.stack([value, value.square()])

    sharded, plain = states()
    got, want = func.jacrev(two)(sharded), func.jacrev(two)(plain)
    for row in range(2):
        assert_close(
            optree.tree_map(lambda x, row=row: x[row], got), optree.tree_map(lambda x, row=row: x[row], want), 1e-5
        )


def test_a_hessian_in_two_numbers() -> None:
    b = batch()

    def along(s: Tensor, p: Any) -> Tensor:
        return scalar(optree.tree_map(lambda x: x * (1 + s[0]) + 0.1 * s[1] * x.square(), p), b)

    both(lambda p, _: func.hessian(along)(torch.zeros(2), p), rtol=1e-3)


def test_plain_autograd_on_the_shards() -> None:
    sharded, plain = states()
    leaves = [leaf.detach().requires_grad_() for leaf in optree.tree_leaves(sharded)]
    tree = optree.tree_unflatten(optree.tree_structure(sharded), leaves)
    grads = torch.autograd.grad(scalar(tree, batch()), leaves)
    found = optree.tree_unflatten(optree.tree_structure(sharded), grads)
    assert_close(found, func.grad(scalar)(plain, batch()), rtol=1e-5)


def test_a_transform_inside_a_step() -> None:
    """A gradient penalty: the inner gradient takes the pure path, the rest of the loss the slots."""

    def penalised(p: Model, b: Any) -> Tensor:
        grads = func.grad(scalar)(p, b)
        return scalar(p, b) + 0.1 * torch.stack([g.square().sum() for g in optree.tree_leaves(grads)]).sum()

    sharded, plain = states()
    differentiate = ya.value_and_grad(penalised)
    for _ in range(2):
        assert_close(differentiate(sharded, batch()), differentiate(plain, batch()), rtol=1e-4, atol=1e-6)


def test_a_cache_is_written_in_place_outside_a_step() -> None:
    def layer(c: Tensor, x: Any) -> Any:
        weights, cache = x
        cache[0] = c
        return block(c, weights)

    caches = []
    for params in states():
        cache = torch.zeros(3, 2, 5)
        with torch.no_grad():
            ya.scan(layer, torch.ones(5), (params.layers, cache))
        caches.append(cache)
    assert_close(*caches)
    assert caches[0][:, 0].ne(0).all() and caches[0][:, 1].eq(0).all()


def test_dropout_is_replayed_in_the_backward() -> None:
    """Every element's gradient says which were dropped; it must be those of the forward."""
    sharded, _ = states()

    def dropped(x: Tensor) -> Tensor:
        return ya.scan(lambda c, w: (torch.nn.functional.dropout(c, 0.5), None), x, sharded.layers)[0]

    x = torch.ones(64, requires_grad=True)
    out = dropped(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out.detach(), slope) and 0 < int((out == 0).sum()) < 64
    ambient = torch.get_rng_state()
    out = dropped(x)
    middle = torch.get_rng_state()
    torch.autograd.grad(out.sum(), x)
    assert not torch.equal(ambient, middle) and torch.equal(torch.get_rng_state(), middle)


def test_views_of_the_weights_are_refused() -> None:
    sharded, _ = states()
    with pytest.raises(RuntimeError, match=r"layers\[0\]: an output .* is a view of the block's weights"):
        ya.scan(lambda c, w: (c, w["up"]), torch.ones(1), sharded.layers)


def test_shards_of_another_size_are_refused() -> None:
    sharded, _ = states()
    short = optree.tree_map(lambda x: x[..., :-8], sharded.head)
    with pytest.raises(
        ValueError, match=r"head: a local shard of head is torch.float32 \(56,\), expected shape \(64,\)"
    ):
        ya.apply(lambda w: w["norm"] * 1, short)


def test_only_arguments_are_saved() -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def heavy(x: Tensor) -> tuple[Tensor]:
        return (torch.cat([x.exp() for _ in range(50)]).square().sum(),)

    x = torch.linspace(0, 1, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (out,) = Rematerialised.apply(heavy, x)
    assert saved == [4]
    (got,) = torch.autograd.grad(out, x)
    assert torch.allclose(got, 50 * 2 * (2 * x).exp())


def test_integers_pass_through_a_recomputed_block() -> None:
    def f(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x[index] * 2, index + 1

    x, index = torch.arange(4.0, requires_grad=True), torch.tensor([0, 2])
    out, after = Rematerialised.apply(f, x, index)
    assert after.tolist() == [1, 3] and not after.requires_grad
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [2, 0, 2, 0]


# ---- between ranks


@on_ranks(1, 2)
def test_a_sharded_gradient_is_that_of_the_mean_over_ranks(mesh: Any) -> None:
    state = ya.init(model(), TX, mesh=mesh)
    plain = ya.unshard(state)
    rank = mesh.get_local_rank()
    got = func.grad(scalar)(state.params, batch(rank))
    want = [func.grad(scalar)(plain, batch(r)) for r in range(mesh.size())]
    assert_close(got, optree.tree_map(lambda *grads: sum(grads) / len(grads), *want), rtol=1e-5, atol=1e-6)


def test_dropout_of_a_block_under_grad() -> None:
    sharded, plain = states()

    def dropped(p: Model, b: Any) -> Tensor:
        x = ya.apply(embed, p.embed, b["tokens"])
        x, _ = ya.scan(dropout_block, x, p.layers)
        mean = ya.apply(head, p.head, x, b["targets"])
        return mean.total

    torch.manual_seed(5)
    got = func.grad_and_value(dropped)(sharded, batch())
    torch.manual_seed(5)
    want = func.grad_and_value(dropped)(plain, batch())
    assert_equal(got[1], want[1])
    assert_close(got[0], want[0], rtol=1e-5)
