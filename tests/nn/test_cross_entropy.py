"""ya.linear_cross_entropy on plain tensors: torch's numbers, derivatives, transforms and errors, in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.gpu import on_gpu
from yafsdp_fn.nn import cross_entropy, linear

V = 37
E = 16
SHAPE = (5, 6)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def problem(dtype: torch.dtype = torch.float64, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*SHAPE, E, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, E, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, SHAPE, generator=generator)
    targets[0, 2], targets[3] = ignore_index, ignore_index
    return x, weight, targets


def whole(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    scores = F.linear(x, weight).flatten(0, -2)
    scores = scores.to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(scores, targets.flatten(), ignore_index=ignore_index, reduction="sum")


def off(got: Tensor, expected: Tensor) -> float:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    return float(((got - expected).double().norm() / expected.double().norm()).detach())


def grads_off(got: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> float:
    """How far gradients of x and of the weight are apart, at most."""
    pairs = zip(*(torch.autograd.grad(0.7 * total, inputs[:2]) for total in (got, expected)), strict=True)
    return max(off(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ignore_index", [-100, 7])
@pytest.mark.parametrize("chunk", [1, 7, 10, 29, 30, None])
def test_equals_torch(dtype: torch.dtype, ignore_index: int, chunk: int | None) -> None:
    inputs = problem(dtype, ignore_index)
    got = ya.linear_cross_entropy(*inputs, ignore_index=ignore_index, chunk=chunk)
    expected = whole(*inputs, ignore_index)
    assert off(got, expected) <= min(TOLERANCE[dtype], 1e-5)  # the sum is in fp32 at least
    assert grads_off(got, expected, inputs) <= TOLERANCE[dtype]


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone(wanted: int) -> None:
    inputs = problem()
    inputs[1 - wanted].requires_grad_(False)
    grads = [
        torch.autograd.grad(f, inputs[wanted])[0] for f in (ya.linear_cross_entropy(*inputs, chunk=4), whole(*inputs))
    ]
    assert off(*grads) <= 1e-13


def test_large_logits_and_a_sure_prediction() -> None:
    """Gradients near zero keep their digits: p - 1 is taken of the softmax, and not of what it is summed to."""
    x, weight, targets = problem()
    x = (300 * x.detach()).requires_grad_()
    weight = weight
    best = F.linear(x, weight).argmax(-1)
    for labels in (targets, best):
        total = ya.linear_cross_entropy(x, weight, labels, chunk=4)
        expected = whole(x, weight, labels)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-300)
        for a, b in zip(*(torch.autograd.grad(y, (x, weight)) for y in (total, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def test_all_rows_ignored() -> None:
    x, weight, targets = problem()
    total = ya.linear_cross_entropy(x, weight, torch.full_like(targets, -100), chunk=4)
    assert total == 0
    assert all(not grad.any() for grad in torch.autograd.grad(total, (x, weight)))


def test_no_rows() -> None:
    x, weight, targets = problem()
    assert ya.linear_cross_entropy(x[:0], weight, targets[:0]) == 0


def chunked(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return ya.linear_cross_entropy(x, weight, targets, chunk=4)


def test_second_derivatives() -> None:
    x, weight, targets = problem()
    short = lambda x, weight: chunked(x, weight, targets[:2, :3])  # noqa: E731
    assert torch.autograd.gradgradcheck(short, (x[:2, :3].detach().requires_grad_(), weight))


def test_transforms() -> None:
    x, weight, targets = (tensor.detach() for tensor in problem())
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        assert off(transform(chunked)(x[0], weight, targets[0]), transform(whole)(x[0], weight, targets[0])) <= 1e-12
    each = torch.vmap(torch.func.grad(chunked, argnums=1), in_dims=(0, None, 0))(x, weight, targets)
    assert off(each.sum(0), torch.func.grad(whole, argnums=1)(x, weight, targets)) <= 1e-12


@pytest.mark.nightly
def test_compiled_in_one_graph() -> None:
    inputs = problem()
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True)
    assert grads_off(compiled(*inputs), whole(*inputs), inputs) <= 1e-13


def test_autocast() -> None:
    inputs = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = chunked(*inputs)
        expected = whole(*inputs)
    assert got.dtype == torch.float32
    assert off(got, expected) <= 1e-5
    assert grads_off(got, expected, inputs) <= 1e-2


@pytest.mark.parametrize("chunk", [4, 30])
def test_errors_are_torchs(chunk: int) -> None:
    x, weight, targets = problem()
    targets[4, 5] = V
    with pytest.raises(IndexError, match=f"Target {V} is out of bounds"):
        ya.linear_cross_entropy(x, weight, targets, chunk=chunk)
    with pytest.raises(ValueError, match="chunk=0, expected 1 row or more"):
        ya.linear_cross_entropy(x, weight, targets, chunk=0)


def test_logits_are_never_there_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by the bound on bytes, but not fewer than a product needs; all chunks of a size."""
    rows: list[int] = []
    chunks: Callable[..., Tensor] = cross_entropy._chunks

    def noted(*args: int, **how: int) -> Tensor:
        rows.append(args[4])
        return chunks(*args, **how)

    monkeypatch.setattr(cross_entropy, "_chunks", noted)
    for bound, least, expected in (
        (V * 8 * 30, 1, None),
        (V * 8 * 20, 1, 15),
        (V * 8 * 20, 29, 15),
        (0, 4, 4),
        (0, 7, 6),
    ):
        monkeypatch.setattr(linear, "ON_CPU", (bound, least))
        rows.clear()
        ya.linear_cross_entropy(*problem())
        assert rows == [expected] * (expected is not None)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [V, 4096, 10_001])
def test_the_kernel_equals_torchs_operations(dtype: torch.dtype, columns: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 5 * torch.randn(9, columns, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
    labels = torch.randint(0, columns, (9,), generator=generator, device="cuda")
    logits[1, labels[1]] = 300.0
    factors = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], device="cuda")
    kernel = cross_entropy._softmax_of(logits, labels, -100)
    assert kernel is not cross_entropy._softmax_, "no triton"
    own = logits.clone()
    expected = logits.double()
    alone = kernel(own, labels, factors, gradient=False)
    assert torch.equal(own, logits)
    losses = kernel(own, labels, factors, gradient=True)
    assert torch.equal(losses, alone)
    wanted = cross_entropy._softmax_(expected, labels, factors.double(), gradient=True)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-7)


@on_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_torch_on_a_gpu(dtype: torch.dtype) -> None:
    x, weight, targets = (tensor.detach().cuda() for tensor in problem(dtype))
    inputs = x.requires_grad_(), weight.requires_grad_(), targets
    got = chunked(*inputs)
    expected = whole(*inputs)
    assert off(got, expected) <= min(TOLERANCE[dtype], 1e-5)
    assert grads_off(got, expected, inputs) <= TOLERANCE[dtype]
