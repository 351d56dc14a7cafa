"""What is launched on the device: as much at every number of ranks, and nothing that one kernel does alone.

The fake device counts operations. What a kernel of Triton or of cuBLAS makes of one is for a real GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA, Device
from tests.harness.marks import nightly
from tests.models.theirs import gains_in_float32
from tests.planner.test_footprint import held_by, tokens
from yafsdp_fn.communication import flat, micro_shards, sums
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.ranks import receive_numel, staging_numel
from yafsdp_fn.nn.linear import DESTINATION, AutogradRun, Destination
from yafsdp_fn.planner.footprint import predict_memory
from yafsdp_fn.runtime.slots import weight_leaf
from yafsdp_fn.util import on_gpu

F32 = torch.float32
BF16 = torch.bfloat16
N = 128
CONFIG = dataclasses.replace(llama.CONFIGS["debug"], layers=3, max_length=32)
WIRE = ya.Precision(compute=BF16, reduce=BF16, accumulate=F32)
PRECISIONS = {"wide sums": WIRE, "wide products": ya.Precision(compute=BF16, reduce=F32), "fp32": ya.Precision()}


@contextmanager
def cluster(axes: dict[str, int], how: str = "") -> Iterator[tuple[Device, Any]]:
    with fake_cuda() as device, rank_of(axes) as mesh, pytest.MonkeyPatch.context() as patch:
        if how == "no triton":
            patch.setattr(on_gpu, "HAS_TRITON", False)
        if how == "deterministic":
            micro_shards.mark(mesh, mesh.size())
        yield device, mesh


# ---- reductions


def reduction(axes: dict[str, int], how: str) -> tuple[list[str], Tensor]:
    """What a bf16 gradient's reduction and its sum over replicas launch, and the shard that was all ones before."""
    accumulate = None if how == "deterministic" else F32
    with cluster(axes, how) as (device, mesh):
        comms = communicators(mesh)
        shard = torch.ones(N, device=CUDA)
        full = torch.ones(comms.ranks * N, device=CUDA, dtype=BF16)
        receive = full.new_empty(receive_numel(comms, N, accumulate)).view(torch.uint8)
        staging = full.new_empty(staging_numel(comms, N, F32, BF16, accumulate)).view(torch.uint8)
        device.launched.clear()
        flat.reduce_into(comms, [shard], [full], [True], [accumulate], receive=receive)
        sums.all_reduce_replicas(comms, shard, staging, wire=BF16, accumulate=accumulate)
        return list(device.launched), shard.cpu()


RANKS = 0
"""Stands for the number of ranks."""
ONE = ["collective", "sum_rows"]
OVER_REPLICAS = ["copy_", "zero_", "collective", "sum_rows", "collective", "copy_"]


@pytest.mark.parametrize(
    ("axes", "how", "launched"),
    [
        ({"shard": RANKS}, "", ONE),
        ({"shard": RANKS}, "deterministic", ONE),
        ({"replicate": RANKS, "shard": 2}, "", ONE + OVER_REPLICAS),
        ({"node": 2, "local": RANKS}, "", 2 * ONE + ONE),
        ({"shard": RANKS}, "no triton", ["collective", "sum", "add_"]),
    ],
    ids=["shard", "deterministic", "replicas", "nodes", "no triton"],
)
@in_child_process
def test_a_reduction(axes: dict[str, int], how: str, launched: list[str]) -> None:
    for ranks in (2, 4, 8):
        sizes = {name: size or ranks for name, size in axes.items()}
        found, shard = reduction(sizes, how)
        assert found == launched
        group = sizes["node"] * sizes["local"] if "node" in sizes else sizes["shard"]
        assert torch.equal(shard, torch.full((N,), float(sizes.get("replicate", 1) * (1 + group))))


def step(
    axes: dict[str, int], precision: str, microbatches: int, own: bool = False
) -> tuple[list[str], dict[str, int]]:
    """What a step of a Llama launches that does not look for mistakes, and the bytes that it holds. own: its gains are
    in float32"""
    with cluster(axes) as (device, mesh):
        tx = ya.optim.adamw(1e-3)
        params = gains_in_float32(llama.params(CONFIG)) if own else llama.params(CONFIG)
        state = ya.init(params, tx, mesh=mesh, precision=PRECISIONS[precision])
        train = ya.train_step(llama.loss(CONFIG), tx, schedule=ya.schedules.zero3(), microbatches=microbatches)
        batch = tokens(CONFIG, device="cuda")
        for _ in range(4):  # steps 0, 1 and 2 look
            device.launched.clear()
            state, _ = train(state, batch)
        launched = list(device.launched)
        real = held_by(state) | {"scratch": sum(x.nbytes for x in state.memory._scratch.values())}
        return launched, real


@pytest.mark.parametrize(
    ("precision", "own", "microbatches"),
    [
        ("wide sums", False, 2),
        ("wide products", False, 2),
        nightly("fp32", False, 2),
        nightly("wide sums", False, 1),
        nightly("wide sums", True, 2),
        ("wide products", True, 2),
    ],
)
@in_child_process
def test_buffers_are_as_planned(precision: str, own: bool, microbatches: int) -> None:
    """No sum and no product takes scratch on a GPU; with gains in float32, too. As much is launched at any number of
    ranks."""
    tx = ya.optim.adamw(1e-3)
    given = tokens(CONFIG)
    params = gains_in_float32(llama.params(CONFIG)) if own else llama.params(CONFIG)
    how: dict[str, Any] = {"ranks": 2, "precision": PRECISIONS[precision], "microbatches": microbatches, "tx": tx}
    program = ya.schedules.zero3()(ya.planner.trace(llama.loss(CONFIG), params, given, **how))
    planned = predict_memory(program, device="cuda").itemised()
    few, real = step({"shard": 2}, precision, microbatches, own)
    assert {name: planned[name] for name in real} == real
    assert real["scratch"] == 0
    if own or precision == "wide sums":
        assert few == step({"shard": 8}, precision, microbatches, own)[0]
    if own:
        return
    if precision == "wide sums":
        assert few.count("sum_rows") == microbatches * (CONFIG.layers + 2)
    on_cpu = predict_memory(program, device="cpu")
    assert (on_cpu.scratch > 0) == (precision == "wide products")
    assert (on_cpu.receive > planned["receive"]) == (real["receive"] > 0)


# ---- products and the early gradient


@in_child_process
def test_a_bf16_product_for_an_fp32_slot_is_one_kernel_and_no_cast() -> None:
    def no_scratch(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        raise AssertionError("scratch for a product")

    with fake_cuda() as device:
        leaf = weight_leaf(torch.zeros(6, 4, dtype=BF16, device=CUDA), no_scratch)
        found: Destination = getattr(leaf, DESTINATION)
        a, b = (torch.randn(*shape).to(BF16).to(CUDA) for shape in ((6, 5), (5, 4)))
        found.view = torch.full((6, 4), torch.nan, device=CUDA)
        device.launched.clear()
        found.write_mm(a, b)
        found.write_mm(a, b)
        assert device.launched == ["mm", "addmm"]
        torch.testing.assert_close(found.view.cpu(), 2 * (a.cpu().float() @ b.cpu().float()))


@pytest.mark.parametrize("scale", [1.0, 0.5])
@in_child_process
def test_the_scale_of_an_early_gradient_is_looked_at_by_the_device(scale: float) -> None:
    """One launch; that it reads nothing else where the scale is one: tests/kernels/test_vector.py."""
    with fake_cuda() as device:
        leaf = weight_leaf(torch.zeros(6, 4, device=CUDA), None)
        leaf = weight_leaf(leaf, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=CUDA))
        found: Destination = getattr(leaf, DESTINATION)
        found.offer(torch.ones(6, 4, device=CUDA))
        with found.early() as may:
            assert may
        factor = torch.full((), scale, device=CUDA)
        found.view = found._early
        found.task = AutogradRun()
        found.task.number = torch._C._current_graph_task_id()
        device.launched.clear()
        device.may_sync = False
        assert found.confirm(factor)
        device.may_sync = True
        assert device.launched == ["scale_"]
        assert not [each for each in device.syncs if "host" not in each]
        assert found.view is not None
        assert torch.equal(found.view.cpu(), torch.full((6, 4), scale))
