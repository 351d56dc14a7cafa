"""Saves beside the next steps: the bits of the moment of `save`, and failures that all ranks hear of."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import yafsdp_fn as ya
from tests.checkpoint.test_resharding import TOKENS, TX, fresh, loss, same, stepped, whole
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn import checkpoint
from yafsdp_fn.checkpoint import folder, tensors
from yafsdp_fn.checkpoint.io import Job


def writes_after(gate: threading.Event, patch: pytest.MonkeyPatch) -> None:
    """Saves write when the gate opens."""
    write = Job.write

    def late(job: Job, ranks: Any) -> Path:
        gate.wait()
        return write(job, ranks)

    patch.setattr(Job, "write", late)


@on_ranks(1, 2, 3)
def test_what_is_saved_is_the_state_of_that_moment(mesh: Any, tmp_path: Path) -> None:
    """The thread may not write before the state that it was given has been stepped, twice, in place."""
    state = stepped(fresh(mesh, seed=4), 1)
    step = ya.train_step(loss, TX)
    gate = threading.Event()
    expected = []
    with pytest.MonkeyPatch.context() as patch, checkpoint.Saver(tmp_path, keep_last=2) as saver:
        writes_after(gate, patch)
        assert saver.wait() is None
        for _ in range(2):
            expected.append(whole(state))
            saver.save(state, {"position": state.step})
            for _ in range(2):
                state, _ = step(state, TOKENS)
            gate.set()
            assert saver.wait() == tmp_path / folder.folder_name(state.step - 2)
            gate.clear()
        gate.set()
        saver.save(state)  # left to the end of the context
    for number, saved in ((3, expected[1]), (5, whole(state))):
        got, extra = checkpoint.load(tmp_path, fresh(mesh), step=number)
        assert same(whole(got), saved), number
        assert (got.seed, extra) == (4, {"position": 3} if number == 3 else {})
        assert got.program is not None
    assert sorted(folder.complete(tmp_path)) == [3, 5]


def fails_on_one_rank(mesh: Any, directory: Path, what: str) -> str:
    """A disk that is full on rank 1, a directory that vanishes: and the run goes on."""
    state = fresh(mesh)
    with checkpoint.Saver(directory) as saver:
        saver.save(state)
        saver.wait()
        state = stepped(state, 1)
        with pytest.MonkeyPatch.context() as patch:
            if what == "full" and mesh.get_rank() == 1:
                full = OSError(28, "No space left on device")
                patch.setattr(tensors, "save_file", mock.Mock(side_effect=full))
            if what == "vanished" and mesh.get_rank() == 0:
                shutil.rmtree(directory)
                directory.write_text("in the way")
            torch.distributed.barrier()
            saver.save(state)
            with pytest.raises(checkpoint.CheckpointError) as caught:
                saver.wait()
        if what == "vanished" and mesh.get_rank() == 0:
            directory.unlink()
        torch.distributed.barrier()
        saver.save(state)
        assert saver.wait() is not None
    return str(caught.value)


def test_a_failure_is_every_ranks_and_the_next_save_may_work(pools: Pools, tmp_path: Path) -> None:
    for error in pools[2].run(fails_on_one_rank, tmp_path / "a", "full"):
        assert "saving step 1 in " in error and "rank 1: OSError: [Errno 28] No space left on device" in error, error
    assert sorted(folder.complete(tmp_path / "a")) == [0, 1]
    assert (tmp_path / "a" / "latest").exists()
    for error in pools[2].run(fails_on_one_rank, tmp_path / "b", "vanished"):
        assert "rank 0: FileExistsError" in error or "rank 0: NotADirectoryError" in error, error


@on_ranks(1, 2)
def test_a_full_disk_is_called_one(mesh: Any, tmp_path: Path) -> None:
    """The kernel's own answer, in the middle of a file: no more bytes than so many."""
    last = mesh.size() - 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    then = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if mesh.get_rank() == last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.save(tmp_path, fresh(mesh))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, then)
    checkpoint.save(tmp_path, fresh(mesh))
    said = str(caught.value)
    assert f"saving step 0 in {tmp_path}: rank {last}: OSError: " in said and "File too large" in said, said
    assert f"{tmp_path}/step-00000000.partial/rank-0000{last}.safetensors" in said, said


@on_ranks(1)
@pytest.mark.parametrize("how", ["dropped", "beside an exception"])
def test_a_failure_that_nobody_waits_for_is_told(mesh: Any, tmp_path: Path, how: str) -> None:
    (tmp_path / "file").write_text("in the way")
    saver = checkpoint.Saver(tmp_path / "file")
    saver.save(fresh(mesh))
    for thread in threading.enumerate():
        if thread.name == "yafsdp-save":
            thread.join()
    with pytest.warns(UserWarning, match="the last save failed, and nobody waited for it: saving step 0 in "):
        if how == "dropped":
            del saver
        else:
            with pytest.raises(ZeroDivisionError), saver:
                raise ZeroDivisionError


@on_ranks(1)
def test_a_save_is_waited_for_again_after_an_interrupt_and_goes_where_it_began(mesh: Any, tmp_path: Path) -> None:
    gate = threading.Event()
    then = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        writes_after(gate, patch)
        with checkpoint.Saver("runs") as saver:
            saver.save(fresh(mesh))
            patch.chdir("/")
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                saver.wait()
            signal.signal(signal.SIGUSR1, then)
            assert saver.busy
            gate.set()
            assert saver.wait() == tmp_path / "runs" / "step-00000000"


@on_ranks(2)
def test_bad_arguments(mesh: Any, tmp_path: Path) -> None:
    state = fresh(mesh)
    for keep in (0, 1.5, "3"):
        with pytest.raises(ValueError, match=rf"keep_last is {keep!r}: expected a positive number"):
            checkpoint.save(tmp_path, state, keep_last=keep)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"extra: the key 1 would come back as text"):
        checkpoint.save(tmp_path, state, {"rates": [{1: None}]})
    with pytest.raises(checkpoint.CheckpointError, match="~ would be a folder of that name"):
        checkpoint.save("~/runs", state)
    with pytest.raises(TypeError, match=r"extra: expected what JSON can hold: .*Tensor"):
        checkpoint.save(tmp_path, state, {"t": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"what to save.*extra"):
        checkpoint.save(tmp_path, state, {"position": mesh.get_rank()})
    assert list(tmp_path.iterdir()) == []
    one = checkpoint.save(tmp_path, state)
    for wrong in (lambda: checkpoint.save(one, state), lambda: checkpoint.load(one, state)):
        with pytest.raises(
            checkpoint.CheckpointError, match=f"is a checkpoint itself; name the folder around it, {tmp_path}"
        ):
            wrong()
