"""Two states, two saves, one folder: the second one is refused, and nothing of the first is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from tests.checkpoint.test_resharding import fresh, net, same, stepped, whole
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn import checkpoint
from yafsdp_fn.checkpoint import content


def halves() -> tuple[Any, int]:
    """A mesh of each half of the ranks, and which one this rank is in."""
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    which = dist.get_rank() // ranks.shape[1]
    return DeviceMesh("cpu", ranks, mesh_dim_names=("half", "shard"))["shard"], which


def saved(kind: str, directory: Path, state: ya.ShardedState) -> str:
    """The error, or nothing."""
    try:
        if kind == "save":
            checkpoint.save(directory, state, {"seed": state.seed})
        elif kind == "named":
            checkpoint.save_named(f"{directory}/named", state.params, "{} {}".format)
        else:
            with checkpoint.Saver(directory) as saver:
                saver.save(state, {"seed": state.seed})
    except checkpoint.CheckpointError as error:
        return str(error)
    return ""


def of_two_meshes(_: Any, directory: Path, kind: str) -> tuple[int, str]:
    mesh, which = halves()
    state = stepped(fresh(mesh, seed=which), 1)
    error = saved(kind, directory, state)
    dist.barrier()
    again = saved(kind, directory, state) if error else ""
    dist.barrier()
    own = f"{directory}-{which}"
    if error:
        assert again, "nor later"
        assert saved(kind, own, state) == ""
    if kind != "named":
        got, extra = checkpoint.load(own if error else directory, fresh(mesh, seed=9))
        assert extra == {"seed": which} and same(whole(got), whole(state)), "the other state's weights"
    else:
        folder = f"{own if error else directory}/named"
        lazy = checkpoint.load_named(folder, net(), "{} {}".format)
        got = ya.shard(lazy, ya.optim.identity(), mesh=mesh)
        mine = whole(state)
        theirs = whole(got)
        assert same(theirs, mine[: len(theirs)]), "the other state's weights"
    dist.barrier()
    return which, error


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["save", "Saver", "named"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_of_two_states_on_two_meshes_the_second_is_refused(pools: Pools, tmp_path: Path, ranks: int, kind: str) -> None:
    outcomes = pools[ranks].run(of_two_meshes, tmp_path / "runs", kind)
    refused = {which for which, error in outcomes if error}
    assert len(refused) == 1, "one of the two halves"
    for which, error in outcomes:
        assert bool(error) == (which in refused)
        assert not error or "give each a folder of its own" in error or "name a new folder" in error, error


@on_ranks(1, 2)
def test_a_save_that_is_under_way_is_not_swept(mesh: Any, tmp_path: Path) -> None:
    """While a save writes, another one of another state begins in its folder."""
    first, second = (stepped(fresh(mesh, seed=seed), 1) for seed in (1, 2))
    gate, under_way, write = threading.Event(), threading.Event(), content.write

    def late(*args: Any) -> None:
        under_way.set()
        gate.wait()
        write(*args)

    with pytest.MonkeyPatch.context() as patch, checkpoint.Saver(tmp_path) as saver:
        if mesh.get_rank() == 0:
            patch.setattr(content, "write", late)
        saver.save(first)
        if mesh.get_rank() == 0:
            under_way.wait()
            patch.undo()
        dist.barrier()
        try:
            with pytest.raises(checkpoint.CheckpointError, match="rank 0: another save is writing there"):
                checkpoint.save(tmp_path, second)
            dist.barrier()
        finally:
            gate.set()
    for state in (first, second):
        got, _ = checkpoint.load(tmp_path, fresh(mesh))
        assert got.seed == state.seed
        assert same(whole(got), whole(state))
        checkpoint.save(tmp_path, second)
