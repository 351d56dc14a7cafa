"""chunk: equal to the function on each slice, in every transform and every mode; what it keeps; what it refuses."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func

import yafsdp_fn as ya
from tests.harness import small
from tests.harness.marks import by_name
from tests.harness.small import assert_close, assert_equal

N = 4


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = double(8, 5)
W = double(5, 5, seed=1)


def block(x: Tensor, w: Tensor) -> tuple[Tensor, None]:
    return torch.tanh(x @ w), None


def scalar(f: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: f(x, w)[0].square().sum()


chunked = ya.chunk(block, N, in_axes=(0, None))


# ---- values and gradients


def test_gradients_of_weights_are_added_in_chunk_order() -> None:
    x = torch.randn(64, 33)
    w = torch.randn(33, 33)
    leaf = w.clone().requires_grad_()
    x_leaf = x.clone().requires_grad_()
    chunked(x_leaf, leaf)[0].square().sum().backward()
    parts = []
    rows = []
    for part in x.split(64 // N):
        own = w.clone().requires_grad_()
        rows_of = part.clone().requires_grad_()
        block(rows_of, own)[0].square().sum().backward()
        parts.append(own.grad)
        rows.append(rows_of.grad)
    in_order = parts[0]
    backwards = parts[-1]
    for k in range(1, N):
        in_order = in_order + parts[k]
        backwards = backwards + parts[-1 - k]
    assert torch.equal(leaf.grad, in_order)
    assert not torch.equal(in_order, backwards)
    assert torch.equal(x_leaf.grad, torch.cat(rows))


def vmapped(f: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
    return func.vmap(f, (None, 0))(X, torch.stack([w, 2 * w]))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor, Tensor], Tensor]], Any]] = {
    "grad": lambda f: func.grad(f, (0, 1))(X, W),
    "vjp": lambda f: func.vjp(f, X, W)[1](torch.tensor(2.0, dtype=torch.float64)),
    "jvp": lambda f: func.jvp(f, (X, W), (X.cos(), W.sin())),
    "jacrev": lambda f: func.jacrev(lambda x, w: torch.stack([f(x, w), f(x, w).sqrt()]), (0, 1))(X, W),
    "jacfwd": lambda f: func.jacfwd(f, 1)(X, W),
    "hessian of weights": lambda f: func.hessian(f, 1)(X, W),
    "hessian of inputs": lambda f: func.hessian(f, 0)(X, W),
    "vmap over weights": lambda f: vmapped(f, W),
    "vmap over inputs": lambda f: func.vmap(f, (0, None))(torch.stack([X, 2 * X]), W),
    "vmap of grad": lambda f: func.vmap(func.grad(f, 1), (None, 0))(X, torch.stack([W, 2 * W])),
    "grad of vmap": lambda f: func.grad(lambda w: vmapped(f, w).sum())(W),
    "grad of grad": lambda f: func.grad(lambda w: func.grad(f, 1)(X, w).sin().sum())(W),
    "jvp of grad": lambda f: func.jvp(func.grad(f, 1), (X, W), (X, W)),
}


@pytest.mark.parametrize("transform", by_name(TRANSFORMS))
def test_under_torch_func(transform: Callable[[Any], Any]) -> None:
    assert_close(transform(scalar(chunked)), transform(scalar(block)), rtol=1e-10, atol=1e-12)


def test_second_order_by_autograd() -> None:
    def second(f: Callable[..., Any]) -> Any:
        x = X.clone().requires_grad_()
        w = W.clone().requires_grad_()
        first = torch.autograd.grad(scalar(f)(x, w), (x, w), create_graph=True)
        return first, torch.autograd.grad(first[1].sin().sum(), (x, w))

    assert_close(second(chunked), second(block), rtol=1e-10, atol=1e-12)


def test_a_transform_inside_the_function() -> None:
    def slope(x: Tensor) -> Tensor:
        return func.grad(lambda y: y.sin().sum())(x) + torch.autograd.grad(x.exp().sum(), x, create_graph=True)[0]

    x = X.clone().requires_grad_()
    got, expected = (torch.autograd.grad(f(x).sum(), x)[0] for f in (ya.chunk(slope, 2, in_axes=0), slope))
    assert_close(got, expected, rtol=1e-12)


def test_chunk_of_a_chunk() -> None:
    twice = ya.chunk(ya.chunk(block, 2, in_axes=(0, None)), 2, in_axes=(0, None))
    assert_close(func.grad(scalar(twice), (0, 1))(X, W), func.grad(scalar(block), (0, 1))(X, W), rtol=1e-10)
    leaves = X.clone().requires_grad_(), W.clone().requires_grad_()
    got, expected = (torch.autograd.grad(scalar(f)(*leaves), leaves) for f in (twice, block))
    assert_close(got, expected, rtol=1e-10)


def test_integers_alone_under_a_transform() -> None:
    count = ya.chunk(lambda i: i + 1, 2, in_axes=0)
    value, slope = func.jvp(lambda s: s * count(torch.arange(4)).sum(), (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert (float(value), float(slope)) == (20.0, 10.0)


def test_complex_tensors() -> None:
    def turn(z: Tensor) -> Tensor:
        return z * z.conj() * z

    z = torch.complex(double(4, 3), double(4, 3, seed=1)).requires_grad_()
    together = ya.chunk(turn, 2, in_axes=0)
    got, expected = (torch.autograd.grad(f(z).real.square().sum(), z) for f in (together, turn))
    assert_close(got, expected, rtol=1e-12)
    got, expected = (func.grad(lambda z, f=f: f(z).real.square().sum())(z.detach()) for f in (together, turn))
    assert_close(got, expected, rtol=1e-12)


# ---- arguments and outputs


class Batch(NamedTuple):
    tokens: Tensor
    rest: Any


def test_any_tree_of_arguments_and_outputs() -> None:
    def f(batch: Batch, along: Tensor, table: dict[str, Any], scale: float, mode: None) -> dict[str, Any]:
        rows = table["w"][batch.tokens] * scale + batch.rest["shift"] + along.mT[..., None]
        return {"rows": rows, "next": batch.tokens + 1, "mode": mode, "name": "x", "pair": (rows, None)}

    tokens = torch.arange(12).view(6, 2) % 5
    batch = Batch(tokens, {"shift": double(6, 2, 5)})
    args = (batch, double(2, 6), {"w": W.clone().requires_grad_(), "n": 3}, 0.5, None)
    g = ya.chunk(f, 3, in_axes=(0, -1, None, None, 0))
    got = g(*args)
    expected = f(*args)
    assert got.keys() == expected.keys()
    assert got["mode"] is None
    assert got["name"] == "x"
    assert_equal(got, expected)
    assert not got["next"].requires_grad
    w = args[2]["w"]
    assert_close(
        *(torch.autograd.grad(out["rows"].sin().sum() + out["pair"][0].sum(), w) for out in (got, expected)), rtol=1e-12
    )
    assert_equal(
        func.vmap(lambda shift: g(batch._replace(rest={"shift": shift}), *args[1:])["rows"])(
            torch.stack([batch.rest["shift"]] * 2)
        )[1],
        expected["rows"],
    )


def test_reductions_are_combined_over_chunks() -> None:
    mask = torch.tensor([1, 1, 1, 0, 0, 0, 1, 0], dtype=torch.bool)

    def head(x: Tensor, mask: Tensor) -> Any:
        total = (x.exp().sum(1) * mask).sum()
        fixed = ya.Mean(total, 2.0)
        return {"loss": ya.Mean(total, mask.sum()), "fixed": fixed, "n": ya.Sum(mask.sum()), "max": ya.Max(x.amax(0))}

    x = X.clone().requires_grad_()
    got = ya.chunk(head, N, in_axes=0)(x, mask)
    expected = head(x, mask)
    assert_close(got["loss"].total, expected["loss"].total, rtol=1e-12)
    assert int(got["loss"].weight) == 4
    assert got["fixed"].weight == 2.0 * N
    assert got["n"].value.dtype == torch.int64
    assert int(got["n"].value) == 4
    assert torch.equal(got["max"].value, x.amax(0))
    flags = ya.chunk(lambda x: ya.Sum(x), 2, in_axes=0)(mask)
    assert flags.value.tolist() == [1, 1, 2, 0]
    assert flags.value.dtype == torch.int64
    got, expected = (torch.autograd.grad(out["loss"].total, x) for out in (got, expected))
    assert_close(got, expected, rtol=1e-12)


def test_a_weight_that_depends_on_no_parameter_stays_so() -> None:
    def head(x: Tensor, mask: Tensor) -> ya.Mean:
        return ya.Mean((x.sum(1) * mask).sum(), mask.sum())

    mean = ya.chunk(head, N, in_axes=0)(X.clone().requires_grad_(), torch.ones(8, dtype=torch.float64))
    assert mean.total.requires_grad
    assert not mean.weight.requires_grad
    both = ya.value_and_grad(lambda x, mask: ya.chunk(head, N, in_axes=0)(x, mask * x[:, 0]))
    with pytest.raises(ValueError, match="the weight of a Mean depends on parameters"):
        both(X, torch.ones(8, dtype=torch.float64))


def test_one_chunk_is_the_function_itself() -> None:
    assert ya.chunk(block, 1, in_axes=(0, None)) is block


def test_an_empty_axis() -> None:
    assert chunked(X[:0], W)[0].shape == (0, 5)


def test_a_cache_is_written_in_place_under_no_grad() -> None:
    def write(x: Tensor, cache: Tensor) -> Tensor:
        cache[:] = 2 * x
        return x * 1

    cache = torch.zeros(4)
    with torch.no_grad():
        ya.chunk(write, 2, in_axes=0)(torch.ones(4), cache)
    assert cache.tolist() == [2, 2, 2, 2]


# ---- randomness, autocast, memory


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


@pytest.mark.parametrize("transformed", [False, True], ids=["autograd", "torch.func"])
def test_dropout_differs_by_chunk_and_is_drawn_again(transformed: bool) -> None:
    x = torch.ones(4, 64)
    f = ya.chunk(dropped, 4, in_axes=0)
    torch.manual_seed(3)
    expected = torch.cat([dropped(row) for row in x.split(1)])
    after = torch.get_rng_state()
    torch.manual_seed(3)
    if transformed:
        slope, out = func.grad(lambda x: ((out := f(x)).sum(), out), has_aux=True)(x)
    else:
        x.requires_grad_()
        out = f(x)
        torch.rand(7)  # the backward begins elsewhere
        between = torch.get_rng_state()
        (slope,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(torch.get_rng_state(), between)
        torch.manual_seed(3)
        with torch.no_grad():
            assert torch.equal(f(x), expected)
    assert torch.equal(out, expected)
    assert torch.equal(slope, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert len({tuple(row.tolist()) for row in out}) == 4


def test_scans_inside_draw_their_numbers_again_in_a_step() -> None:
    """Layers of plain trees are numbered and seeded in a step; a backward has no counter."""

    def layers(x: Tensor, w: Tensor) -> Tensor:
        carry, _ = ya.scan(lambda x, w: (dropped(x * w), None), x, w)
        return carry

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x * ya.chunk(layers, 2, in_axes=(0, None))(x, w)).sum()

    w, x = torch.ones(3, 64), torch.ones(4, 64)
    value, grad = ya.value_and_grad(loss)(w, x)
    assert float(value) > 0
    assert_close(grad.sum(1), value.expand(3))  # linear in each layer, where the numbers are those of the forward


def test_a_backward_in_another_thread() -> None:
    """Autograd runs those of GPUs in threads of its own: without the caller's autocast, context and generators."""
    x, w = torch.ones(4, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        out = ya.chunk(lambda x, w: dropped(x) @ w, 2, in_axes=(0, None))(x, w)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(out.sum(), (x, w))))
    thread.start()
    thread.join()
    assert out.dtype == torch.bfloat16
    assert_equal(found[0].sum(1) / 64, out[:, 0].float())  # 64 equal columns


def test_autocast_is_that_of_the_call() -> None:
    seen = []

    def f(x: Tensor, w: Tensor) -> Tensor:
        out = x @ w
        seen.append(out.dtype)
        return out

    x, w = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = ya.chunk(f, 2, in_axes=(0, None))(x, w)
    torch.autograd.grad(out.float().sum(), (x, w))
    assert seen == [torch.bfloat16] * 4
    seen.clear()
    out = ya.chunk(f, 2, in_axes=(0, None))(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.grad(out.sum(), (x, w))
    assert seen == [torch.float32] * 4


@pytest.mark.parametrize("hooked", [False, True])
def test_only_inputs_are_kept_and_one_graph_lives_at_a_time(hooked: bool) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def f(x: Tensor, w: Tensor) -> Tensor:
        hidden = (x @ w).exp()
        made.append(weakref.ref(hidden.untyped_storage()))
        alive.append(sum(ref() is not None for ref in made))
        return hidden.square() @ w

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks if hooked else contextlib.nullcontext():
        out = ya.chunk(f, N, in_axes=(0, None))(x, w)
    assert kept == ({x.untyped_storage().data_ptr(), w.untyped_storage().data_ptr()} if hooked else set())
    torch.autograd.grad(out.sum(), (x, w))
    assert alive == [1] * 2 * N
    assert not any(ref() is not None for ref in made)


def full_gradients_alive(n: int) -> int:
    """The most gradients of the weight that are in memory together in a backward over `n` chunks."""
    found: list[weakref.ref[Any]] = []
    alive = []

    class Follow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return w.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            fresh = grad.clone()
            found.append(weakref.ref(fresh.untyped_storage()))
            alive.append(sum(ref() is not None for ref in found))
            return fresh

    w = W.clone().requires_grad_()
    out = ya.chunk(lambda x, w: x @ Follow.apply(w), n, in_axes=(0, None))(double(16, 5), w)
    torch.autograd.grad(out.sum(), w)
    assert len(found) == n
    return max(alive)


def test_full_gradients_in_memory_do_not_grow_with_the_number_of_chunks() -> None:
    assert [full_gradients_alive(n) for n in (2, 4, 16)] == [2, 2, 2]


# ---- what it refuses


def test_tensors_from_outside() -> None:
    outside = torch.ones(5, dtype=torch.float64, requires_grad=True)
    message = r"chunk of .*: a tensor of shape \(5,\) that requires grad reaches the block from outside"

    def uses(scale: Tensor) -> Callable[[Tensor], Tensor]:
        return ya.chunk(lambda x: x * scale, 2, in_axes=0)

    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(RuntimeError, match=message):
            uses(outside)(x)
        with pytest.raises(RuntimeError, match=message):
            uses(outside * 2)(x)
    with pytest.raises(RuntimeError, match=message):
        ya.chunk(lambda x: outside, 2, in_axes=0)(X)
    transforms: list[Callable[[Any], Any]] = [
        func.grad,
        func.jacrev,
        lambda f: func.vmap(func.grad(f)),
        lambda f: lambda s: func.jvp(f, (s,), (s,)),
        lambda f: func.grad(lambda s: func.grad(lambda x: uses(s)(x).sum())(X).sum()),
    ]
    for transform in transforms:
        with pytest.raises(RuntimeError, match="requires grad reaches the block from outside"):
            transform(lambda s: uses(s)(X).sum())(torch.ones(5, 5, dtype=torch.float64))
    assert_equal(uses(outside.detach())(X), X)
    with torch.no_grad():
        assert_equal(uses(outside)(X), X)


@pytest.mark.parametrize("remat", ["none", "all"], ids=["keep", "remat"])
def test_in_a_step(remat: str) -> None:
    """A block that uses a parameter from outside, and a chunk around visits instead of inside them."""
    params, scale = ya.init(small.model(), ya.optim.sgd(0.1), mesh=small.one_rank()).params, torch.ones(small.E)

    @small.with_block
    def closes_over(x: Tensor, w: Any) -> Any:
        return ya.chunk(lambda x, w: (small.block(x, w)[0] * scale, None), 2, in_axes=(0, None))(x, w)

    @small.with_ends
    def around(params: small.Model, x: Tensor) -> Tensor:
        return ya.chunk(lambda x: ya.scan(small.block, x, params.layers)[0], 2, in_axes=0)(x)

    schedule = ya.schedules.zero3(remat=remat)
    both = ya.value_and_grad(closes_over, schedule=schedule)
    for _ in range(2):
        assert_close(both(params, small.batch()), ya.value_and_grad(small.loss)(params, small.batch()))
    scale.requires_grad_()
    for loss, what in ((closes_over, r"a tensor of shape \(5,\) that requires grad"), (around, "an earlier visit")):
        with pytest.raises(RuntimeError, match=f"chunk of .*: .*{what}.* reaches the block from outside"):
            ya.value_and_grad(loss, schedule=schedule)(params, small.batch())
    with pytest.raises(TypeError, match="argument 0 is a sharded handle: chunk the block inside"):
        ya.chunk(lambda layers, x: x, 2, in_axes=(None, 0))(params.layers, X)


def test_writes_into_an_argument() -> None:
    with pytest.raises(RuntimeError, match=r"writes into an argument of shape \(4, 5\) in place"):
        ya.chunk(lambda x, w: x.add_(1) @ w, 2, in_axes=(0, None))(X.clone(), W.clone().requires_grad_())


def bad(*args: Any, n: Any = 2, in_axes: Any = 0, f: Any = lambda *args: args[0]) -> None:
    ya.chunk(f, n, in_axes=in_axes)(*args)


LINE = torch.ones(4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bad(n=0), ValueError, "n=0: expected an integer >= 1"),
        (lambda: bad(n=True), ValueError, "n=True"),
        (lambda: bad(in_axes=None), ValueError, "in_axes=None declares no axis"),
        (lambda: bad(in_axes=(None, None)), ValueError, "declares no axis"),
        (lambda: bad(in_axes=()), ValueError, "declares no axis"),
        (lambda: bad(in_axes=[0]), TypeError, r"in_axes=\[0\]; expected an int, or a tuple with an int or None"),
        (lambda: bad(in_axes=(0, "x")), TypeError, r"in_axes=\(0, 'x'\); expected an int, or a tuple"),
        (lambda: bad(in_axes=({"a": 0},)), TypeError, "expected an int, or a tuple with an int or None per argument"),
        (lambda: bad(LINE, in_axes=(0, 0)), ValueError, "in_axes has 2 entries for 1 positional arguments"),
        (lambda: bad(LINE, {"a": 3}), TypeError, r"argument 1\.a is int, but in_axes declares axis 0 of it"),
        (lambda: bad({"a": LINE}, in_axes=(1,)), ValueError, r"argument 0\.a has shape \(4,\), .* no axis 1"),
        (lambda: bad(LINE, in_axes=-2), ValueError, r"argument 0 has shape \(4,\), .* no axis -2"),
        (lambda: bad(LINE.sum()), ValueError, r"argument 0 has shape \(\)"),
        (lambda: bad(LINE, torch.ones(2, 6), n=4, in_axes=(0, 1)), ValueError, r"argument 1 has .* of n=4"),
        (lambda: bad({}, LINE, in_axes=(0, None)), ValueError, "declares an axis of no tensor"),
        (lambda: bad(LINE, f=lambda x: x.sum()), TypeError, r"output is a 0-dim tensor.*ya\.Mean\(total, weight\)"),
        (lambda: bad(torch.arange(4), f=lambda x: int(x[0])), ValueError, "output is 0, 2 in the chunks"),
        (
            lambda: bad(torch.arange(4), f=lambda x: x if x[0] else None),
            TypeError,
            r"output is NoneType, torch.int64 \(2,\) in the chunks",
        ),
        (lambda: bad(torch.arange(4), f=lambda x: [x] * int(x[1])), ValueError, "chunk 1 returned the structure"),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[], None], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
