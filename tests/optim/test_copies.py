"""Working copies follow the parameters in the optimizer's own pass; the kernel for both, on a stand-in for Triton."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.small import batch, loss, model, one_rank
from tests.optim.fake_triton import modules
from yafsdp_fn.optim import fused

HALF = ya.Precision(compute=torch.bfloat16)
MATRICES = ya.optim.adamw(1e-2, weight_decay=0.1, mask=lambda path, param: len(param.shape) > 1)
PLAIN = ya.optim.chain(ya.optim.adamw(1e-2), ya.optim.scale(0.5))
"""No kernel does it."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """yafsdp_fn.optim.kernels on the stand-in, in use for pieces of 5 elements and more."""
    name = "yafsdp_fn.optim.kernels"
    with monkeypatch.context() as patch:
        for module, fake in modules().items():
            patch.setitem(sys.modules, module, fake)
        patch.delitem(sys.modules, name, raising=False)
        made = importlib.import_module(name)
        patch.delitem(sys.modules, name)
    monkeypatch.setattr(fused, "copying_kernel", lambda device: made.adam_copying)
    monkeypatch.setattr(fused, "LARGE", 5)
    yield made


def trained(tx: Any, steps: int = 3, **options: Any) -> ya.ShardedState:
    state, step = ya.init(model(), tx, mesh=one_rank(), precision=HALF), ya.train_step(loss, tx, **options)
    for number in range(steps):
        state, _ = step(state, batch(number))
    return state


def check(state: ya.ShardedState) -> None:
    memory = state.memory
    for master, working in zip(memory.masters(), memory.working.present, strict=True):
        assert working.dtype == torch.bfloat16 and torch.equal(working, master.bfloat16())


@pytest.mark.parametrize("tx", [ya.optim.adamw(1e-2), MATRICES, ya.optim.sgd(0.1), PLAIN], ids=list("amsp"))
@pytest.mark.parametrize("update", [False, True])
def test_working_copies_follow(tx: Any, update: bool) -> None:
    check(trained(tx, schedule=ya.schedules.zero3(update=update), skip_nonfinite=False))


@pytest.mark.parametrize("update", [False, True])
def test_training_with_the_kernel(kernels: Any, monkeypatch: pytest.MonkeyPatch, update: bool) -> None:
    options = {"schedule": ya.schedules.zero3(update=update), "skip_nonfinite": False}
    tx = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), MATRICES) if not update else MATRICES
    with_kernel = trained(tx, **options)
    check(with_kernel)
    monkeypatch.setattr(fused, "copying_kernel", lambda device: None)
    expected = trained(tx, **options)
    for a, b in zip(with_kernel.memory.masters(), expected.memory.masters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def step(device: str, decoupled: bool, decay: float, found_inf: float, kernel: Any = None) -> list[Tensor]:
    """Two steps of 2,500 elements: parameters, moments and copy. kernel: None for torch's, and a copy"""
    generator = torch.Generator().manual_seed(3)
    p, m, v = (torch.randn(2500, generator=generator).to(device) for _ in range(3))
    v, copy = v.square(), p.bfloat16()
    for count in (4.0, 5.0):
        g = torch.randn(2500, generator=generator).to(device)
        t, scale, inf = (torch.tensor(x, device=device) for x in (count, 3.0, found_inf))
        betas = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        if kernel is None:
            torch_kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
            scalars = {"lr": 1e-2, "weight_decay": decay, "grad_scale": scale, "found_inf": inf}
            torch_kernel([p], [g], [m], [v], [], [t], amsgrad=False, maximize=False, **betas, **scalars)
            copy.copy_(p)
        else:
            corrections = 1 - torch.pow(0.9, t), (1 - torch.pow(0.95, t)).sqrt()
            scalars = torch.stack([torch.tensor(1e-2, device=device), scale, inf, *corrections])
            kernel(p, g, m, v, copy, scalars, weight_decay=decay, decoupled=decoupled, **betas)
    return [p, m, v, copy]


CASES = pytest.mark.parametrize(
    ("decoupled", "decay", "found_inf"), [(True, 0.0, 0.0), (True, 0.1, 0.0), (False, 0.1, 0.0), (True, 0.1, 1.0)]
)


@CASES
def test_arithmetic(kernels: Any, decoupled: bool, decay: float, found_inf: float) -> None:
    got = step("cpu", decoupled, decay, found_inf, kernels.adam_copying)
    expected = step("cpu", decoupled, decay, found_inf)
    for a, b in zip(got[:3], expected[:3], strict=True):
        assert torch.equal(a, b) if found_inf else torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert torch.equal(got[3], got[0].bfloat16())


def test_only_large_pieces_take_a_launch_of_their_own(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(param: Tensor, *args: Any, **options: Any) -> None:
        sizes.append(param.numel())
        kernels.adam_copying(param, *args, **options)

    monkeypatch.setattr(fused, "copying_kernel", lambda device: counted)
    monkeypatch.setattr(fused, "LARGE", 100)
    params = [torch.ones(n) for n in (7, 100, 99, 300)]
    copies = [p.bfloat16() for p in params]
    tx = ya.optim.adamw(1e-2)
    ya.optim.step_(tx, params, [torch.ones_like(p) for p in params], tx.init(params), copies=copies)
    assert sizes == [100, 300]
    for param, copy in zip(params, copies, strict=True):
        assert torch.equal(copy, param.bfloat16()) and param[0] < 1 and bool((param == params[0][0]).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@CASES
def test_bits_of_torchs_kernel_on_cuda(decoupled: bool, decay: float, found_inf: float) -> None:
    """To the last bit, but for one rounding: compilers may contract the parameters' last line differently."""
    pytest.importorskip("triton")
    kernel = fused.copying_kernel(torch.device("cuda"))
    got, expected = step("cuda", decoupled, decay, found_inf, kernel), step("cuda", decoupled, decay, found_inf)
    for a, b in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=1e-9)
    assert torch.equal(got[3], got[0].bfloat16())
