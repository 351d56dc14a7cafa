"""Checkpoints and states pass from any number of stages to any other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.oracle import batch_of
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import base_loss, base_params
from tests.stages.states import F64, MODELS, OPTIMIZERS, grads_of, mesh_of, on_stages, same, scattered, trained
from yafsdp_fn.program.split import Assignment


def begun(mesh: Any, folder: Path, axes: dict[str, int], optimizer: str) -> int:
    state = trained(mesh, axes, OPTIMIZERS[optimizer]())
    ya.checkpoint.save(folder, state, {"at": 3})
    return ya.checksum(state)


def handed_on(mesh: Any, folder: Path, axes: dict[str, int], optimizer: str, background: bool) -> tuple[int, int]:
    tx = OPTIMIZERS[optimizer]()
    state, extra = ya.checkpoint.load(folder, on_stages(MODELS["pinned"](), tx, **axes))
    assert extra == {"at": 3}
    assert state.step == 2
    found = ya.checksum(state)
    if background:
        with ya.checkpoint.Saver(folder) as saver:
            saver.save(state, extra)
            state = state.apply_gradients(grads_of(state, 2), tx)
        state, _ = ya.checkpoint.load(folder, state)
    else:
        ya.checkpoint.save(folder, state, extra)
    return found, ya.checksum(state)


def test_checkpoints_pass_from_any_number_of_stages_to_any_other(pools: Pools, tmp_path: Path) -> None:
    optimizer = "muon"  # and AdamW, for the rest
    first = set(pools[4].run(begun, tmp_path, {"stage": 2}, optimizer))
    assert len(first) == 1
    ways: list[tuple[int, dict[str, int]]] = [(1, {}), (4, {"stage": 4}), (3, {}), (2, {"stage": 2})]
    ways += [(4, {"stage": 2, "replicate": 2}), (3, {"stage": 3}), (1, {})]
    for number, (world, axes) in enumerate(ways):
        found = pools[world].run(handed_on, tmp_path, axes, optimizer, number % 2 == 0)
        assert {value for pair in found for value in pair} == first, (world, axes)


@on_ranks(4)
def test_a_state_goes_from_stages_to_others_and_back(mesh: Any) -> None:
    tx = OPTIMIZERS["muon"]()
    state = trained(mesh, {"stage": 2}, tx)
    expected = ya.checksum(state)
    units = len(state.memory.units)
    ways: list[dict[str, Any]] = [
        {"mesh": mesh_of(shard=-1)},
        {"mesh": mesh_of(stage=4), "stages": scattered(units, 4)},
        {"stages": Assignment(tuple((unit % 4,) for unit in range(units)), (3, 2, 1, 0))},
        {"mesh": mesh_of(stage=2), "stages": scattered(units, 2)},
        {},
    ]
    for options in ways:
        state = ya.shard(state, tx, **options)
        assert ya.checksum(state) == expected and state.step == 2, options
    tensors = ya.shard(ya.unshard(state), mesh=mesh_of(stage=1), precision=F64)
    same(tensors.params, state.params)


@on_ranks(2)
def test_a_run_goes_on_with_its_pipeline(mesh: Any, tmp_path: Path) -> None:
    tx = ya.optim.adamw(1e-2)
    params = base_params(3)
    batch = batch_of(0, rows=4)
    stages = ya.schedules.assign(ya.planner.trace(base_loss, params, batch, microbatches=2), stages=2)
    state = on_stages(params, tx, stages, stage=2)
    step = ya.train_step(base_loss, tx, microbatches=2)
    state, _ = step(step(state, batch)[0], batch)
    ya.checkpoint.save(tmp_path, state)
    again, _ = ya.checkpoint.load(tmp_path, on_stages(params, tx, stages, stage=2))
    assert isinstance(state.program, ya.Program)
    assert again.program == state.program
    expected, _ = step(state, batch)
    got, _ = ya.train_step(base_loss, tx, schedule=again.program, microbatches=2)(again, batch)
    assert ya.checksum(got) == ya.checksum(expected)
    other = Assignment(((0,), *((1,) for _ in stages.units[1:])), (0, 1))
    assert other != stages
    for like in (on_stages(params, tx, other, stage=2), on_stages(params, tx, shard=-1)):
        assert ya.checkpoint.load(tmp_path, like)[0].program is None, "it is of another cut"
    again, _ = ya.checkpoint.load(tmp_path, on_stages(params, tx, stages, stage=2))
    assert again.program is not None
    ops = list(again.program.stages[0])
    ahead = next(at for at, op in enumerate(ops) if isinstance(op, ya.schedules.Receive))
    ops.insert(next(at for at, op in enumerate(ops) if isinstance(op, ya.schedules.Forward)), ops.pop(ahead))
    ya.checkpoint.save(tmp_path / "ahead", dataclasses.replace(again, program=again.program.with_ops(ops, 0)))
    early, _ = ya.checkpoint.load(tmp_path / "ahead", on_stages(params, tx, stages, stage=2))
    with pytest.raises(ya.errors.Refused, match="rule 'deadlock'"):
        ya.train_step(base_loss, tx, schedule=early.program, microbatches=2)(early, batch)
    assert ya.checksum(step(early, batch)[0]) == ya.checksum(expected)
