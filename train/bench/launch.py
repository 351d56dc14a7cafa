"""Starts the rank processes of one run and hands back what rank 0 wrote, or says which rank failed and how."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.bench import names
from train.bench.options import MALLOC_TUNED, Bench, Kind, Shape
from train.bench.processes import Process

PASSED = ("ranks", "microbatches", "steps", "warmup", "device", "threads", "seed", "timeout")
"""Options that rank processes read."""


class RankFailed(RuntimeError):
    """A rank process ended with an error or did not end in time."""


def environment(bench: Bench, rank: int, tuned: bool) -> dict[str, str]:
    """What torchrun would set, one thread per rank, and malloc's settings where asked for."""
    env = dict(os.environ)
    env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(bench.ranks), OMP_NUM_THREADS=str(bench.threads))
    for name in MALLOC_TUNED:
        env.pop(name, None)  # "untuned" has to mean it, whatever the shell exports
    if tuned:
        env.update(MALLOC_TUNED)
    return env


def run(
    kind: Kind,
    contenders: Sequence[str],
    bench: Bench,
    shape: Shape | None = None,
) -> dict[str, Any]:
    """Runs one task on `bench.ranks` fresh processes, or as many again for contenders with malloc tuned beside others.

    shape: the model, if it is not that of `bench`

    Raises RankFailed.
    """
    sets = {
        tuned: tuple(name for name in contenders if (bench.malloc_tuned or names.read(name).tuned) is tuned)
        for tuned in (False, True)
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        pipes = {name: str(folder / f"turns-{tuned}") for tuned, mine in sets.items() for name in mine}
        for pipe in set(pipes.values()):
            os.mkfifo(pipe)
        processes: list[Process] = []
        results: list[Path] = []
        try:
            for tuned, mine in sets.items():
                if not mine:
                    continue
                results.append(folder / f"result-{tuned}.json")
                task = {
                    "kind": kind,
                    "contenders": mine,
                    "everybody": tuple(contenders),
                    "pipes": pipes,
                    "shape": dataclasses.asdict(shape or bench.shape),
                    **{key: getattr(bench, key) for key in PASSED},
                    "store": str(folder / f"store-{tuned}"),
                    "result": str(results[-1]),
                }
                for rank in range(bench.ranks):
                    env = environment(bench, rank, tuned)
                    processes.append(Process("train.bench.worker", task, folder, f"{tuned}-rank{rank}", env))
            wait(processes, bench, f"{kind} run of {', '.join(contenders)}")
        finally:
            for process in processes:
                process.end()
        found = [json.loads(result.read_text()) for result in results]
    return functools.reduce(merged, found)


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The results of two sets of processes, each by contender."""
    return {key: {**a[key], **b[key]} for key in a}


def wait(processes: list[Process], bench: Bench, what: str) -> None:
    """Returns when every process ended well; raises as soon as one did not. Processes are set by set, rank by rank."""
    timeout, ranks = bench.timeout, bench.ranks
    end = time.monotonic() + timeout
    while True:
        codes = [process.popen.poll() for process in processes]
        for at, code in enumerate(codes):
            if code:
                time.sleep(0.5)  # the others write down why they end, too
                lines = "\n".join(processes[at].tail())
                raise RankFailed(f"rank {at % ranks} of the {what} ended with code {code}; its last lines:\n{lines}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            left = [at for at, code in enumerate(codes) if code is None]
            lines = "\n".join(processes[left[0]].tail())
            raise RankFailed(
                f"ranks {[at % ranks for at in left]} of the {what} did not end within {timeout:.0f} s (--timeout); "
                f"rank {left[0] % ranks}'s last lines:\n{lines}"
            )
        time.sleep(0.05)
