"""What meets everybody with a GPU first: the README's code, threads, a capture of one's own, the first collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from tests.cuda.days import BUILDERS, MESHES, PRECISIONS, REMATS
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import CUDAGraph, Event, fake_cuda, graph
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA, Device
from tests.harness.gpu import on_gpu
from tests.harness.oracle import batch_of
from tests.harness.problems import PROBLEMS
from tests.harness.readme import on
from tests.harness.stalls import until
from yafsdp_fn import checkpoint
from yafsdp_fn.communication import groups, watchdog
from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.communicators import communicators

PROBLEM = PROBLEMS["base"]
TX = ya.optim.adamw(1e-2)


@in_child_process
def test_the_readme_runs_on_one_gpu_and_on_two() -> None:
    for ranks in (1, 2):
        with fake_cuda(), rank_of({"shard": ranks}) as mesh:
            names: dict[str, Any] = {"MESH": mesh}
            exec(on("MESH"), names)
            loss = names["metrics"]["loss"]
            tokens = names["batch"]["tokens"]
            assert 0 < loss.item() < 30
            assert str(loss.device) == str(tokens.device) == "cuda:0"


def expect_other_values_of_a_seed(device: Any, mesh: DeviceMesh) -> None:
    """Of `init` and of a plain tree on the device, than of one on the CPU, which is a state too."""
    params = PROBLEM.params(3)
    given = ya.shard(ya.materialize(params, seed=1), TX, like=params, mesh=mesh)
    states = [ya.unshard(state.params) for state in (ya.init(params, TX, mesh=mesh, seed=1), given)]
    plain = [ya.materialize(params, seed=1, device=of) for of in (device, "cpu")]
    init, there, here, sharded = (
        [leaf.tolist() for leaf in optree.tree_leaves(tree)] for tree in (states[0], *plain, states[1])
    )
    assert init == there != here == sharded


@in_child_process
def test_a_seed_means_other_values_on_a_gpu_unless_they_are_drawn_here() -> None:
    with fake_cuda(), rank_of({"shard": 1}) as mesh, pytest.MonkeyPatch.context() as patch:
        seed = torch._C.Generator.manual_seed
        # as on a GPU, whose generator makes other numbers of a seed
        patch.setattr(torch.Generator, "manual_seed", lambda self, n: seed(self, n + (self.device.type == "cuda")))
        expect_other_values_of_a_seed(CUDA, mesh)


@on_gpu
def test_a_seed_means_other_values_on_a_real_gpu() -> None:
    expect_other_values_of_a_seed("cuda", ya.mesh(device="cuda"))


@in_child_process
def test_a_batch_goes_to_the_device_and_the_host_waits_for_no_pinned_memory() -> None:
    """What it waits for when `shard_batch` gets memory of the host, pinned, and of the device."""
    found = []
    with fake_cuda() as device, rank_of(MESHES["shard"]) as mesh:
        for x in (torch.ones(8, 2), torch.empty(8, 2, pin_memory=True), torch.ones(8, 2, device=CUDA)):
            device.syncs.clear()
            mine = ya.shard_batch({"x": x, "n": 5}, mesh)
            assert mine["x"].device == CUDA
            assert mine["x"].shape == (2, 2)
            assert mine["n"] == 5
            found.append(list(device.syncs))
        assert ya.shard_batch({"scale": torch.tensor(3.0)}, mesh)["scale"].device == CUDA
    assert found == [["a copy from the host"], [], []]


@contextmanager
def watched() -> Iterator[tuple[Device, DeviceMesh]]:
    """A mesh whose watchdog looks twenty times a second at collectives, none of which ends."""
    query = Event.query
    with fake_cuda() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "timeout_of", lambda group, device: timedelta(seconds=60))
        patch.setattr(watchdog, "LONGEST_S", 0.05)
        patch.setattr(Event, "query", lambda self: query(self) and False)
        with rank_of(MESHES["shard"]) as mesh:
            yield device, mesh


def asking(device: Device, patch: pytest.MonkeyPatch) -> set[str]:
    """Returns the names of threads that ask how far the device is, from now on."""
    names: set[str] = set()
    asks = device.asks
    patch.setattr(device, "asks", lambda what: (names.add(threading.current_thread().name), asks(what)))
    return names


@in_child_process
def test_threads_say_which_device_is_theirs(tmp_path: Path) -> None:
    """Those that ask how far the device is."""
    with pytest.MonkeyPatch.context() as patch:
        with watched() as (device, mesh):
            names = asking(device, patch)
            communicators(mesh)
            until(lambda: "yafsdp-watchdog" in names)
            strangers = device.strangers
        with fake_cuda() as device, rank_of({"shard": 1}) as mesh, checkpoint.Saver(tmp_path) as saver:
            more = asking(device, patch)
            saver.save(ya.init(PROBLEM.params(3), TX, mesh=mesh))
            saver.wait()
            assert strangers + device.strangers == []
            assert {"yafsdp-watchdog", "yafsdp-save"} <= names | more


@in_child_process
def test_the_watchdog_spoils_no_capture_of_a_user() -> None:
    with watched() as (_, mesh):
        comms = communicators(mesh)
        with graph(CUDAGraph()):
            time.sleep(0.3)
        assert len(comms.under_way()) > 0


@in_child_process
def test_the_watchdog_does_not_look_at_captured_work() -> None:
    with watched() as (_, mesh):
        comms = communicators(mesh)
        pending = comms.streams["reduce"]._pending
        pending.clear()
        with graph(CUDAGraph()):
            comms.all_reduce_sum(torch.zeros(1, device=CUDA))
        assert len(pending) == 0


@pytest.mark.sampled
@pytest.mark.parametrize("builder", ["zero3", "hpz", "hsdp", "ddp"])
@pytest.mark.parametrize("precision", [PRECISIONS[0], PRECISIONS[3]], ids=["fp32", "bf16"])
@in_child_process
def test_every_communicator_is_there_when_ranks_have_met(builder: str, precision: ya.Precision) -> None:
    """The process groups that two steps use after that."""
    build, axes = BUILDERS[builder]
    schedule = build(remat=REMATS["all"])
    with fake_cuda(), pytest.MonkeyPatch.context() as patch, rank_of(MESHES[axes]) as mesh:
        made: list[Any] = []  # emulated groups have no communicators
        patch.setattr(
            "yafsdp_fn.communication.communicators.make_communicator", lambda group, device: made.append(group)
        )
        comms = communicators(mesh)
        every = {each.process_group for each in (*comms.groups, comms.metrics_group)}
        met = {each.group_desc for each in every if each.issued or each in made}
        for each in every:
            each.issued.clear()
        state = ya.init(PROBLEM.params(3), TX, mesh=mesh, precision=precision)
        step = ya.train_step(PROBLEM.loss, TX, schedule=schedule)
        for seed in range(2):
            state, _ = step(state, {key: value.to(CUDA) for key, value in batch_of(0, seed=seed).items()})
        later = {each.group_desc for each in every if each.issued}
        assert later
        assert later <= met


@in_child_process
def test_stages_meet_in_every_communicator_too() -> None:
    with fake_cuda(), pytest.MonkeyPatch.context() as patch, rank_of({"stage": 2, "shard": 2}) as mesh:
        for name in ("send", "receive"):  # emulated ranks have no messages
            patch.setattr(RankGroup, name, lambda self, tensor, rank: self.process_group.issued.update(["message"]))
        comms = communicators(mesh)
        every = {each.process_group for each in (*comms.groups, *comms.message_groups, comms.metrics_group)}
        comms.share((0, 1))
        comms.share((0, 1))  # it is there already
        assert comms.sharing((0, 1)).process_group.issued.total() == 1
        assert [each.group_desc for each in every if not each.issued] == []
