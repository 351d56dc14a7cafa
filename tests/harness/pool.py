"""Rank processes that are started once and reused: a pool per world size, each rank in a process of its own.

    results = pools[2].run(function, *args)      # function(mesh, *args) on every rank; a result per rank
    errors = pools[2].errors(function, *args)    # the same where every rank is to raise: an exception text per rank

    @on_ranks(1, 2)                              # a test whose whole body runs on every rank, a case for each number
    def test_of_ranks(mesh, name): ...           # the other arguments are pytest's: parameters, tmp_path

Functions travel by name, so they live at the top of a test module.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import inspect
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.harness import forked
from yafsdp_fn.util import local_ranks

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TIMEOUT = timedelta(seconds=60)
"""Of collectives in the pool: a test that hangs ends in an error that names the op."""


Test = Callable[..., None]


class RankFailed(AssertionError):
    """A function raised on some rank; the message holds the tracebacks."""


class Pool:
    """`world` processes with a gloo process group. patience: seconds that they have for a call, if it says nothing"""

    patience = 250.0

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._said: list[Any] = []  # files of what ranks write to stderr: a crash says why there

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Results, by rank. Raises RankFailed with every rank's traceback where one raised."""
        outcomes = self._call(function, args, timeout or Pool.patience)
        failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(outcomes) if not ok]
        if failed:
            self.stop()  # what a failed function left in the communicators is not known
            raise RankFailed("\n".join(failed))
        return [value for _, value in outcomes]

    def errors(self, function: Callable[..., Any], *args: Any) -> list[str]:
        """The traceback of each rank, where every rank must raise. The pool lives on: say `stop` if it must not."""
        outcomes = self._call(function, args, Pool.patience)
        silent = [rank for rank, (ok, _) in enumerate(outcomes) if ok]
        if silent:
            self.stop()
            raise RankFailed(f"ranks {silent} raised nothing")
        return [value for _, value in outcomes]

    def threads(self) -> int:
        """Of the first rank's process; 0 where there is none, or the system does not tell."""
        folder = f"/proc/{self._processes[0].pid}/task" if self._processes else ""
        return len(os.listdir(folder)) if os.path.isdir(folder) else 0

    def stop(self) -> None:
        """Ends the processes; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []
        self._pipes = []
        self._said = []

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[tuple[bool, Any]]:
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the answer will show it
                pipe.send((function, args))
        outcomes: list[tuple[bool, Any]] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(timeout):
                    os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)  # it says where it is
                    raise TimeoutError(f"no answer in {timeout} s")
                outcomes.append(pipe.recv())
            except (EOFError, OSError) as error:  # no answer in time, or the process has ended
                outcomes.append(
                    (False, f"rank {rank} of {self.world}: {type(error).__name__}: {error}{self._end(rank)}")
                )
        if any(not process.is_alive() for process in self._processes):
            self.stop()
        self._signal(signal.SIGSTOP)
        return outcomes

    def _signal(self, number: int) -> None:
        """Ranks stand still between two calls: else threads of gloo, the store and watchdogs look for news there, which
        in some twenty processes is a good part of a core. Only Linux ends those that stand still with this process."""
        if sys.platform == "linux":
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _end(self, rank: int) -> str:
        """How the process of a rank ended, if it did, and its last words: the stack of a crash, or where it hangs."""
        self._processes[rank].join(1)
        code = self._processes[rank].exitcode
        ended = "" if code is None else f" (its process has ended, exit code {code})"
        return f"{ended}\n{self._said[rank].read()[-8000:]}"

    def _start(self) -> None:
        context = forked.context()
        atexit.register(self.stop)  # before Python's own end of children, whose signal does not reach who stands still
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            said = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
            process = context.Process(target=_serve, args=(theirs, rank, self.world, port, said.name), daemon=True)
            process.start()
            theirs.close()
            self._said.append(said)
            self._pipes.append(ours)
            self._processes.append(process)


Pools = dict[int, Pool]
"""By world size: the fixture `pools`."""


def on_ranks(*worlds: Any) -> Callable[[Test], Test]:
    """Runs a test on every rank of a pool, with the rank's mesh as its first argument. Several numbers of ranks are a
    parametrization of `world`; without any, the test has one of its own, of which it sees the mesh alone."""

    def decorated(function: Test) -> Test:
        @functools.wraps(function)
        def test(pools: Pools, **arguments: Any) -> None:
            world = worlds[0] if len(worlds) == 1 else arguments.pop("world")
            pools[world].run(_on_this_rank, test, arguments)

        _, *own = inspect.signature(function).parameters.values()
        names = ("pools",) if len(worlds) == 1 else ("pools", "world")
        asked = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        test.__signature__ = inspect.Signature([*asked, *own])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(test) if len(worlds) > 1 else test

    return decorated


def _on_this_rank(mesh: Any, test: Any, arguments: dict[str, Any]) -> None:
    test.__wrapped__(mesh, **arguments)


def _serve(pipe: Any, rank: int, world: int, port: int, said: str) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    sys.path.insert(0, ROOT)
    local_ranks.dies_with(os.getppid())()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    faulthandler.enable()  # the stack of a process that a signal ends
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    torch.set_num_threads(1)
    import yafsdp_fn as ya
    from yafsdp_fn.nn import linear

    linear.LARGE = 0  # as in conftest.py
    _share_one_device()
    mesh = ya.mesh(device="cpu", timeout=TIMEOUT)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            torch.manual_seed(0)
            outcome = (True, function(mesh, *args))
        except BaseException:
            outcome = (False, traceback.format_exc())
        pipe.send(outcome)


def _share_one_device() -> None:
    """All gloo groups of this process use one device. Each that has its own has a thread, too, that polls a hundred
    times a second: with some hundred groups in twenty processes that is a good part of two cores."""
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class OnSharedDevice(gloo):
        # torch 2.14 also says enable_reconfigure=False, which the constructor with options does not take
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [device]
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice
