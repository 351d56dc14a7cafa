"""`python -m tests.harness.launching launch ...`: `python -m train launch ...`, whose ranks are forks of the launcher.

With `Forked` neither launcher nor ranks import anything; each is a process of its own all the same.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.harness.forked import Forked


class Fork:
    """In the words of subprocess.Popen. args: `[python, script.py, *argv]` or `[python, "-m", module, *argv]`"""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        preexec_fn: Callable[[], None] | None,
        stdout: int | None,
        stderr: int | None,
    ) -> None:
        sys.stdout.flush(), sys.stderr.flush()  # what is buffered would be written by both
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for number, given in ((1, stdout), (2, stderr)):
                if given is not None:
                    os.dup2(given, number)
            _run(list(args[1:]), env, preexec_fn)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(args: list[str], env: Mapping[str, str], preexec_fn: Callable[[], None] | None) -> None:
    """Never returns."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as after an exec
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if preexec_fn is not None:
            preexec_fn()
        os.environ.clear()
        os.environ.update(env)
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        sys.argv = args[1:] if args[0] == "-m" else args
        if args[0] == "-m":
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(args[0])))
            runpy.run_path(args[0], run_name="__main__")
        status = 0
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def by_forks() -> None:
    """From now on `subprocess.run([python, "-m", "train", "launch", ...], ...)`, whose output is text, runs this."""

    def run(args: Sequence[str], *, capture_output: bool, text: bool) -> subprocess.CompletedProcess[str]:
        assert args[1:4] == ["-m", "train", "launch"]
        assert capture_output
        assert text
        with tempfile.TemporaryDirectory() as folder:
            with Path(folder, "out").open("w") as out, Path(folder, "err").open("w") as err:
                command = [sys.executable, "-m", "tests.harness.launching", *args[3:]]
                status = Forked(command, env=os.environ, stdout=out, stderr=err).wait()
            said = (Path(folder, name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(args, status, *said)

    subprocess.run = run
    server: Any = forkserver._forkserver
    if server._forkserver_address is not None:  # this is a fork, too, of which Python says that its server serves it;
        server.ensure_running = lambda: None  # but it would start another


if __name__ == "__main__":
    from train import __main__ as command
    from train.launch import command as launch

    launch.subprocess = SimpleNamespace(Popen=Fork, TimeoutExpired=subprocess.TimeoutExpired)
    sys.exit(command.flushed(sys.argv[1:]))
