"""What is dropped is freed, with the optimizer after the program and in it."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any
from unittest import mock

import optree
import torch

from tests.harness.collector import no_collection
from tests.harness.histories import Life, Setting
from tests.harness.pool import on_ranks
from yafsdp_fn.communication.streams import HostStream

Mesh = Any


@on_ranks(1, 2)
def test_a_dropped_state_frees_its_memory(mesh: Mesh, tmp_path: Any) -> None:
    """Cycles after each step, and tensors of dropped states that are alive."""
    ways = (("zero2", True, True), ("zero2", False, True), ("zero3", False, True), ("zero3", True, False))
    for builder, clips, update in ways:
        life = Life(Setting("shard", builder, clips, "frozen"), update, tmp_path)
        with no_collection():
            for number in range(4):
                life.take(life.step)
                assert gc.collect() == 0 or number == 0, f"{builder}, step {number}"
            old = life.state
            life.take(life.step)
            life.evaluate(life.state, life.batch())
            copy = life.state.copy()
            memory = [
                weakref.ref(leaf)
                for state in (life.state, copy)
                for leaf in optree.tree_leaves((state.params, state.opt_state))
                if isinstance(leaf, torch.Tensor)
            ]
            comms = life.state.memory.comms
            del old, copy, life.state
            comms.drain()  # the next step's first gathers, which hold what they read
            alive = memory
            for _ in range(1200):  # a stream's thread lets go of its work a moment after it has done it
                alive = [leaf for leaf in alive if leaf() is not None]
                if not alive:
                    break
                time.sleep(0.05)
            assert not alive, (builder, update)


@on_ranks(2)
def test_streams_know_the_slots(mesh: Mesh, tmp_path: Any) -> None:
    """They may be at work on them when a state is dropped."""
    told: list[int] = []
    with mock.patch.object(HostStream, "mark_used", lambda _, memory: told.append(memory.data_ptr())):
        life = Life(Setting("shard", "zero3", False, "pinned"), True, tmp_path)
        for _ in range(2):
            life.take(life.step)
    (slots,) = life.state.memory.idle
    buffers = [*slots._weights.values(), *slots._grads.values()]
    streams = life.state.memory.comms.streams
    assert len(buffers) > 4
    assert all(told.count(buffer.data_ptr()) >= len(streams) for buffer in buffers)
