"""Starts the rank processes of one run and hands back what rank 0 wrote, or says which rank failed and how."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from train.bench.options import MALLOC_TUNED, Bench

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: `train` and `models` are run from it and are in no wheel."""


class RankFailed(RuntimeError):
    """A rank process ended with an error or did not end in time."""


def environment(bench: Bench, rank: int) -> dict[str, str]:
    """What torchrun would set, one thread per rank, and malloc's settings where asked for."""
    env = dict(os.environ)
    env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(bench.ranks), OMP_NUM_THREADS=str(bench.threads))
    env["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH")) if p)
    env["KINETO_LOG_LEVEL"] = "5"  # else every profiled step prints a line
    for name in MALLOC_TUNED:
        env.pop(name, None)  # "untuned" has to mean it, whatever the shell exports
    if bench.malloc_tuned:
        env.update(MALLOC_TUNED)
    return env


def run(kind: Literal["time", "count"], contenders: tuple[str, ...], bench: Bench) -> dict[str, Any]:
    """Runs one task on `bench.ranks` fresh processes."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        result = folder / "result.json"
        task = {
            "kind": kind,
            "contenders": contenders,
            "shape": dataclasses.asdict(bench.shape),
            **{
                k: getattr(bench, k)
                for k in ("ranks", "microbatches", "steps", "warmup", "device", "threads", "seed", "timeout")
            },
            "store": str(folder / "store"),
            "result": str(result),
        }
        (folder / "task.json").write_text(json.dumps(task))
        command = [sys.executable, "-m", "train.bench.worker", str(folder / "task.json")]
        logs = [folder / f"rank{rank}.log" for rank in range(bench.ranks)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as sink:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment(bench, rank),
                            stdin=subprocess.DEVNULL,
                            stdout=sink,
                            stderr=subprocess.STDOUT,
                        )
                    )
            wait(processes, logs, bench.timeout, f"{kind} run of {', '.join(contenders)}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        out: dict[str, Any] = json.loads(result.read_text())
        return out


def wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], timeout: float, what: str) -> None:
    """Returns when every process ended well; raises as soon as one did not."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                time.sleep(0.5)  # the others write down why they end, too
                raise RankFailed(
                    f"rank {rank} of the {what} ended with code {code}; its last lines:\n{tail(logs[rank])}"
                )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            left = [rank for rank, code in enumerate(codes) if code is None]
            raise RankFailed(
                f"ranks {left} of the {what} did not end within {timeout:.0f} s (--timeout); "
                f"rank {left[0]}'s last lines:\n{tail(logs[left[0]])}"
            )
        time.sleep(0.05)


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) or "(nothing)"
