"""`python -m train launch --ranks N SUBCOMMAND ...`: a subcommand, or a script, on N ranks of this machine.

    for rank in range(N):
        start `python -m train SUBCOMMAND ...`, or `python SCRIPT.py ...`, with RANK, WORLD_SIZE, MASTER_ADDR, ...
    wait; when one rank fails, give the others time to say what they were doing, then end them

The environment is torchrun's, and torchrun (for more than one machine) starts the same subcommands. On one machine this
is kinder: the terminal's Ctrl-C reaches every rank once and nobody shows a traceback of the launcher's own, and a rank
that writes its last checkpoint is not killed after 30 seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

GRACE = 60.0
"""Seconds that ranks may go on after one of them failed: longer than a collective's peers need to notice."""

USAGE = "usage: python -m train launch --ranks N SUBCOMMAND ...   (or SCRIPT.py ...)"


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun gives to a rank. One thread per core over all ranks, unless OMP_NUM_THREADS says otherwise."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(ranks: int, argv: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """The processes. They share this one's terminal and process group."""
    port = free_port()
    script = argv[0].endswith(".py")
    command = [sys.executable, *argv] if script else [sys.executable, "-m", "train", *argv]
    return [subprocess.Popen(command, env=environment(rank, ranks, port)) for rank in range(ranks)]


def wait(processes: Sequence[subprocess.Popen[bytes]], grace: float = GRACE) -> int:
    """The first status that is not 0, once all have ended; of a rank killed by signal n 128 + n, as in a shell."""
    failed_at: float | None = None
    status = 0
    while any(process.poll() is None for process in processes):
        failures = [process.returncode for process in processes if process.returncode]
        if failures and failed_at is None:
            failed_at, status = time.monotonic(), failures[0]
        if failed_at is not None and time.monotonic() - failed_at > grace:
            for process in processes:
                process.kill()
        time.sleep(0.05)
    status = status or next((process.returncode for process in processes if process.returncode), 0)
    return 128 - status if status < 0 else status


def main(argv: Sequence[str]) -> int:
    if len(argv) < 3 or argv[0] != "--ranks" or not argv[1].isdigit() or int(argv[1]) < 1:
        print(USAGE, file=sys.stderr)
        return 2
    if argv[2].endswith(".py") and not os.path.isfile(argv[2]):
        print(f"{argv[2]}: no such script\n{USAGE}", file=sys.stderr)
        return 2
    processes = start(int(argv[1]), argv[2:])

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the ranks too, which decide
    signal.signal(signal.SIGTERM, forward)
    try:
        return wait(processes)
    finally:
        for process in processes:
            process.kill()
