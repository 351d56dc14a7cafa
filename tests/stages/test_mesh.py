"""Meshes with stages: who is where, and messages from stage to stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import Pools, on_ranks
from tests.stages.states import mesh_of
from yafsdp_fn.communication.communicators import communicators


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


def test_stages_are_the_outermost_axis(pools: Pools) -> None:
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


@on_ranks(4)
def test_messages_between_stages_wait_for_none_of_the_other_direction(_: Any) -> None:
    """Each stage sends to all others at once, large and small, and receives the other way round."""
    comms = communicators(mesh_of(stage=4))
    comms._meet()  # as with NCCL: no two wait for each other
    others = [(comms.stage + by) % 4 for by in (1, 2, 3)]
    sizes = (1, 300_000, 7)
    received = {}
    events = []
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


def test_what_is_no_mesh_of_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh\(stage=3, shard=-1\): the job has 1 rank, not a multiple of 3"):
        ya.mesh(device="cpu", stage=3)
    with pytest.raises(ValueError, match=r"mesh\(stage=0, shard=-1\): expected the number of stages"):
        ya.mesh(device="cpu", stage=0)
    with pytest.raises(ValueError, match=r"stage=-2"):
        ya.mesh(device="cpu", stage=-2, shard=1)
