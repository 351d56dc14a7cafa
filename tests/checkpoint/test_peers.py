"""Copies in the memory of hosts: a folder stands for each host."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.checkpoint.test_resharding import TX, Pools, loss, net, same, stepped, whole
from yafsdp_fn.checkpoint.peers import PeerMemory


def names(folder: str) -> list[str]:
    return sorted(os.listdir(folder))


def lost_host(mesh: Any, directory: str, ranks_of_host: int) -> list[str]:
    """Two saves; then the first host is another, with nothing in its memory."""
    rank = mesh.get_rank()
    host = f"{directory}/host-{rank // ranks_of_host}"
    state = stepped(ya.init(net(), TX, mesh=mesh, seed=4), 1)
    step = ya.train_step(loss, TX)
    with PeerMemory(host) as memory:
        assert memory.load(ya.init(net(), TX, mesh=mesh)) is None, "nothing there yet"
        for _ in range(2):
            state, _ = step(state, torch.arange(6) % 7)
            expected = whole(state)
            memory.save(state, {"position": state.step})
    torch.distributed.barrier()
    held = names(host)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(f"{directory}/host-0")
    torch.distributed.barrier()
    with PeerMemory(host) as memory:
        found = memory.load(ya.init(net(), TX, mesh=mesh))
    assert found is not None
    got, extra = found
    assert same(whole(got), expected) and (got.step, got.seed, extra) == (3, 4, {"position": 3})
    assert got.program == state.program is not None
    return held


def test_a_lost_host_is_replaced_from_the_others_memory(pools: Pools, tmp_path: Path) -> None:
    held = pools[3].run(lost_host, str(tmp_path / "a"), 1)
    assert held[0] == ["step-00000003.part-0-of-3", "step-00000003.part-2-of-3"], "own, and that of the rank before"
    held = pools[4].run(lost_host, str(tmp_path / "b"), 2)
    assert held[0] == [f"step-00000003.part-{rank}-of-4" for rank in range(4)], "two of each host"


def one_host(mesh: Any, directory: str) -> None:
    state = stepped(ya.init(net(), TX, mesh=mesh, seed=4), 1)
    with PeerMemory(directory) as memory:
        memory.save(state)
        memory.wait()
        assert names(directory) == [f"step-00000001.part-{rank}-of-{mesh.size()}" for rank in range(mesh.size())]
        expected = whole(state)
        memory.save(stepped(state, 1))
        memory.wait()
        torch.distributed.barrier()
        assert len(names(directory)) == mesh.size()
        if mesh.get_rank() == 0:  # killed while the next one was written, and while an earlier one was dropped
            for path in Path(directory).iterdir():
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
        torch.distributed.barrier()
        assert memory.load(ya.init(net(), TX, mesh=mesh)) is None
        again = stepped(ya.init(net(), TX, mesh=mesh, seed=4), 1)
        assert same(whole(again), expected)
        memory.save(again)
        found = memory.load(ya.init(net(), TX, mesh=mesh))
        assert found is not None and same(whole(found[0]), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_processes_of_one_host_find_their_own(pools: Pools, tmp_path: Path, ranks: int) -> None:
    pools[ranks].run(one_host, str(tmp_path / "x"))


def finds_nothing(mesh: Any, directory: str) -> bool:
    with PeerMemory(directory) as memory:
        return memory.load(ya.init(net(), TX, mesh=mesh)) is None


def test_another_number_of_ranks_finds_nothing(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(one_host, str(tmp_path))
    assert pools[1].run(finds_nothing, str(tmp_path)) == [True]
