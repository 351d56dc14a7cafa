"""`python -m MODULE ...` without the seconds that its imports take: a fork of a server that has them already.

A process with its own pid, environment, folder and output, that signals reach, in the words of subprocess.Popen. Only
what is read while libraries load comes too late: malloc's settings, say.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

IMPORTED = [
    "torch.fx.experimental.symbolic_shapes",  # with all of sympy: the first backward of a process imports it
    "torch._dynamo",  # and the first fake tensor this, a second in each rank
    "pytest",
    "torch.distributed.checkpoint",
    "torch.utils.flop_counter",
    "models.llama",
    "tests.harness.oracle",
    "train.clm",
    "benchmarks",
    "benchmarks.contenders",
    "tests.harness.frozen",
]


def context() -> Any:
    """Of processes that are forked from the server, which has no threads of ours yet."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    return found


class Forked:
    """args: `[python, "-m", module, *argv]`; stdout, stderr: files, by whose names they are opened once more"""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[Any],
        stderr: IO[Any] | int,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int = subprocess.DEVNULL,
        start_new_session: bool = False,
    ) -> None:
        assert args[:2] == [sys.executable, "-m"]
        assert stdin == subprocess.DEVNULL
        sinks = stdout.name, None if isinstance(stderr, int) else stderr.name
        what = list(args[2:]), dict(env), sinks, os.fspath(cwd or os.getcwd()), start_new_session
        self._process = context().Process(target=_begin, args=what, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid
        while start_new_session and self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)  # else who kills the group would not find it

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run(args: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float = 250) -> tuple[int, str]:
    """The exit status of `[python, "-m", module, *argv]`, and all that it said."""
    with tempfile.NamedTemporaryFile("r") as said:
        process = Forked(args, env=env, stdout=said, stderr=subprocess.STDOUT, cwd=cwd)
        try:
            return process.wait(timeout), said.read()
        finally:
            process.kill()


def script(path: Path, *, env: Mapping[str, str], cwd: Path) -> tuple[int, str]:
    """The same of `[python, path]`."""
    return run([sys.executable, "-m", "tests.harness.script", str(path)], env=env, cwd=cwd)


def _begin(
    args: list[str], env: dict[str, str], sinks: tuple[str, str | None], cwd: str, start_new_session: bool
) -> None:
    if start_new_session:
        os.setsid()
    for number, name in ((1, sinks[0]), (2, sinks[1])):
        source = 1 if name is None else os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(source, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    multiprocessing.current_process().daemon = False  # so that it may have children
    import torch

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv = args
    runpy.run_module(args[0], run_name="__main__", alter_sys=True)
