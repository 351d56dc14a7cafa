"""scan and apply: `jax.lax.scan`'s semantics on plain tensors, and the same to the bit on a sharded state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import yafsdp_fn as ya
from tests.harness import small
from tests.harness.small import E, L, Model, assert_close, assert_equal, block, model, one_rank, param
from yafsdp_fn.params.sharded import trainable

TX = ya.optim.sgd(0.1)


def reference(f: Any, carry: Any, xs: Any, length: int, reverse: bool, consts: Any) -> tuple[Any, Any]:
    """`jax.lax.scan`, spelled out with indices."""
    ys: list[Any] = [None] * length
    for i in reversed(range(length)) if reverse else range(length):
        x = optree.tree_map(lambda leaf, i=i: leaf[i], xs)
        carry, ys[i] = f(carry, x) if consts == () else f(carry, x, consts)
    return carry, optree.tree_map(lambda *rows: torch.stack(rows), *ys)


class Carry(NamedTuple):
    x: Tensor
    seen: Any


def start() -> Carry:
    return Carry(torch.linspace(-1, 1, 6).view(2, 3), {"count": torch.zeros((), dtype=torch.int64), "none": None})


def body(carry: Carry, x: Any, scale: Any = None) -> tuple[Carry, Any]:
    """Order-dependent, with a pytree for everything."""
    h = torch.tanh(carry.x @ x["w"] + x["more"][0])
    if scale is not None:
        h = h * scale["s"]
    return Carry(h, {"count": 2 * carry.seen["count"] + 1, "none": None}), {"mean": h.mean(), "skip": None, "h": [h]}


def inputs(length: int = 4) -> Any:
    generator = torch.Generator().manual_seed(length)
    w, more = (torch.randn(length, *shape, generator=generator, requires_grad=True) for shape in ((3, 3), (3,)))
    return {"w": w, "more": (more,)}


ORDERS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def check_scan(xs: Any, taken: Any, count: int, reverse: bool, unroll: int, consts: Any = (), **options: Any) -> None:
    """A scan of `xs` is the loop over `taken`, of so many layers: its values, structure and gradients."""
    got = ya.scan(body, start(), xs, reverse=reverse, unroll=unroll, consts=consts, **options)
    want = reference(body, start(), taken, count, reverse, consts)
    assert optree.tree_structure(got) == optree.tree_structure(want)
    assert type(got[0]) is Carry
    assert got[1]["skip"] is None
    assert got[1]["mean"].shape == (count,)
    assert_equal(got, want)
    wanted = [*optree.tree_leaves(xs), *optree.tree_leaves(consts)]
    grads = [torch.autograd.grad(out[0].x.sum() + out[1]["h"][0].square().sum(), wanted) for out in (got, want)]
    assert_close(grads[0], grads[1])


@settings(max_examples=40)
@given(st.integers(1, 5), st.booleans(), st.integers(1, 7), st.booleans(), st.booleans())
def test_scan_is_the_loop(length: int, reverse: bool, unroll: int, with_consts: bool, say_length: bool) -> None:
    xs = inputs(length)
    consts: Any = {"s": torch.tensor(1.5, requires_grad=True)} if with_consts else ()
    options: Any = {"length": length} if say_length else {}
    check_scan(xs, xs, length, reverse, unroll, consts, **options)


@settings(max_examples=25)
@given(ORDERS, st.booleans(), st.integers(1, 3))
def test_an_order_is_the_loop_over_the_layers_that_it_names(order: list[int], reverse: bool, unroll: int) -> None:
    xs = inputs()
    taken = optree.tree_map(lambda x: x[order], xs)
    check_scan(xs, taken, len(order), reverse, unroll, order=iter(order))


def test_length_alone() -> None:
    carry, ys = ya.scan(lambda c, x: (c + 1, c), torch.zeros(()), None, length=3)
    assert carry == 3
    assert ys.tolist() == [0, 1, 2]


def test_markers_are_stripped_from_everything_that_f_sees() -> None:
    seen = []

    def f(c: Tensor, x: Any, k: Any) -> tuple[Tensor, None]:
        seen.append((x, k))
        return c, None

    xs = ya.Stacked({"a": ya.Unit(torch.ones(2, 3)), "b": ya.frozen(torch.zeros(2))})
    ya.scan(f, torch.ones(()), xs, consts={"k": ya.frozen(torch.ones(1))})
    assert len(seen) == 2
    assert all(isinstance(x["a"], Tensor) and isinstance(k["k"], Tensor) for x, k in seen)
    assert ya.apply(lambda weights: weights, ya.Unit({"w": ya.frozen(torch.ones(2))})).keys() == {"w"}


def test_numbers_as_ys_are_stacked() -> None:
    _, ys = ya.scan(lambda c, x: (c, {"n": 3, "b": True}), torch.zeros(()), torch.zeros(2))
    assert ys["n"].tolist() == [3, 3]
    assert ys["b"].dtype == torch.bool


# ---- one rank, sharded: the same bits


def states(tree: Any = None) -> tuple[Any, Any]:
    """The same parameters, sharded and plain; those that `inputs` are like, if no tree is given."""
    like_inputs = {"s": ya.Stacked({"w": param(4, 3, 3), "more": (param(4, 3),)})}
    return small.states(like_inputs if tree is None else tree, seed=1)


def visits(loss: Callable[[Any], Tensor], params: Any) -> list[str]:
    """Names of the visits of a loss."""
    seen: list[str] = []
    step = ya.train_step(lambda p, _: loss(p), TX)
    for visit in step.trace(params, None).visits:
        seen.append(visit.name)
    return seen


def test_visits_are_named_after_the_layers() -> None:
    state = ya.init(model(5), TX, mesh=one_rank())

    def loss(params: Model, unroll: int, reverse: bool) -> Tensor:
        x = ya.apply(lambda e: e["weight"][:2], params.embed)
        return ya.scan(block, x, params.layers, unroll=unroll, reverse=reverse)[0].sum()

    assert visits(lambda p: loss(p, 1, True), state) == ["embed", *(f"layers[{i}]" for i in (4, 3, 2, 1, 0))]
    names = visits(lambda p: loss(p, 2, False), state)
    assert len(names) == 4
    assert names[-1] == "layers[4]"

    def of(order: list[int], unroll: int) -> list[str]:
        return visits(lambda p: ya.scan(block, torch.ones(2, E), p.layers, order=order, unroll=unroll)[0].sum(), state)

    assert of([0, 2, 4], 1) == ["layers[0]", "layers[2]", "layers[4]"]
    assert of([1, 2, 3, 3, 2, 0, 4], 3) == ["layers[1:3]", "layers[3,2,0]", "layers[4]"]
    assert of([1, 1, 3, 2], 2) == ["layers[1,1]", "layers[3:2]"]


def test_each_layer_runs_once_without_grad() -> None:
    sharded, plain = states()
    calls = []

    def f(carry: Carry, x: Any) -> tuple[Carry, Any]:
        calls.append(1)
        return body(carry, x)

    outs = []
    for params in (sharded, plain):
        calls.clear()
        with torch.no_grad():
            outs.append(ya.scan(f, start(), params["s"]))
        assert len(calls) == 4
    assert_equal(*outs)


# ---- a KV cache, written in place


def cached(carry: Tensor, x: Any) -> tuple[Tensor, None]:
    weights, cache = x
    h = torch.tanh(carry @ weights["w"])
    cache[:, 1] = h
    return carry + cache.sum(1), None


def test_a_cache_in_xs_is_written_in_place() -> None:
    sharded, plain = states({"s": ya.Stacked({"w": param(L, 4, 4)})})
    carries = []
    caches = []
    for params in (sharded, plain):
        cache = torch.arange(L * 2 * 3 * 4.0).view(L, 2, 3, 4)
        with torch.no_grad():
            carries.append(ya.scan(cached, torch.ones(2, 4), (params["s"], cache))[0])
        caches.append(cache)
    assert_equal(carries[0], carries[1])
    assert_equal(caches[0], caches[1])
    assert caches[0][:, :, 1].abs().max() <= 1
    assert torch.equal(caches[0][0, 0, 0], torch.arange(4.0))


def test_a_block_that_writes_into_its_arguments_is_refused_where_it_would_be_wrong() -> None:
    sharded, _ = states({"s": ya.Stacked({"w": param(L, 4, 4)})})

    def loss(params: Any, cache: Tensor) -> Tensor:
        return ya.scan(cached, torch.ones(2, 4), (params["s"], cache))[0].sum()

    with pytest.raises(RuntimeError, match=r"s\[0\]: the block writes into an argument of shape \(2, 3, 4\) in place"):
        ya.value_and_grad(loss)(sharded, torch.zeros(L, 2, 3, 4))


def test_a_scan_over_moments_leaves_out_what_is_frozen() -> None:
    stack = {"base": ya.frozen(param(3, 5)), "gain": ya.Pinned(param(3, 7)), "w": param(3, 4)}
    state = ya.init({"s": ya.Stacked(stack)}, TX, mesh=one_rank())
    moments = ya.normal_like(0, trainable(state.params))["s"]
    _, ys = ya.scan(lambda c, m: (c, optree.tree_map(torch.clone, m)), None, moments)
    assert ys["base"] is None
    assert_equal(ys, moments)


# ---- apply


def test_apply_takes_a_pytree_of_units() -> None:
    tree = {"a": {"w": param(3, 2)}, "b": {"w": param(2)}}
    sharded, plain = states(tree)

    def loss(params: Any, x: Tensor, *, tail: Tensor) -> Tensor:
        units = {"one": params["a"], "more": [params["b"], ya.Unit({"t": tail})]}
        return ya.apply(lambda u, x: (x @ u["one"]["w"] + u["more"][0]["w"]).sum() * u["more"][1]["t"], units, x)

    both = ya.value_and_grad(loss)
    for _ in range(2):
        got, want = (both(p, torch.ones(2, 3), tail=torch.tensor(2.0)) for p in (sharded, plain))
        assert_close(got, want)


def test_apply_returns_any_pytree() -> None:
    sharded, plain = states({"a": {"w": param(3)}})
    for params in (sharded, plain):
        out = ya.apply(lambda u, k: {"x": (u["w"] * k, None, 3), "n": "text"}, params["a"], 2)
        assert out["n"] == "text"
        assert out["x"][1:] == (None, 3)
        assert out["x"][0].shape == (3,)
