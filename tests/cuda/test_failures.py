"""Collectives that fail or hang on a GPU: the op is named, and nobody goes on with a communicator that is dead."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import yafsdp_fn as ya
from tests.cuda.days import MESHES
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import Event, fake_cuda
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA
from tests.harness.groups import beating, outcome
from tests.harness.oracle import batch_of
from tests.harness.problems import PROBLEMS
from tests.harness.stalls import until
from yafsdp_fn.communication import groups
from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.communicators import communicators

TX = ya.optim.adamw(1e-2)
PROBLEM = PROBLEMS["base"]


def batch(seed: int) -> dict[str, Any]:
    return {key: value.to(CUDA) for key, value in batch_of(0, seed=seed).items()}


@in_child_process
def test_an_error_that_all_ranks_see_still_ends_the_communicators() -> None:
    """Two steps, of which the second one's third gather fails in the same way on all ranks; and a third step."""
    with fake_cuda(), beating(), rank_of(MESHES["shard"]) as mesh, pytest.MonkeyPatch.context() as patch:
        state, step = ya.init(PROBLEM.params(3), TX, mesh=mesh), ya.train_step(PROBLEM.loss, TX)
        state, _ = step(state, batch(0))
        gathers = RankGroup.all_gathers
        calls = []

        def all_gathers(self: RankGroup, *args: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise dist.DistBackendError("NCCL communicator was aborted")
            gathers(self, *args)

        patch.setattr(RankGroup, "all_gathers", all_gathers)
        # the emulated ranks agree with whatever this one says: they have seen the same error in the same place
        first, second = (outcome(lambda seed=seed: step(state, batch(seed))) for seed in (1, 2))
        assert "CommunicationError: rank 0: gather of layers[1] (step 1) failed (DistBackendError: NCCL comm" in first
        assert "the communicators are lost since communication failed" in second


@in_child_process
def test_a_collective_that_does_not_end_is_named() -> None:
    """Peers stop: from some event on no reduction ends. Why communicators are lost, the next step, what is aborted."""
    aborted: list[str] = []
    with fake_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "timeout_of", lambda group, device: timedelta(seconds=1))
        with rank_of(MESHES["shard"]) as mesh:
            comms = communicators(mesh)
            for group in (comms.gather_group, comms.reduce_group):
                description = group.process_group.group_desc
                patch.setattr(group.process_group, "abort", lambda name=description: aborted.append(name))
            state, step = ya.init(PROBLEM.params(3), TX, mesh=mesh), ya.train_step(PROBLEM.loss, TX)
            state, _ = step(state, batch(0))
            reductions = comms.streams["reduce"].handle
            last = Event()
            last.record()
            patch.setattr(Event, "query", lambda self: self.stream != reductions or self.number < last.number)
            state, _ = step(state, batch(1))
            until(lambda: len(aborted) == 2)  # the watchdog aborts after it has said why
            lost = str(comms.lost)
            after = outcome(lambda: step(state, batch(2)))
    assert "rank 0: reduce of head (step 1) has not ended after 1 s. Another rank has probably stopped" in lost
    assert "CommunicationError: rank 0: the communicators are lost since rank 0: reduce of head (step 1)" in after
    assert sorted(aborted) == ["yafsdp gather", "yafsdp reduce"]


@in_child_process
def test_communicators_are_aborted_together() -> None:
    """Their kernels wait for each other: no abort returns before all have begun."""
    with fake_cuda() as device, pytest.MonkeyPatch.context() as patch, rank_of(MESHES["replicate-nodes"]) as mesh:
        comms = communicators(mesh)
        every = {group.process_group for group in (*comms.groups, *comms.message_groups, comms.metrics_group)}
        all_begun = threading.Barrier(len(every))
        for group in every:
            patch.setattr(group, "abort", lambda: (torch.zeros(1, device=CUDA), all_begun.wait(60)))
        comms.abort_late("it hangs")
        assert len(every) > 4
        assert not all_begun.broken
        assert not device.strangers


@in_child_process
def test_what_nccl_is_told() -> None:
    """The launch order, and the timeouts of its groups."""
    given: list[timedelta] = []
    new_group = dist.new_group
    with fake_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
        patch.setattr(groups, "timeout_of", lambda group, device: timedelta(seconds=100))
        patch.setattr(
            dist,
            "new_group",
            lambda ranks, timeout, *a, **k: given.append(timeout) or new_group(ranks, timeout, *a, **k),
        )
        with rank_of(MESHES["shard"]) as mesh:
            communicators(mesh)
            assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
    gather, reduce, control, abort = (timeout.total_seconds() for timeout in given)
    # ours comes before NCCL's, which ends the process
    assert gather == reduce == 160
    assert control == 100
    assert abort == 30
