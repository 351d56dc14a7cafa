"""Copies in the memory of hosts: a folder stands for each host."""

from __future__ import annotations

import hashlib
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


def put_in_place(path: Path, what: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if what == "nothing":
        path.touch()
    elif what == "folder":
        path.mkdir()
        (path / "file").touch()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "half":
        path.write_bytes(data[: len(data) // 2])
    elif what == "a digest of nothing":
        path.write_bytes(hashlib.sha256().digest())
    elif what == "a length beyond the end":
        text = (2**62).to_bytes(8, "little") + b"{}"
        path.write_bytes(text + hashlib.sha256(text).digest())
    else:
        path.with_name("elsewhere").write_bytes(data)
        path.symlink_to(path.with_name("elsewhere"))


DAMAGES = ["nothing", "folder", "pipe", "half", "a digest of nothing", "a length beyond the end", "link"]


def damaged(mesh: Any, directory: str, what: str) -> None:
    """The first host's copy of its own part is no copy; the second host, where there is one, has it whole."""
    rank = mesh.get_rank()
    host = Path(directory) / f"host-{rank}"
    state = stepped(ya.init(net(), TX, mesh=mesh, seed=4), 1)
    expected = whole(state)
    with PeerMemory(host) as memory:
        memory.save(state)
        memory.wait()
        torch.distributed.barrier()
        if rank == 0:
            put_in_place(host / f"step-00000001.part-0-of-{mesh.size()}", what)
        torch.distributed.barrier()
        found = memory.load(ya.init(net(), TX, mesh=mesh))
        if mesh.size() == 1:
            assert found is None
        else:
            assert found is not None and same(whole(found[0]), expected)
            state = found[0]
        memory.save(stepped(state, 1))
        memory.wait()
        found = memory.load(ya.init(net(), TX, mesh=mesh))
        assert found is not None and found[0].step == 2
        kept = [name for name in names(str(host)) if name != "elsewhere"]
        assert all(name.startswith("step-00000002.part-") for name in kept), kept


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lies_in_the_place_of_a_part_is_no_part(pools: Pools, tmp_path: Path, ranks: int) -> None:
    for what in DAMAGES:
        pools[ranks].run(damaged, str(tmp_path / what), what)


def planted(mesh: Any, directory: str) -> None:
    """Links lie where parts are written, and where they are received; files are for this user alone."""
    rank, count = mesh.get_rank(), mesh.size()
    host, victim = Path(directory) / f"host-{rank}", Path(directory) / f"victim-{rank}"
    state = stepped(ya.init(net(), TX, mesh=mesh, seed=4), 1)
    victim.write_text("mine")
    umask = os.umask(0)
    try:
        with PeerMemory(host) as memory:
            for of in range(count):
                for suffix in ("", ".partial"):
                    (host / f"step-00000001.part-{of}-of-{count}{suffix}").symlink_to(victim)
            memory.save(state)
            memory.wait()
            assert victim.read_text() == "mine"
            found = memory.load(ya.init(net(), TX, mesh=mesh))
            assert found is not None and found[0].step == 1
            assert host.stat().st_mode & 0o777 == 0o700
            made = [path for path in host.iterdir() if not path.is_symlink()]
            assert [path.stat().st_mode & 0o777 for path in made] == [0o600] * 2
    finally:
        os.umask(umask)


def test_links_are_not_followed_and_parts_are_for_nobody_else(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(planted, str(tmp_path))


def of_another(mesh: Any, directory: str) -> None:
    own = os.geteuid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        PeerMemory(directory)


def test_the_folder_of_another_user_is_refused(pools: Pools, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    for error in pools[2].errors(of_another, str(tmp_path)):
        assert "CheckpointError: making " in error and "name another folder" in error, error
