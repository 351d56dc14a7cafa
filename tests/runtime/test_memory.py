"""Slots that grow and are given back. That they have the program's sizes, or are shards, is in test_footprint.py; that
they stay where they are, in steps/test_allocations.py."""

from __future__ import annotations

import torch

import yafsdp_fn as ya
from tests.harness.small import batch, loss, model, one_rank, slot_bytes
from yafsdp_fn.runtime.slots import Slots

TX = ya.optim.adamw(1e-2)


def test_a_slot_grows_and_its_views_with_it() -> None:
    memory = ya.init(model(), TX, mesh=one_rank(), precision=ya.Precision(reduce=torch.bfloat16)).memory
    slots = Slots(memory)
    grads = memory.kept_grads()
    slots.reserve({}, {0: memory.units[1].reduce_bytes})
    small = slots.grad(0, 1, grads).flat
    assert slots.grad(0, 1, grads).flat is small
    slots.reserve({}, {0: 10 * memory.units[1].reduce_bytes})
    assert slot_bytes(slots) == 10 * memory.units[1].reduce_bytes
    large = slots.grad(0, 1, grads).flat
    assert large is not small
    assert large.shape == small.shape
    for nbytes in (8, slot_bytes(slots)):
        slots.reserve({}, {0: nbytes})
        assert slots.grad(0, 1, grads).flat is large


def test_slots_are_given_back_and_told_apart() -> None:
    state = ya.init(model(), TX, mesh=one_rank())
    step = ya.train_step(loss, TX)
    state, _ = step(state, batch(0))
    (one,) = state.memory.idle
    state, _ = step(state, batch(1))
    assert state.memory.idle == [one]
    assert one.number != Slots(state.memory).number
    assert state.memory.working.views(1) is state.memory.working.views(1)  # views are made once
