"""The sections on tiny models: every figure is there, and says what it says it does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_fn as ya
from benchmarks.cuda import emulated, gpu, memory, sides
from benchmarks.cuda.gpu import Line, Row, Setting
from benchmarks.cuda.sides import Plain
from benchmarks.emulated import emulate
from models import llama
from tests.harness.child_process import InChild, in_child_process
from tests.harness.gpu import on_gpu
from yafsdp_fn.planner.cluster import A100

CPU = Setting("cpu")


def last(section: Callable[..., None], setting: Setting, *args: str) -> dict[str, Any]:
    """What a section reports in the end."""
    found: list[dict[str, Any]] = []
    try:
        section(setting, found.append, *args)
    finally:
        alone()
    return found[-1]


def alone() -> None:
    """Ends the process group, since emulating makes one."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- the plain module


def both_ways(name: str) -> tuple[float, float]:
    """How far a step of ours and one of the plain module go apart, relative, in master weights and in the loss."""
    config = dataclasses.replace(CPU.config(name), layers=3)
    batch = CPU.batch(config, 16, rows=2)
    ends = []
    losses = []
    for plain in (False, True):
        mine = sides.build(config, ya.mesh(device="cpu"), CPU, {"zero3": ya.schedules.zero3()})["zero3"]
        them = Plain(config, mine.held, CPU) if plain else mine
        for _ in range(2):
            them.turn()
            losses.append(float(them.step(batch)))
        store = mine.held.state.memory
        assert torch.equal(store.working.tensors[1], store.master.tensors[1].bfloat16())
        ends.append(torch.cat([master.flatten() for master in store.masters()]))
    start = torch.cat([leaf.flatten() for leaf in optree.tree_leaves(ya.materialize(llama.params(config)))])
    moved = float((ends[0].norm() - start.norm()).abs())
    assert moved > 0
    alone()
    return float((ends[0] - ends[1]).abs().max()), abs(losses[1] / losses[3] - 1)


@pytest.mark.parametrize("name", ["llama3.2-1b", "llama3-8b"], ids=["tied", "untied"])
@in_child_process
def test_the_plain_module_trains_the_same_weights_alike(name: str) -> None:
    apart, loss = both_ways(name)
    assert apart < 1e-4 and loss < 1e-3  # two steps of Adam at 1e-4; bf16 blocks


# ---- the emulated network


@pytest.mark.nightly
@in_child_process
def test_a_published_row_beside_fsdp2() -> None:
    found = last(emulated.run, CPU, "llama3-8b/64")
    part = found["network"]
    assert part["communication over compute, here"] == pytest.approx(part["communication over compute, published"])
    waiting = found["waiting"]
    depths = found["depths"]
    names = {"zero3", "zero3-prefetch2", *sides.settings()}
    for depth in depths:
        assert set(waiting[f"{depth} layers"]["step_ms"]) == names
    assert waiting["published ratio"] == pytest.approx(0.97 / 1.10)
    assert waiting["whole model, extrapolated"]["layers"] == 32


def test_ratios_floors_and_the_whole_model() -> None:
    """Worked out by hand: ours 1 + 2 L, FSDP2 2 + 3 L, compute L, communication 1 + 1.5 L."""
    row = Row("any", 64, 2048, layers=10, recomputed=0, ratio=0.8)
    times = {
        depth: {"zero3": [1.0 + 2 * depth] * 3, "fsdp2": [4.0 * depth] * 3, "fsdp2-prefetch2": [2.0 + 3 * depth] * 3}
        for depth in (2, 4)
    }
    compute = {2: 2.0, 4: 4.0}
    comm = {2: 4.0, 4: 7.0}
    lines = tuple(Line.through((2, 4), (of[2], of[4])) for of in (compute, comm))
    found = emulated.compared(times, row, compute, comm, lines)
    deep = found["4 layers"]
    whole = found["whole model, extrapolated"]
    assert deep["best of fsdp2"] == "fsdp2-prefetch2"
    assert deep["communication_ms"] == 7e3
    assert deep["floor over best of fsdp2"] == 7 / 14
    assert deep["ours over floor"] == 9 / 7
    assert deep["over best of fsdp2, by round"]["zero3"]["median"] == pytest.approx(9 / 14)
    assert whole["ours over best of fsdp2"] == pytest.approx(21 / 32)
    assert whole["floor over best of fsdp2"] == pytest.approx(16 / 32)
    assert whole["ours over fsdp2"] == pytest.approx(21 / 40)
    assert emulated.goals(found, row, "waiting") == {
        "waiting: within 5% of the floor": False,
        "waiting: at most 0.800 of FSDP2": True,
    }
    alone = emulated.compared({4: times[4]}, row, compute, comm, lines)
    assert set(alone) == {"published ratio", "4 layers"}
    assert emulated.goals(alone, row, "moving")["moving: at most 0.800 of FSDP2"]
    assert not emulated.goals(found, row._replace(ratio=0.49), "waiting").keys() - {"waiting: within 5% of the floor"}


def test_published_rows_and_their_depths() -> None:
    rows = gpu.published()
    assert set(rows) == {
        "llama2-7b/64",
        "llama2-13b/128",
        "llama2-34b/128",
        "llama2-34b/256",
        "llama2-70b/256",
        "llama3-8b/64",
    }
    assert all(0.735 < row.ratio < 0.975 for row in rows.values())
    assert [row.at(row.depths[1]) for row in rows.values()].count(2) == 1
    assert rows["llama2-70b/256"].at(8) == 1
    assert math.isinf(gpu.free().network_bandwidth)
    assert gpu.free().network_latency == 0
    assert gpu.scaled(0.5).network_bandwidth == 2 * A100.network_bandwidth


@in_child_process
def test_fsdp2_is_set_as_its_names_say() -> None:
    """Each contender's module after a turn and a step: whether reductions have a group of their own, their buffers, and
    how many layers the first one gathers ahead in forward, the last one in backward."""
    config = dataclasses.replace(CPU.config("llama3-8b"), layers=4)
    out = []
    with emulate(gpu.free(), 8):
        made = sides.build_fsdp2(config, init_device_mesh("cpu", (8,)), CPU, recompute=0)
        for contender in made.values():
            contender.turn()
            contender.step(CPU.batch(config, 16))
            module = contender.module
            first, last, root = (each._get_fsdp_state() for each in (module.layers[0], module.layers[-1], module))
            group = first._fsdp_param_group.mesh_info
            separate = getattr(group, "reduce_scatter_process_group", None) is not None
            buffers = getattr(root._comm_ctx, "reduce_scatter_max_input_buffers", 1)
            ahead = len(first._states_to_forward_prefetch), len(last._states_to_backward_prefetch)
            out.append((separate, buffers, *ahead))
    expected = [(False, 1, 1, 1), (False, 1, 2, 2), (True, 2, 2, 2)]
    assert out == expected[: len(sides.settings())]


# ---- memory


@in_child_process
def test_memory() -> None:
    name = "7B, rank 0 of 64, seq 2048"
    found = last(memory.run, CPU, name)[name]
    assert abs(found["error"]) < 0.05  # a few buffers of 8 KiB count, of models this small
    assert sum(found["items"].values()) == found["predicted_bytes"]


@on_gpu
@pytest.mark.parametrize(
    ("section", "args"),
    [
        (emulated.run, ("llama3-8b/64",)),
        (memory.run, ("7B, rank 0 of 64, seq 2048",)),
    ],
    ids=["emulated", "memory"],
)
def test_sections_run_on_a_gpu(in_child: InChild, section: Callable[..., None], args: tuple[str, ...]) -> None:
    found = in_child(last, section, Setting("cuda", small=True), *args)
    if section is emulated.run:
        assert found["moving bytes"]["2 layers"]["ours over floor"] > 0
