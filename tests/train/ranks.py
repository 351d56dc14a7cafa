"""Starts the ranks of `python -m train` themselves, so that a test can read what each one says."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.harness.forked import Forked
from tests.harness.pages import ROOT
from train.launch import command as launch


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def run(count: int, *args: str, module: tuple[str, ...] = ("train",), seconds: float = 500.0) -> list[Ended]:
    """What every rank said, once all have ended by themselves."""
    port = launch.free_port()
    end = time.monotonic() + seconds
    processes: list[Forked] = []
    with tempfile.TemporaryDirectory() as folder:
        said = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(count)]
        try:
            for rank, (out, err) in enumerate(said):
                env = launch.environment(rank, count, port) | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
                with out.open("w") as stdout, err.open("w") as stderr:
                    command = [sys.executable, "-m", *module, *args]
                    processes.append(Forked(command, env=env, stdout=stdout, stderr=stderr, cwd=ROOT))
            codes = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [Ended(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, said, strict=True)]
