"""With the optimizer in the program, too: no allocation grows from the third step on, and what is dropped is freed."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from typing import Any
from unittest import mock

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.collector import no_collection
from tests.harness.histories import BUILDERS, Life, Setting
from tests.harness.meshes import made
from tests.harness.oracle import by_autograd
from tests.harness.pool import on_ranks
from tests.steps.test_allocations import ACTIVATIONS, LAYERS, E, F, V, batch, loss, measured, params
from yafsdp_fn.communication.streams import HostStream

Mesh = Any
TXS = {
    "after the norm": ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-3)),
    "without a clip": ya.optim.adamw(1e-3),
}
FRESH = sorted(4 * size for size in LAYERS * [E * F, E * F] + 2 * [V * E])
"""Bytes of the gradients that autograd allocates in one microbatch."""

WORLDS = {
    1: [("shard", "zero3")],
    2: [("copies", "ddp"), ("shard", "zero1"), ("shard", "zero2"), ("shard", "zero3"), ("shard", "resident")],
    4: [("replicate", "hsdp"), ("nodes", "hpz")],
}
CASES = [(world, *case) for world, cases in WORLDS.items() for case in cases]


def advance(step: Any, states: list[ya.ShardedState]) -> None:
    states[0], _ = step(states[0], batch())


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize(("world", "kind", "builder"), CASES)
@by_autograd()
def test_only_fresh_gradients_are_allocated(_: Mesh, kind: str, builder: str) -> None:
    for when, tx in TXS.items():
        for update in (True, False) if when == "without a clip" and builder == "zero2" else (True,):
            schedule, skips = BUILDERS[builder](update=update), when == "after the norm"
            step = ya.train_step(loss, tx, schedule=schedule, skip_nonfinite=skips)
            states = [ya.init(params(), tx, mesh=made(kind))]
            one = functools.partial(advance, step, states)
            one()
            one()
            found, what = measured(one), f"{builder}, update={update}, {when}"
            assert sorted(n for n in found.outputs if n > ACTIVATIONS) == FRESH, what
            assert [n for n in found.streams if n > ACTIVATIONS] == [], what
            assert sorted(n for n in found.large() if n > 0) == FRESH and sum(found.large()) == 0, what
            program = step.program(states[0])
            assert program.has_updates is update


@on_ranks(1, 2)
def test_a_dropped_state_frees_its_memory(mesh: Mesh, tmp_path: Any) -> None:
    """Cycles after each step, and tensors of dropped states that are alive."""
    for builder, clips in (("zero2", True), ("zero2", False), ("zero3", False)):
        life = Life(Setting("shard", builder, clips, "frozen"), True, tmp_path)
        with no_collection():
            for number in range(4):
                life.take(life.step)
                assert gc.collect() == 0 or number == 0, f"{builder}, step {number}"
            old = life.state
            life.take(life.step)
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
            assert not alive, builder


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
    assert len(buffers) > 4 and all(told.count(buffer.data_ptr()) >= len(streams) for buffer in buffers)
