"""Working copies follow the parameters in the optimizer's own pass; the kernel for both, interpreted."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.small import batch, loss, model, one_rank
from tests.kernels.interpreted import kernel
from tests.optim.test_units import UNITS, matrices, shards
from tests.optim.trees import bits, clone
from yafsdp_fn.optim.base import stages
from yafsdp_fn.optim.rules import Adam
from yafsdp_fn.optim.step import fused, units
from yafsdp_fn.optim.step.definition import Lane

HALF = ya.Precision(compute=torch.bfloat16)
MATRICES = ya.optim.adamw(1e-2, weight_decay=0.1, mask=lambda path, param: len(param.shape) > 1)
PLAIN = ya.optim.chain(ya.optim.adamw(1e-2), ya.optim.scale(0.5))
"""No kernel does it."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Puts the interpreted kernel in use, for units of 60 elements and more. Gives the sizes of pieces that it took."""
    pytest.importorskip("triton")
    sizes: list[int] = []
    adam_copying = kernel("yafsdp_fn.optim.step.kernels", "adam_copying")

    def counted(param: Tensor, *args: Any, **options: Any) -> None:
        sizes.append(param.numel())
        adam_copying(param, *args, **options)

    monkeypatch.setattr(fused, "copying_kernel", lambda tensor: counted)
    monkeypatch.setattr(fused, "LARGE", 60)
    return sizes


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
def test_training_with_the_kernel(launched: list[int], monkeypatch: pytest.MonkeyPatch, update: bool) -> None:
    options = {"schedule": ya.schedules.zero3(update=update), "skip_nonfinite": False}
    tx = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), MATRICES) if not update else MATRICES
    with_kernel = trained(tx, **options)
    check(with_kernel)
    assert launched
    monkeypatch.setattr(fused, "copying_kernel", lambda tensor: None)
    expected = trained(tx, **options)
    for a, b in zip(with_kernel.memory.masters(), expected.memory.masters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def step(device: str, decoupled: bool, decay: float, found_inf: float, kernel: Any = None) -> list[Tensor]:
    """Two steps of 2,500 elements: parameters, moments and copy. kernel: None for torch's, and a copy.

    Corrections are those of torch's kernel, in float32.
    """
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


def test_units_of_fewer_elements_share_a_launch(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.ones(n) for n in (7, 60, 59, 300)]
    copies = [p.bfloat16() for p in params]
    tx = ya.optim.adamw(1e-2)
    ya.optim.step_(tx, params, [torch.ones_like(p) for p in params], tx.init(params), copies=copies)
    assert launched == [60, 300]
    for param, copy in zip(params, copies, strict=True):
        assert torch.equal(copy, param.bfloat16()) and param[0] < 1 and bool((param == params[0][0]).all())


def test_a_skipped_step_keeps_all_bits(launched: list[int]) -> None:
    params, tx = [torch.ones(60)], ya.optim.adamw(1e-2)
    copies, state = [params[0].bfloat16()], tx.init(params)
    before = bits((params, copies, state))
    for found_inf in (1.0, 0.0):
        ya.optim.step_(tx, params, [torch.ones(60)], state, found_inf=torch.tensor(found_inf), copies=copies)
        assert (bits((params, copies, state)) == before) == bool(found_inf)
    assert launched == [60, 60]


def stepped(groups: Sequence[Sequence[int] | None], **where: Any) -> Any:
    """Parameters, state and copies after two steps of units in `groups`, or of all at once (None)."""
    tx = ya.optim.adamw(1e-2, weight_decay=0.1, mask=matrices)
    params, grads = shards(0, **where), shards(1, **where)
    copies, state = optree.tree_map(Tensor.bfloat16, params), tx.init(params)
    steps = units.UnitSteps(tx, params, grads, state, copies)
    for step in range(2):
        optree.tree_map(Tensor.copy_, grads, shards(2 + step, **where))
        for group in groups:
            steps.run(group, scale=torch.tensor(1.7))
        steps.finish()
    return params, state, copies


def test_bits_do_not_depend_on_how_units_are_grouped(launched: list[int]) -> None:
    """Masks cut large units into pieces of fewer elements than 60."""
    where = {"length": lambda numel: -(-numel // 16) * 16}
    whole = bits(stepped([None], **where))
    assert min(launched) < 60
    order = random.Random(0).sample(UNITS, len(UNITS))
    for groups in ([[unit] for unit in UNITS], [order], [order[:5], order[5:6], order[6:]]):
        assert bits(stepped(groups, **where)) == whole


def test_the_same_units_take_the_kernel_on_any_number_of_ranks(launched: list[int]) -> None:
    stepped([None])
    elements = sum(launched)
    launched.clear()
    for rank in range(3):
        stepped([[unit] for unit in UNITS], rank=rank, length=lambda numel: numel // 3)
    assert sum(launched) == elements  # of units that three divides


RULES = pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9999)])


@RULES
@pytest.mark.parametrize("count", [1, 2, 10, 1000, 100_000, 1 << 30])
def test_corrections_are_rounded_once(b1: float, b2: float, count: int) -> None:
    """Of the betas that kernels have, rounded to float32, and to the last bit of float32."""
    first, second = (1 - math.pow(torch.tensor(beta).item(), count) for beta in (b1, b2))
    got = fused.corrections(Adam(b1, b2, 1e-8), torch.tensor(count, dtype=torch.int32))
    assert torch.equal(torch.stack(got), torch.tensor([first, math.sqrt(second)]))


@RULES
def test_a_constant_gradient_moves_by_the_rate_at_every_step(launched: list[int], b1: float, b2: float) -> None:
    """Moments over their corrections are then the gradient and its square: what corrections are for."""
    tx = ya.optim.adamw(1.0, b1=b1, b2=b2, eps=0.0, weight_decay=0.0)
    params, grads = [torch.zeros(60)], [torch.logspace(-6, 6, 60)]
    state = tx.init(params)
    for _ in range(12):
        params[0].zero_()
        state = ya.optim.step_(tx, params, clone(grads), state, copies=[params[0].bfloat16()])
        torch.testing.assert_close(params[0], -torch.ones(60), rtol=1e-6, atol=0)
    assert launched == [60] * 12


def test_the_host_does_not_wait_for_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, whose values nobody can ask for."""
    given: list[Any] = []
    monkeypatch.setattr(fused, "copying_kernel", lambda tensor: print)
    with torch.device("meta"):
        params = [torch.zeros(60)]
        tx = ya.optim.adamw(1e-2)
        lane = Lane(list(stages(tx, tx.init(params))), params, params, None, None, None)
        fusion: Any = fused.recognise(lane.stages)
        piece = [torch.zeros(60) for _ in range(4)] + [torch.zeros(60, dtype=torch.bfloat16)]
        for scale, inf in itertools.product([None, torch.zeros(())], repeat=2):
            steps = fused.FusedSteps(lane, fusion, [[tensor] for tensor in piece])
            steps._begin(scale, inf)
            given.append(steps._packed)
    assert [(each.device.type, each.dtype, each.shape) for each in given] == [("meta", torch.float32, (5,))] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@CASES
def test_bits_of_torchs_kernel_on_cuda(decoupled: bool, decay: float, found_inf: float) -> None:
    """To the last bit, but for one rounding: compilers may contract the parameters' last line differently."""
    pytest.importorskip("triton")
    kernel = fused.copying_kernel(torch.empty(0, device="cuda"))
    got, expected = step("cuda", decoupled, decay, found_inf, kernel), step("cuda", decoupled, decay, found_inf)
    for a, b in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=1e-9)
    assert torch.equal(got[3], got[0].bfloat16())


def large_and_small(device: str, numel: int) -> list[list[Tensor]]:
    """Two steps of a unit of `numel` elements and of one of 7: parameters, moments and copies."""
    generator = torch.Generator().manual_seed(5)
    tx = ya.optim.adamw(1e-2, weight_decay=0.1)
    params = [torch.randn(n, generator=generator).to(device) for n in (numel, 7)]
    copies, state = [each.bfloat16() for each in params], tx.init(params)
    for _ in range(2):
        grads = [torch.randn(each.shape, generator=generator).to(device) for each in params]
        state = ya.optim.step_(tx, params, grads, state, scale=torch.tensor(1.7, device=device), copies=copies)
    moments = [leaf for leaf in optree.tree_leaves(state) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [params, moments, copies]


def check_large_and_small(device: str, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    got = large_and_small(device, numel)
    monkeypatch.setattr(fused, "copying_kernel", lambda tensor: None)
    expected = large_and_small(device, numel)
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(copy, each.bfloat16()) for each, copy in zip(got[0], got[2], strict=True))


def test_a_unit_above_the_threshold_takes_the_kernel(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    check_large_and_small("cpu", 61, monkeypatch)
    assert launched == [61, 61]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_a_unit_above_the_threshold_takes_the_kernel_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the size from which steps of users do."""
    pytest.importorskip("triton")
    sizes, kernel = [], fused.copying_kernel(torch.empty(0, device="cuda"))
    assert kernel is not None

    def counted(param: Tensor, *args: Any, **options: Any) -> None:
        sizes.append(param.numel())
        kernel(param, *args, **options)

    monkeypatch.setattr(fused, "copying_kernel", lambda tensor: counted)
    check_large_and_small("cuda", fused.LARGE + 3, monkeypatch)
    assert sizes == [fused.LARGE + 3] * 2
