"""ya.formats.Float8 as a factor of products; in steps: tests/steps/test_float8.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.gpu import DEVICES
from yafsdp_fn.nn import float8
from yafsdp_fn.nn.float8 import IN_FLOAT8

ROWS = ya.formats.Scaled(torch.float8_e4m3fn, 32)
OUTS = ya.formats.Scaled(torch.float8_e4m3fn, 48)


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 32, generator=draw) * 10.0 ** torch.arange(-2, 3)[:, None]
    x[0, 1] = 0
    return x.to(dtype), torch.randn(48, 32, generator=draw) * 0.02, torch.randn(2, 5, 48, generator=draw).to(dtype)


def derivatives(x: Tensor, w: Tensor, along: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    w = w.clone().requires_grad_()
    y = ya.linear(x, ya.formats.Float8(w), bias)
    return [y.detach(), *torch.autograd.grad(y, [x, w], along)]


def near(found: list[Tensor], wanted: list[Tensor], part: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert float((one.double() - other.double()).norm()) <= part * float(other.double().norm())


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_of_numbers_of_8_bits(
    dtype: torch.dtype, device: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's kernel, too, which is there on the CPU. The weight's gradient is of the values themselves."""
    if kernel and device == "cpu" and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 a CPU has no such kernel")
    if device == "cpu" or not kernel:
        monkeypatch.setattr(float8, "_has_kernel", lambda *_: kernel)
    x, w, along = (each.to(device) for each in given(dtype))
    seen = ya.formats.passed(IN_FLOAT8, w).double()
    y = F.linear(ya.formats.passed(ROWS, x, torch.float64), seen)
    to_x = ya.formats.passed(OUTS, along, torch.float64) @ seen
    to_w = along.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    wanted = [y.to(dtype), to_x.to(dtype), to_w.float()]
    near(derivatives(x, w, along), wanted, 1e-6 if dtype == torch.float32 else 5e-3)
    assert 0.01 < float((y - x.double() @ w.double().t()).norm() / y.norm()) < 0.06


def test_numbers_are_exact_in_what_blocks_compute_in() -> None:
    """So that they are the same again, whether a slot has kept them or a weight comes out of the format."""
    powers = torch.logspace(-8, 0.8, 4000)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        once = ya.formats.passed(IN_FLOAT8, powers, dtype)
        assert torch.equal(ya.formats.passed(IN_FLOAT8, once), once)
    off = (once - powers.double()).abs()
    assert bool((off <= (powers / 16).clamp(min=2.0**-16)).all())
    for beyond in (7.01, float("inf"), float("nan")):
        assert ya.formats.passed(IN_FLOAT8, torch.tensor([beyond, 7.0]))[0].isnan()


def test_each_row_is_by_itself() -> None:
    """Parts of a batch have the bits of the whole; what is not finite stays in its row; half floats do not overflow."""
    x, w, _ = given()
    weight = ya.formats.Float8(w)
    whole = ya.linear(x, weight)
    near([ya.linear(x[:, :2], weight)], [whole[:, :2]], 1e-7)
    x[1, 2, 3] = float("inf")
    assert not ya.linear(x, weight)[1, 2].isfinite().any()
    assert torch.equal(ya.linear(x, weight)[0], whole[0])
    assert ya.linear(torch.full((4, 32), 300.0).half(), ya.formats.Float8(torch.full((48, 32), 5.0))).isfinite().all()


def test_it_is_a_factor_in_all_ways_to_ask_for_a_product() -> None:
    x, w, along = given()
    weight, bias = ya.formats.Float8(w), torch.randn(48)
    wanted = ya.linear(x, weight) + bias
    for found in (ya.linear(x, weight, bias), F.linear(x, weight, bias), F.linear(input=x, weight=weight, bias=bias)):
        assert torch.equal(found, wanted)
    assert torch.equal(torch.func.vmap(lambda row: ya.linear(row, weight))(x), ya.linear(x, weight))
    by_torch = torch.func.grad(lambda x: (ya.linear(x, weight) * along).sum())(x)
    assert torch.equal(by_torch, derivatives(x, w, along)[1])
    # what it returns may be written in place, as by nn.ReLU(inplace=True)
    ya.linear(x.clone().requires_grad_(), weight).relu_().sum().backward()


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "matmul": (TypeError, "matmul of a ya.formats.Float8, which ya.linear", lambda w: torch.matmul(torch.ones(48), w)),
    "transposed": (AttributeError, "T of a ya.formats.Float8", lambda w: w.T),
    "factors": (TypeError, "linear of a ya.formats.Float8", lambda w: F.linear(w, torch.ones(2, 32))),
    "twice": (TypeError, "a ya.formats.Float8 of a Float8: expected a weight", ya.formats.Float8),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_uses_are_refused(what: str) -> None:
    error, words, use = REFUSED[what]
    with pytest.raises(error, match=words):
        use(ya.formats.Float8(torch.ones(48, 32)))


def test_choices_that_cannot_be_are_refused() -> None:
    matrix = ya.Param((3, 48, 32))
    vector = ya.Param((3, 48))
    layers = {"up": matrix, "gain": vector, "router": ya.Param((3, 4, 32), compute=torch.float32)}
    chosen = ya.formats.float8({"layers": ya.Stacked(layers), "head": ya.Param((48, 32))})
    names = [name for name, node in chosen["layers"].tree.items() if isinstance(node, ya.formats.Float8)]
    assert names == ["up"]
    assert isinstance(chosen["head"], ya.Param)
    with pytest.raises(ValueError, match=r"where chose layers.gain, of shape \(48,\)"):
        ya.formats.float8({"layers": ya.Stacked(layers)}, lambda path, _: path.endswith("gain"))
    with pytest.raises(ValueError, match="no matrix was chosen"):
        ya.formats.float8({"head": ya.Param((48, 32))})
    with pytest.raises(ValueError, match=r"layers.up has an adapter"):
        ya.formats.float8(ya.lora({"layers": ya.Stacked(layers)}, 2, lambda path, _: path.endswith("up")))
    with pytest.raises(TypeError, match=r"a ya.formats.Float8 of a LowRank"):
        ya.lora(chosen, 2, lambda path, _: path.endswith("up"))
