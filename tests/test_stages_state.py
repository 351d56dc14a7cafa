"""States on meshes with stages: each rank holds shards of its stage's units, and all else is as on a plain tree."""

from __future__ import annotations

import functools
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import Pool
from tests.harness.problems import frozen_params, pinned_params
from yafsdp_fn.comm.communicators import communicators
from yafsdp_fn.schedules.split import Assignment

F64 = ya.Precision(param=torch.float64, compute=torch.float64, reduce=torch.float64)
MODELS = {"pinned": lambda: pinned_params(5), "frozen": lambda: frozen_params(5)}
MESHES = ((2, {"stage": 2}), (4, {"stage": 2}), (4, {"stage": 4}), (4, {"stage": 2, "replicate": 2}))


@functools.cache
def mesh_of(**axes: int) -> Any:
    return ya.mesh(device="cpu", **axes)


def scattered(units: int, stages: int) -> Assignment:
    """Units here and there, two segments on each stage; one that no visit uses."""
    order = tuple(range(stages))
    return Assignment((*((unit * unit % (2 * stages),) for unit in range(units - 1)), ()), order + order)


def units_of(params: Any) -> int:
    return len(ya.init(params, mesh=mesh_of()).memory.units)


def on_stages(params: Any, tx: Any = None, stages: Any = None, **axes: int) -> ya.ShardedState:
    mesh = mesh_of(**axes)
    count = communicators(mesh).stages
    given = scattered(units_of(params), count) if stages is None and count > 1 else stages
    return ya.init(params, tx, mesh=mesh, precision=F64, seed=3, stages=given)


def plain(params: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.double(), ya.materialize(params, seed=3))


# ---- the mesh


def who(mesh: Any, axes: dict[str, int]) -> Any:
    made = mesh_of(**axes)
    comms = communicators(made)
    assert comms.world == 4 == comms.stages * comms.batch_ranks
    assert comms.world_rank == comms.stage * comms.batch_ranks + comms.batch_rank == mesh.get_rank()
    assert ("send" in comms.streams) == ("receive" in comms.streams) == (comms.stages > 1)
    every = comms.all_reduce_sum(torch.tensor([2.0 ** mesh.get_rank()]))
    shards = comms.all_gather(torch.tensor([mesh.get_rank()]))
    batch = ya.shard_batch(torch.arange(4), made)
    return made.mesh_dim_names, (comms.stage, comms.replica, comms.rank), every.item(), shards.tolist(), batch.tolist()


def test_stages_are_the_outermost_axis(pools: dict[int, Pool]) -> None:
    names = ("stage", "shard")
    two = pools[4].run(who, {"stage": 2})
    assert two == [
        (names, (r // 2, 0, r % 2), 15.0, [r // 2 * 2, r // 2 * 2 + 1], [r % 2 * 2, r % 2 * 2 + 1]) for r in range(4)
    ]
    copies = pools[4].run(who, {"stage": 2, "replicate": 2})
    assert [at for _, at, *_ in copies] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert [names for names, *_ in pools[4].run(who, {"stage": 1})] == [("shard",)] * 4
    nodes = pools[4].run(who, {"stage": 2, "local": 1})
    assert nodes[3][:2] == (("stage", "node", "local"), (1, 0, 1))


def messages(_: Any) -> None:
    """Each stage sends to all others at once, large and small, and receives the other way round."""
    comms = communicators(mesh_of(stage=4))
    others = [(comms.stage + by) % 4 for by in (1, 2, 3)]
    sizes, received, events = (1, 300_000, 7), {}, []
    before = comms.event()
    before.complete()
    for to in others:
        for number, size in enumerate(sizes):
            content = torch.full((size,), float(100 * comms.stage + 10 * to + number))
            events.append(comms.event())
            comms.streams["send"].submit(comms.send(content, to), [before], events[-1], "send")
    for source in reversed(others):
        for number, size in enumerate(sizes):
            received[source, number] = torch.empty(size)
            events.append(comms.event())
            work = comms.receive(received[source, number], source)
            comms.streams["receive"].submit(work, [before], events[-1], "receive")
    for event in events:
        event.wait()
    for (source, number), content in received.items():
        assert content.eq(100 * source + 10 * comms.stage + number).all()


def test_messages_between_stages_wait_for_none_of_the_other_direction(pools: dict[int, Pool]) -> None:
    pools[4].run(messages)


def test_what_is_no_mesh_of_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh\(stage=3, shard=-1\): there are 1 ranks, not a multiple of 3"):
        ya.mesh(device="cpu", stage=3)
    with pytest.raises(ValueError, match=r"mesh\(stage=0, shard=-1\): expected the number of stages"):
        ya.mesh(device="cpu", stage=0)
    with pytest.raises(ValueError, match=r"stage=-2"):
        ya.mesh(device="cpu", stage=-2, shard=1)


# ---- states


def holds_its_own(_: Any, model: str, axes: dict[str, int]) -> None:
    params = MODELS[model]()
    state = on_stages(params, **axes)
    memory, comms = state.memory, state.memory.comms
    assert memory.held == memory.assignment.held(comms.stage) == set(memory.master.rows)
    own = [unit for unit in memory.units if unit.numel]
    assert {unit.id for unit in own} == memory.held and set(memory.trained) <= memory.held
    whole = memory.abstract()
    assert whole.comms.stages == 1 and all(unit.numel for unit in whole.units) and len(whole.units) == len(memory.units)
    assert memory.key != whole.key and memory.key.endswith(f"{comms.stage})")
    got = ya.unshard(state)
    for mine, expected in zip(optree.tree_leaves(got), optree.tree_leaves(ya.strip(plain(params))), strict=True):
        assert torch.equal(mine.double(), expected)
    n = {unit: memory.layout_of(unit).shard_numel(comms.ranks) for unit in memory.held}
    assert sum(leaf.numel() for leaf in optree.tree_leaves(state.params)) == sum(n.values()), "no memory for others"


@pytest.mark.parametrize(("world", "axes"), MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_holds_shards_of_its_own_units(
    pools: dict[int, Pool], model: str, world: int, axes: dict[str, int]
) -> None:
    pools[world].run(holds_its_own, model, axes)
