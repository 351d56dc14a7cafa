"""ya.linear and ya.embedding as functions; in steps they are tested by everything that trains a Llama."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.gpu import on_gpu
from yafsdp_fn.nn.linear import Destination, destination
from yafsdp_fn.runtime.slots import weight_leaf
from yafsdp_fn.util.on_gpu import vector_kernels


def weight(*shape: int) -> Tensor:
    return weight_leaf(torch.randn(*shape), lambda size, dtype: torch.empty(size, dtype=dtype))


def node(out: Tensor) -> str:
    assert out.grad_fn is not None
    return out.grad_fn.name()


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_outside_of_a_visit_they_are_torchs_own(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    w = torch.randn(4, 5, requires_grad=True)
    b = torch.randn(4)
    assert torch.equal(ya.linear(x, w, b), F.linear(x, w, b))
    assert node(ya.linear(x, w)) == node(F.linear(x, w))
    tokens = torch.tensor([[0, 3], [1, 1]])
    assert torch.equal(ya.embedding(tokens, w), F.embedding(tokens, w))
    assert node(ya.embedding(tokens, w)) == node(F.embedding(tokens, w))


def same_gradient(ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor]) -> None:
    """Of a weight: by a function of it that uses `ya.linear`, say, and by torch's."""
    w = weight(4, 5)
    plain = w.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(ours(w).square().sum(), [w])
    (wanted,) = torch.autograd.grad(torchs(plain).square().sum(), [plain])
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_under_a_transform_and_under_autocast_they_are_torchs_own() -> None:
    x, w = torch.randn(3, 5), weight(4, 5)
    found = torch.func.grad(lambda x: ya.linear(x, w).square().sum())(x)
    assert torch.allclose(found, 2 * (x @ w.T) @ w, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert node(ya.linear(x, w)) != "_LinearBackward"


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_what_it_returns_may_be_written_in_place(shape: tuple[int, ...], biased: bool) -> None:
    """As by nn.ReLU(inplace=True): not if a Function returns a view, as F.linear does of rows with a bias."""
    x, b = torch.randn(shape), torch.randn(4) if biased else None
    same_gradient(lambda w: ya.linear(x, w, b).relu_(), lambda w: F.linear(x, w, b).relu_())
    tokens = torch.tensor([[0, 3], [1, 1]])
    same_gradient(lambda w: ya.embedding(tokens, w).mul_(2), lambda w: F.embedding(tokens, w).mul_(2))


# ---- on a GPU


def no_scratch(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    raise AssertionError("a product went through scratch")


def opened(view: Tensor) -> Destination:
    found = destination(weight_leaf(torch.empty_like(view, dtype=torch.bfloat16), no_scratch))
    assert found is not None
    found.view = view
    return found


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(7, 5, 3), (256, 512, 384)])
def test_products_go_straight_into_an_fp32_slot(
    shape: tuple[int, int, int], transposed: bool, dtype: torch.dtype
) -> None:
    """Written, then added to; sums of exact products of 16-bit numbers, in fp32."""
    m, k, n = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(k, m, generator=generator, device="cuda").to(dtype).t()
    b = torch.randn(k, n, generator=generator, device="cuda").to(dtype)
    a = a.contiguous() if transposed else a
    slot = torch.full((m * n + 8,), torch.nan, device="cuda")
    found = opened(slot[: m * n].view(m, n))
    for times in (1, 2):
        found.write_mm(a, b)
        torch.testing.assert_close(found.view.double(), times * (a.double() @ b.double()), rtol=1e-5, atol=1e-4)
    assert bool(slot[m * n :].isnan().all())


@on_gpu
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_a_scale_is_looked_at_on_the_gpu(scale: float) -> None:
    """A signalling NaN stays as it is where nothing is multiplied."""
    kernels = vector_kernels(torch.empty(0, device="cuda"))
    assert kernels is not None, "no triton"
    values = torch.randn(5_000_011, device="cuda")
    wanted = values * scale
    kernels.scale_(values, torch.full((), scale, device="cuda"))
    assert torch.equal(values, wanted)
    marked = torch.full((5000,), 0x7FA00000, dtype=torch.int32, device="cuda")
    before = marked.clone()
    kernels.scale_(marked.view(torch.float32), torch.full((), scale, device="cuda"))
    assert torch.equal(marked, before) == (scale == 1)
