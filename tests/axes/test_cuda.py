"""Axes inside blocks as a GPU would run them: no use of memory that nothing orders, and the numbers of a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.axes.test_doc import batch, example
from tests.cuda.conftest import in_child  # noqa: F401  # a fixture
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.log import Log, findings
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA
from tests.harness.fake_cuda.together import troubles
from tests.harness.marks import by_day
from yafsdp_fn import optim
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.schedules import zero3
from yafsdp_fn.util import squares

s = ya.schedules
AXES = {"shard": 2, "tensor": 2}
STAGES = {"stage": 2, "shard": 1, "tensor": 2}
NODES = {"node": 2, "local": 2, "tensor": 2}
DAYS = ("kept", "recomputed", "whole leaves")


def day(mesh: Any, device: torch.device, which: str) -> list[Any]:
    """Some steps, and whole values; what a user might look at."""
    inner = optim.muon(1e-2, dtype=None) if which == "whole leaves" else optim.adamw(1e-2)
    page = example()
    tx = optim.chain(optim.clip_by_global_norm(0.1), inner)
    schedule = zero3(remat="all") if which == "recomputed" else zero3()
    state = ya.init(page["params"], tx, mesh=mesh)
    out = list[Any]()
    step = ya.train_step(page["loss_fn"], tx, schedule=schedule, microbatches=2)
    for _ in range(4):
        state, metrics = step(state, {name: x.to(device) for name, x in batch().items()})
        out.append(metrics)
    out.append(ya.map_whole_layers(lambda layer: layer["up"].sum() + layer["norm"].sum(), state.params["layers"]))
    out.append(ya.unshard(state))
    return [leaf.cpu().tolist() for leaf in optree.tree_leaves(out)]


def searched(axes: dict[str, int], which: str) -> tuple[bool, list[str]]:
    with mock.patch.object(squares, "_on_cpu", squares._on_gpu), rank_of(axes, torch.device("cpu")) as mesh:
        want = day(mesh, torch.device("cpu"), which)
    with fake_cuda() as device, rank_of(axes) as mesh:
        got = day(mesh, CUDA, which)
    return got == want, list(map(str, findings(device.log)))


@pytest.mark.sampled
@pytest.mark.parametrize("axes", [AXES, {"shard": 1, "tensor": 2}])  # split units on one rank: slots are shards
@pytest.mark.parametrize("which", DAYS)
def test_days_without_races(in_child: Callable[..., Any], axes: dict[str, int], which: str) -> None:  # noqa: F811
    equal, found = in_child(searched, axes, which)
    assert not found, "\n".join(found)
    assert equal


# ---- stages, and nodes: all ranks together


def launched(axes: dict[str, int], schedule: Any, rank: int) -> Log:
    """The log of one rank's steps."""
    page = example()
    tx = optim.adamw(1e-2)
    with fake_cuda() as device, rank_of(axes, rank=rank) as mesh:
        stages = None
        if "stage" in axes:
            stages = s.assign(ya.planner.trace(page["loss_fn"], page["params"], batch()), axes["stage"])
        state = ya.init(page["params"], tx, mesh=mesh, stages=stages)
        step = ya.train_step(page["loss_fn"], tx, schedule=schedule, microbatches=2)
        for _ in range(3):
            state, _ = step(state, {name: x.to(CUDA) for name, x in batch().items()})
        return device.log


def together(name: str) -> tuple[set[str], list[str]]:
    """The communicators along axes that were launched in steps, and all that is wrong."""
    axes, schedule = TOGETHER[name]
    logs = {rank: launched(axes, schedule, rank) for rank in range(math.prod(axes.values()))}
    along = {
        entry.launch.group
        for log in logs.values()
        for entry in log.entries
        if entry.launch is not None and "along" in entry.launch.group and entry.kind == "launch"
    }
    found = [str(each) for log in logs.values() for each in findings(log)]
    return along, [*found, *map(str, troubles(logs)), *map(str, troubles(logs, retries=True))]


TOGETHER: dict[str, tuple[dict[str, int], Any]] = {
    "1f1b": (STAGES, s.one_f_one_b(s.zero3(remat="all"))),
    "zero-bubble": (STAGES, s.zero_bubble(s.zero2())),
    "nodes": (NODES, s.hpz(2, remat="all")),
}


@pytest.mark.parametrize("name", by_day(TOGETHER, "1f1b"))
def test_all_ends_whenever_hosts_wait_for_their_devices(in_child: Callable[..., Any], name: str) -> None:  # noqa: F811
    along, wrong = in_child(together, name)
    assert along and not wrong, "\n".join(wrong)


def used() -> tuple[set[str], set[str]]:
    """The process groups that are there when a state has been placed, and those that its steps use after that."""
    with fake_cuda(), pytest.MonkeyPatch.context() as patch, rank_of(AXES) as mesh:
        made: list[Any] = []
        patch.setattr(
            "yafsdp_fn.communication.communicators.make_communicator", lambda group, device: made.append(group)
        )
        page = example()
        comms = communicators(mesh)
        state = ya.init(page["params"], optim.sgd(0.1), mesh=mesh)
        every = {each.process_group for each in (*comms.groups, *comms.along.values(), comms.metrics_group)}
        met = {each.group_desc for each in every if each.issued or each in made}
        for each in every:
            each.issued.clear()
        step = ya.train_step(page["loss_fn"], optim.sgd(0.1))
        for _ in range(2):
            state, _ = step(state, {name: x.to(CUDA) for name, x in batch().items()})
        return met, {each.group_desc for each in every if each.issued}


def test_every_communicator_is_there_before_a_step(in_child: Callable[..., Any]) -> None:  # noqa: F811
    met, later = in_child(used)
    assert later <= met
    assert later >= {f"yafsdp {name}" for name in ("along tensor", "gather within tensor", "reduce within tensor")}
