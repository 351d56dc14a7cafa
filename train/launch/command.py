"""`python -m train launch --ranks N SUBCOMMAND ...`: a subcommand, or a script, on N ranks of this machine.

    for attempt in range(1 + max restarts):
        for rank in range(N):
            start `python -m train SUBCOMMAND ...`, or `python SCRIPT.py ...`, with RANK, WORLD_SIZE, MASTER_ADDR, ...
        wait; when one rank fails, give the others time to say what they were doing, then end them, frozen ones, too
        all well, or told to stop: done

The environment is torchrun's, and torchrun (for more than one machine) starts the same subcommands. On one machine this
is kinder: the terminal's Ctrl-C reaches every rank once and nobody shows a traceback of the launcher's own, and a rank
that writes its last checkpoint is not killed after 30 seconds. Ranks never outlive it: the kernel (Linux) kills them
when it ends, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from types import FrameType
from typing import TYPE_CHECKING

from train.launch.lines import Lines
from train.machine import ROOT, gpus
from train.running.elastic import CANNOT_WORK, Attempt
from train.subcommands import SUBCOMMANDS, unknown

if TYPE_CHECKING:
    from yafsdp_fn.util import local_ranks
else:  # without its package, whose imports take seconds: ranks are to start at once
    _spec = spec_from_file_location("local_ranks", ROOT / "yafsdp_fn" / "util" / "local_ranks.py")
    local_ranks = module_from_spec(_spec)
    _spec.loader.exec_module(local_ranks)

GRACE = 60.0
"""Seconds that ranks may go on after one of them failed: longer than a collective's peers need to notice."""
GRACE_BEFORE_RESTART = 10.0
"""The grace where all begin anew: gloo's peers notice at once; what others would say is not worth a minute."""
ECHO = 0.2
"""Seconds after which SIGINT is passed on, to ranks that the terminal did not send it to."""

ON_THE_CPU = 2
"""Ranks of `--ranks auto` where there is no GPU."""

USAGE = """usage: python -m train launch --ranks N SUBCOMMAND ...   (or SCRIPT.py ...)
       --ranks auto: one for each GPU of this machine, or two on the CPU
       --max-restarts K before SUBCOMMAND: after a rank died all begin again, K times at most; clm goes on from its last
       checkpoint
   several machines: torchrun, or under Slurm: sbatch --nodes M train/launch/run.sbatch SUBCOMMAND ..."""


def environment(rank: int, ranks: int, port: int, attempt: Attempt | None = None) -> dict[str, str]:
    """The whole environment of a rank. One thread per core over all ranks, unless OMP_NUM_THREADS says otherwise."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    told = local_ranks.environment(rank, ranks, port)
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **told, **(attempt or Attempt()).environment()}


def free_port() -> int:
    """One that is free now, and will be when rank 0 has imported what it needs: below those that systems give to who
    asks for any."""
    for port in random.SystemRandom().sample(range(15_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port among a hundred from 15000 to 32767")


class Ranks:
    """The processes of one attempt after another, and the signals that reach them. They share this one's terminal and
    process group. Started on the main thread: the kernel takes the end of a thread for that of the parent."""

    def __init__(self, ranks: int, command: Sequence[str]) -> None:
        script = command[0].endswith(".py")
        self._command = [sys.executable, *command] if script else [sys.executable, "-m", "train", *command]
        self._ranks = ranks
        self._lines = Lines()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.asked: signal.Signals | None = None
        """The first signal that asked for an end."""

    def start(self, attempt: Attempt) -> None:
        port = free_port()
        bind = local_ranks.dies_with(os.getpid())
        self.processes.clear()
        self._lines = Lines()
        for rank in range(self._ranks):
            if self.asked is None:
                env = environment(rank, self._ranks, port, attempt)
                with self._lines.of(rank) as (out, err):
                    started = subprocess.Popen(self._command, env=env, preexec_fn=bind, stdout=out, stderr=err)
                self.processes.append(started)
        self._lines.begin()
        if self.asked is not None:  # while they were started: the newest one may have missed it
            self.send(self.asked)

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)  # nothing where it has ended

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM is passed on. So is the first SIGINT, later: the terminal has sent it to ranks, too, as a rule."""
        first = self.asked is None
        self.asked = self.asked or signal.Signals(number)
        if number == signal.SIGTERM:
            self.send(signal.SIGTERM)
        elif first:
            echo = threading.Timer(ECHO, self.send, (signal.SIGINT,))
            echo.daemon = True
            echo.start()

    def end(self) -> None:
        """Ends those that are left, and passes on what all of them have printed."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self._lines.end()


def wait(processes: Sequence[subprocess.Popen[bytes]], grace: float = GRACE) -> int:
    """The status of the first rank that failed, once all have ended, or 0; of one killed by signal n 128 + n, as in a
    shell. Those that are not to go on (`local_ranks.wait`) are killed."""
    first = local_ranks.wait(processes, grace, stopped=stopped)
    for process in processes:
        process.kill()  # nothing where it has ended
    statuses = [process.wait() for process in processes]
    status: int = first.returncode if first is not None else next(filter(None, statuses), 0)
    return 128 - status if status < 0 else status


def stopped(process: subprocess.Popen[bytes]) -> bool:
    """Tells whether it has been stopped, and not continued: Linux tells a parent."""
    if sys.platform != "linux":
        return False
    try:
        found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has ended meanwhile
        return False
    return found is not None


def attempts(ranks: Ranks, restarts: int) -> int:
    """Starts the ranks until they end well, `1 + restarts` times at most. Returns the last status."""
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for number in range(1 + restarts):
        ranks.start(Attempt(number, restarts, run_id))
        if not ranks.processes:  # told to stop before there were any
            return 128 + (ranks.asked or 0)
        status = wait(ranks.processes, GRACE if number == restarts else GRACE_BEFORE_RESTART)
        ranks.end()
        if status in (0, CANNOT_WORK) or ranks.asked is not None or number == restarts:
            break
        how = f"by {signal.Signals(status - 128).name}" if status > 128 else f"with status {status}"
        print(f"launch: a rank ended {how}; restart {number + 1} of {restarts}", file=sys.stderr, flush=True)
    return status


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        count, restarts, command = parse(argv)
    except ValueError as error:
        print(f"{USAGE}\n\n{error}", file=sys.stderr)
        return CANNOT_WORK
    ranks = Ranks(count, command)
    for number in (signal.SIGINT, signal.SIGTERM):  # before the first rank, which would be left behind
        signal.signal(number, ranks.on_signal)
    try:
        return attempts(ranks, restarts)
    except OSError as error:  # more ranks than this machine has room for
        print(f"launch: rank {len(ranks.processes)} of {count} cannot be started: {error}", file=sys.stderr)
        return 1
    finally:
        ranks.end()


def as_many_as_fit(command: Sequence[str]) -> int:
    """The number of ranks of `--ranks auto`, which it says in a line."""
    on_cpu = "--device cpu" in " ".join(command).replace("=", " ")
    found = 0 if on_cpu else gpus()
    where = "one for each GPU" if found else "on the CPU" + (", as asked" if on_cpu else ": torch sees no GPU")
    ranks = found or ON_THE_CPU
    print(f"launch: {ranks} rank{'s' * (ranks > 1)}, {where}", file=sys.stderr, flush=True)
    return ranks


AUTO = -1
NUMBERS = ("--ranks", "--max-restarts")
ALONE = ("tokenizer", "report", "plan")


def parse(argv: Sequence[str]) -> tuple[int, int, list[str]]:
    """Returns the number of ranks, that of restarts, and the command. Raises ValueError, which says what is wrong."""
    numbers = dict.fromkeys(NUMBERS, 0)
    rest = list(argv)
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).partition("=")
        value = value or (rest.pop(0) if rest else "")
        if name not in numbers:
            raise ValueError(f"unknown option {name}")
        if (name, value) == ("--ranks", "auto"):
            value = f"{AUTO}"
        elif not (value.isascii() and value.isdecimal() and len(value) < 7):
            raise ValueError(f"{name} is {value!r}: expected a number")
        numbers[name] = int(value)
    if numbers["--ranks"] == 0:
        raise ValueError("--ranks N is missing, or less than 1")
    if not rest:
        raise ValueError("no subcommand given")
    if rest[0].endswith(".py"):
        if not os.path.isfile(rest[0]):
            raise ValueError(f"{rest[0]}: no such script")
    elif rest[0] not in SUBCOMMANDS:
        raise ValueError(unknown(rest[0]))
    elif rest[0] in ALONE:
        raise ValueError(f"{rest[0]} is no work of several ranks: each would do all of it; start it without launch")
    if numbers["--ranks"] == AUTO:
        numbers["--ranks"] = as_many_as_fit(rest)
    return numbers["--ranks"], numbers["--max-restarts"], rest
