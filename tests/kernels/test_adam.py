"""Adam's kernel under Triton's interpreter, against the same operations of torch, to the last bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted import kernel

pytest.importorskip("triton")
BLOCK = 1024
BETAS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
SCALARS = (1e-2, 3.0, 0.1, 0.02)
"""Learning rate, gradient scale and the two corrections."""
adam_copying = kernel("yafsdp_fn.optim.step.kernels", "adam_copying")


def memory(size: int, dtype: torch.dtype) -> list[Tensor]:
    """Parameters, gradients, moments and copies; gradients of zero and of all magnitudes among them."""
    generator = torch.Generator().manual_seed(size)
    p, g, m, v = (torch.randn(size, generator=generator) for _ in range(4))
    g *= torch.logspace(-12, 6, size)
    g[::5] = 0
    return [p, g, m, v.square(), torch.full((size,), 7.0, dtype=dtype)]


def fma(x: Tensor | float, y: Tensor, z: Tensor) -> Tensor:
    return (y.double() * x + z.double()).float()


def reference(p: Tensor, g: Tensor, m: Tensor, v: Tensor, decay: float, decoupled: bool) -> tuple[Tensor, ...]:
    """New parameters and moments, by the operations of torch's fused_adam_utils.cuh (2.11 to 2.13) on float32."""
    rate, scale, correction1, root_correction2 = torch.tensor(SCALARS)
    b1, b2, eps, by = torch.tensor([BETAS["beta1"], BETAS["beta2"], BETAS["eps"], decay])
    g = g / scale
    if decay and decoupled:
        p = fma(-(rate * by), p, p)
    elif decay:
        g = fma(by, p, g)
    m = fma(b1, m, fma(-b1, g, g))
    v = fma(b2, v, fma(-b2, g * g, g * g))
    root = v.double().sqrt().float()  # torch's own root of float32 is off by a bit now and then on the CPU
    return p - rate / correction1 * m / (root / root_correction2 + eps), m, v


def run(tensors: list[Tensor], found_inf: float, **options: Any) -> None:
    rate, scale, *corrections = SCALARS
    adam_copying(*tensors, torch.tensor([rate, scale, found_inf, *corrections]), **BETAS, **options)


SIZES = (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 452)
RULES = {"adam": (True, 0.0), "adam, not decoupled": (False, 0.0), "adamw": (True, 0.1), "l2": (False, 0.1)}
CASES = [*itertools.product(SIZES, ["adamw"]), *itertools.product([BLOCK + 452], RULES)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("size", "rule"), CASES)
def test_bits(size: int, rule: str, dtype: torch.dtype) -> None:
    decoupled, decay = RULES[rule]
    tensors = memory(size, dtype)
    p, g, m, v, _ = (tensor.clone() for tensor in tensors)
    run(tensors, 0.0, weight_decay=decay, decoupled=decoupled)
    expected = reference(p, g, m, v, decay, decoupled)
    assert torch.equal(tensors[1], g)  # what torch's kernel would write back
    for got, wanted in zip((tensors[0], *tensors[2:4]), expected, strict=True):
        assert torch.equal(got, wanted) and not torch.equal(got, p)
    assert torch.equal(tensors[4], expected[0].to(dtype))


@pytest.mark.parametrize("size", [5, BLOCK, BLOCK + 1])
def test_a_step_that_is_skipped_writes_nothing(size: int) -> None:
    tensors = memory(size, torch.bfloat16)
    tensors[1].fill_(torch.inf)
    before = [tensor.clone() for tensor in tensors]
    run(tensors, 1.0, weight_decay=0.1, decoupled=True)
    for got, wanted in zip(tensors, before, strict=True):
        assert torch.equal(got, wanted)


def test_writes_stay_inside_a_piece() -> None:
    """Pieces are views into leaves: of what lies around one, nothing changes."""
    leaves = memory(BLOCK, torch.bfloat16)
    before = [leaf.clone() for leaf in leaves]
    run([leaf[100:731] for leaf in leaves], 0.0, weight_decay=0.1, decoupled=True)
    for name, leaf, was in zip(("p", "g", "m", "v", "copy"), leaves, before, strict=True):
        assert torch.equal(leaf[:100], was[:100]) and torch.equal(leaf[731:], was[731:])
        assert torch.equal(leaf, was) is (name == "g")


def test_copies_are_rounded_to_nearest_even() -> None:
    """At a rate of zero, parameters stay: halves between two bf16 numbers, and mantissas whose carry moves on."""
    p = torch.tensor([0x3F808000, 0x3F818000, 0x3F7FFFFF, 0x3FFFFFFF, 0x40FF8000, -0x407E8000, 1], dtype=torch.int32)
    p = p.view(torch.float32)
    zeros, copy = torch.zeros(3, len(p)), torch.empty(len(p), dtype=torch.bfloat16)
    adam_copying(p, *zeros, copy, torch.tensor([0.0, 1, 0, 1, 1]), **BETAS, weight_decay=0.0, decoupled=True)
    assert torch.equal(copy, p.bfloat16())
