"""Norms, maps and optimizers on meshes with stages are those of the plain tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.oracle import compare
from tests.harness.pool import Pools, on_ranks
from tests.stages.states import (
    MESHES,
    MODELS,
    OPTIMIZERS,
    bits,
    grads_of,
    mesh_of,
    on_stages,
    pair,
    plain,
    same,
    units_of,
)
from yafsdp_fn.optim.step.units import UnitSteps
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.program.split import Assignment


def numbers(_: Any, model: str, axes: dict[str, int]) -> None:
    params = MODELS[model]()
    state, other = pair(params, None, axes)
    leaves = optree.tree_leaves(ya.params.without_markers(plain(params)))
    square = sum(leaf.square().sum() for leaf in leaves)
    torch.testing.assert_close(ya.global_norm(state.params), square.sqrt(), rtol=1e-14, atol=0.0)
    noise = grads_of(state, 5)
    same(noise, grads_of(other, 5))
    inner = sum((a * b).sum() for a, b in zip(leaves, bits(noise), strict=True))
    torch.testing.assert_close(ya.vdot(state.params, noise), inner, rtol=1e-12, atol=1e-12)
    mixed = optree.tree_map(lambda p, z: p.sin() * z, state.params, noise)
    same(mixed, optree.tree_map(lambda p, z: p.sin() * z, other.params, grads_of(other, 5)))
    assert ya.checksum(state) == ya.checksum(other)
    assert ya.checksum(state.copy()) == ya.checksum(state)


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize(("world", "axes"), MESHES)
def test_norms_and_trees_are_those_of_the_plain_tree(mesh: Any, axes: dict[str, int]) -> None:
    world = mesh.size()
    for model in MODELS if world == 2 else ("pinned",) if len(axes) > 1 else ("frozen", "lora"):
        numbers(mesh, model, axes)


# ---- optimizers


def optimizers(_: Any, model: str, axes: dict[str, int], names: list[str]) -> None:
    for name in names:
        tx = OPTIMIZERS[name]()
        states = pair(MODELS[model](), tx, axes)
        same(states[0].opt_state, states[1].opt_state)
        for step in range(2):
            states = tuple(state.apply_gradients(grads_of(state, step), tx) for state in states)
        same(states[0].params, states[1].params, 1e-13, name)
        same(states[0].opt_state, states[1].opt_state, 1e-13, name)


def test_optimizers_take_the_steps_of_one_stage(pools: Pools) -> None:
    pools[2].run(optimizers, "pinned", {"stage": 2}, list(OPTIMIZERS))
    pools[2].run(optimizers, "lora", {"stage": 2}, ["muon"])
    pools[4].run(optimizers, "frozen", {"stage": 2}, ["clipped", "muon"])
    pools[4].run(optimizers, "frozen", {"stage": 4}, ["muon"])


def unit_by_unit(_: Any, model: str, axes: dict[str, int], name: str) -> None:
    """As programs take the step: backwards, in parts where leaves travel. The last stage has nothing to train."""
    tx = OPTIMIZERS[name]()
    params = MODELS[model]()
    trained = set(on_stages(params, shard=-1).memory.trained)
    stages = dict(axes)["stage"]
    last = (stages - 1,)
    homes = [(unit % (stages - 1) if unit in trained else last[0],) for unit in range(units_of(params))]
    state, other = pair(params, tx, axes, stages=Assignment(tuple(homes), tuple(range(stages))))
    assert bool(state.memory.trained) == (state.memory.comms.stage != last[0])
    for number in range(2):
        steps = UnitSteps(tx, trainable(state.params), trainable(grads_of(state, number)), state.opt_state)
        for unit in reversed(state.memory.trained):
            for part in range(steps.parts.get(unit, 1)):
                steps.run([unit], part=part if steps.parts else None)
                for received, sent in steps.messages([unit]) if unit in steps._open else ():
                    state.memory.comms.exchange(received, sent)
        assert steps.finish() is state.opt_state
        other = other.apply_gradients(grads_of(other, number), tx)
    same(state.params, other.params, 1e-13)
    same(state.opt_state, other.opt_state, 1e-13)


def test_units_take_their_steps_one_by_one(pools: Pools) -> None:
    for name in ("adamw", "muon", "soap"):
        pools[2].run(unit_by_unit, "frozen", {"stage": 2}, name)
    pools[4].run(unit_by_unit, "lora", {"stage": 2}, "muon")


# ---- a unit on several stages


@on_ranks(4)
def test_a_unit_on_two_stages_counts_once(mesh: Any, tmp_path: Path) -> None:
    """The unit at home on the first stage that holds it is counted, summed up and saved once."""
    tx = OPTIMIZERS["clipped"]()
    axes = {"stage": 2}
    units = units_of(MODELS["pinned"]())
    both = Assignment(tuple((0, 1) if unit in (0, 1, 4) else (unit % 2,) for unit in range(units)), (0, 1))
    state, other = pair(MODELS["pinned"](), tx, axes, stages=both)
    assert {0, 1, 4} <= state.memory.held
    for step in range(2):
        torch.testing.assert_close(ya.global_norm(state.params), ya.global_norm(other.params), rtol=1e-13, atol=0.0)
        state, other = (each.apply_gradients(grads_of(each, step), tx) for each in (state, other))
    same(state.params, other.params, 1e-13)
    ya.checkpoint.save(tmp_path, state)
    again, _ = ya.checkpoint.load(tmp_path, on_stages(MODELS["pinned"](), tx, both, **axes))
    assert ya.checksum(again) == ya.checksum(state) == ya.checksum(ya.shard(state, tx, mesh=mesh_of(shard=-1)))
    compare(again.params, state.params, 0.0, "loaded")
    own = again.memory.master.rows
    if again.memory.comms.stage == 1:
        own[4][0] += 1
    with pytest.raises(ya.errors.Corrupted, match="rank 0 and rank 2 differ"):
        ya.checksum(again)
    if again.memory.comms.stage == 1:
        own[4][0] -= 1
    counted = sum(leaf.square().sum() for leaf in again.memory.master.counted)
    torch.testing.assert_close(
        again.memory.comms.all_reduce_sum(counted).sqrt(), ya.global_norm(state.params), rtol=1e-13, atol=0.0
    )
