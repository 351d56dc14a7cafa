"""Starts the ranks of `python -m train` itself, so that a test can read what each one says."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from train import launch

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    status: int
    out: str
    err: str


class Ranks:
    """The processes of one run. Leaving the context kills what still runs."""

    def __init__(self, count: int, *args: str, module: tuple[str, ...] = ("train",)) -> None:
        port = launch.free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", *module, *args],
                cwd=ROOT,
                env=launch.environment(rank, count, port) | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def finish(self, seconds: float = 500.0) -> list[Ended]:
        """What every rank said, once all have ended by themselves."""
        end = time.monotonic() + seconds
        said = [process.communicate(timeout=max(0.1, end - time.monotonic())) for process in self.processes]
        return [Ended(p.returncode, out, err) for p, (out, err) in zip(self.processes, said, strict=True)]


def run(count: int, *args: str, module: tuple[str, ...] = ("train",)) -> list[Ended]:
    with Ranks(count, *args, module=module) as ranks:
        return ranks.finish()
