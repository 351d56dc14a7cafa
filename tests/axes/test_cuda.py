"""Axes inside blocks as a GPU would run them: no use of memory that nothing orders, and the numbers of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.axes.test_doc import batch, example
from tests.cuda.conftest import in_child  # noqa: F401  # a fixture
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.log import findings
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA
from yafsdp_fn.dist import communicators as module
from yafsdp_fn.dist.communicators import communicators
from yafsdp_fn.util import squares

AXES = {"shard": 2, "tensor": 2}
DAYS = ("kept", "recomputed", "whole leaves")


def day(mesh: Any, device: torch.device, which: str) -> list[Any]:
    """Some steps, and whole values; what a user might look at."""
    inner = ya.optim.muon(1e-2, dtype=None) if which == "whole leaves" else ya.optim.adamw(1e-2)
    page, tx = example(), ya.optim.chain(ya.optim.clip_by_global_norm(0.1), inner)
    schedule = ya.schedules.zero3(remat="all") if which == "recomputed" else ya.schedules.zero3()
    state, out = ya.init(page["params"], tx, mesh=mesh), list[Any]()
    step = ya.train_step(page["loss_fn"], tx, schedule=schedule, microbatches=2)
    for _ in range(4):
        state, metrics = step(state, {name: x.to(device) for name, x in batch().items()})
        out.append(metrics)
    out.append(ya.map_whole_layers(lambda layer: layer["up"].sum() + layer["norm"].sum(), state.params["layers"]))
    out.append(ya.unshard(state))
    return [leaf.cpu().tolist() for leaf in optree.tree_leaves(out)]


def searched(which: str) -> tuple[bool, list[str]]:
    with pytest.MonkeyPatch.context() as patch, rank_of(AXES, torch.device("cpu")) as mesh:
        patch.setattr(squares, "_on_cpu", squares._on_gpu)
        want = day(mesh, torch.device("cpu"), which)
    with fake_cuda() as device, rank_of(AXES) as mesh:
        got = day(mesh, CUDA, which)
    return got == want, list(map(str, findings(device.log)))


@pytest.mark.parametrize("which", DAYS)
def test_days_without_races(in_child: Callable[..., Any], which: str) -> None:  # noqa: F811
    equal, found = in_child(searched, which)
    assert not found, "\n".join(found)
    assert equal


def used() -> tuple[set[str], set[str]]:
    """The process groups that are there when a state has been placed, and those that its steps use after that."""
    with fake_cuda(), pytest.MonkeyPatch.context() as patch, rank_of(AXES) as mesh:
        made: list[Any] = []
        patch.setattr(module, "make_communicator", lambda group, device: made.append(group))
        page, comms = example(), communicators(mesh)
        state = ya.init(page["params"], ya.optim.sgd(0.1), mesh=mesh)
        every = {each.process_group for each in (*comms.groups, *comms.along.values(), comms.metrics_group)}
        met = {each.group_desc for each in every if each.issued or each in made}
        for each in every:
            each.issued.clear()
        step = ya.train_step(page["loss_fn"], ya.optim.sgd(0.1))
        for _ in range(2):
            state, _ = step(state, {name: x.to(CUDA) for name, x in batch().items()})
        return met, {each.group_desc for each in every if each.issued}


def test_every_communicator_is_there_before_a_step(in_child: Callable[..., Any]) -> None:  # noqa: F811
    met, later = in_child(used)
    assert later <= met
    assert later >= {f"yafsdp {name}" for name in ("along tensor", "gather within tensor", "reduce within tensor")}
