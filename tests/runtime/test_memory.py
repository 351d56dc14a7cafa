"""Shards, slots and what aliases what: at one rank nothing is copied, at two slots have the program's sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import batch, block, loss, model, one_rank, slot_bytes, with_block
from yafsdp_fn.runtime.slots import Slots

TX = ya.optim.adamw(1e-2)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def watched(seen: list[Any]) -> Any:
    def layer(c: Tensor, w: Any) -> Any:
        seen.append(w["up"])
        return block(c, w)

    return with_block(layer)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float64])
def test_one_rank_computes_on_the_working_copy_itself(compute: torch.dtype) -> None:
    state = ya.init(model(), TX, mesh=one_rank(), precision=ya.Precision(compute=compute))
    seen: list[Tensor] = []
    step = ya.train_step(watched(seen), TX)
    for _ in range(2):
        seen.clear()
        working = state.memory.working.tensors[1]
        state, _ = step(state, batch())
        in_step = seen[-3:]  # before them the first call is recorded, on the pure path
        assert working is not None
        assert {storage(w) for w in in_step} == {storage(working)}
        assert len({w.data_ptr() for w in in_step}) == 3
        assert {w.dtype for w in in_step} == {compute}
    assert all(
        leaf.untyped_storage().data_ptr() == storage(state.memory.master.tensors[1])
        for leaf in state.params.layers.leaves
    )


def test_one_rank_needs_no_slots_and_keeps_its_gradients() -> None:
    state = ya.init(model(), TX, mesh=one_rank())
    step = ya.train_step(loss, TX)
    places = set()
    for number in range(4):
        state, _ = step(state, batch(number))
        (slots,) = state.memory.idle
        assert slot_bytes(slots) == 0
        places.add(tuple(storage(tensor) for tensor in state.memory.kept_grads().tensors if tensor is not None))
    assert len(places) == 1
    assert state.memory.working.views(1) is state.memory.working.views(1)  # views are made once


def test_another_reduction_dtype_takes_gradient_slots() -> None:
    precision = ya.Precision(reduce=torch.bfloat16)
    state = ya.init(model(), TX, mesh=one_rank(), precision=precision)
    step = ya.train_step(loss, TX)
    for number in range(3):
        state, _ = step(state, batch(number))
    program = step.program(state)
    assert program is not None
    (slots,) = state.memory.idle
    assert slot_bytes(slots) == sum(program.grad_slot_bytes().values())
    flat, leaves, _ = slots.grad(0, 1, state.memory.kept_grads())
    assert flat.dtype == torch.bfloat16
    assert len(leaves) == 3
    assert all(storage(leaf) == storage(flat) for leaf in leaves)


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


# ---- two ranks


@on_ranks(2)
def test_two_ranks_have_two_layer_slots_of_the_programs_size_for_ever(mesh: Any) -> None:
    """Over five steps: sizes, places, and what layers see."""
    state = ya.init(model(5), TX, mesh=mesh)
    seen: list[Tensor] = []
    step = ya.train_step(watched(seen), TX, microbatches=2)
    places = set()
    sizes = set()
    layers = set()
    for number in range(5):
        seen.clear()
        state, _ = step(state, batch(number))
        if number == 0:
            continue
        layers.add(len({storage(w) for w in seen}))
        memory = state.memory
        (slots,) = memory.idle
        sizes.add(slot_bytes(slots))
        places.add(tuple(storage(w) for w in seen[:5]))
    seen.clear()  # a weight's graph holds the block, and the block this list: a cycle that no collector finds
    program = step.program(state)
    assert program is not None
    owned = sum(program.slot_bytes().values()) + sum(program.grad_slot_bytes().values())
    assert sizes == {owned}
    assert len(places) == 1
    assert layers == {2}
