"""Several ranks on one GPU, or on the CPU: a small Llama trained by real processes, to be compared with one rank.

    launched(folder, name, ranks, device)     # `python -m tests.cuda.ranks NAME ...`, each with LOCAL_RANK 0
    results(folder, ranks)                    # by rank: losses, norms, and how far each leaf has moved

NCCL lets ranks share a GPU from 2.30.3 on, if it is asked to. Kernels of different processes get slices of its time, so
this tells whether numbers are right, and never how long anything takes.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from tests.harness.forked import Forked
from tests.harness.groups import BEAT, SOON, giving_up
from tests.harness.pages import ROOT
from yafsdp_fn.communication import watchdog
from yafsdp_fn.schedules import Schedule

CONFIG = dataclasses.replace(llama.CONFIGS["debug"], layers=4)
ROWS, LENGTH, STEPS = 8, 32, 3
s = ya.schedules


class Case(NamedTuple):
    """mesh: arguments of `ya.mesh`; tolerance: relative to one rank's numbers"""

    mesh: dict[str, int]
    schedule: Schedule
    microbatches: int = 1
    precision: ya.Precision = ya.Precision()
    tolerance: float = 1e-4
    """Of float32: some hundred roundings, and those of weights that a step hardly moves. A rank that is left out, or
    counts twice, is off by a thousand times as much."""


WIRE = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32)
CASES = {
    "zero3": Case({}, s.zero3(remat=s.remat.first(2))),
    "hsdp": Case({"replicate": 2}, s.hsdp(), microbatches=2),
    "1F1B": Case({"stage": 2}, s.one_f_one_b(s.zero3(remat=s.remat.all)), microbatches=4),
    # gradients are rounded to bf16 once on each side, and activations here and there
    "bf16 wire": Case({}, s.zero3(), precision=WIRE, tolerance=4 * torch.finfo(torch.bfloat16).eps),
    "frozen": Case({}, s.zero3()),
}


# ---- a rank


def trained(case: Case, device: str, timeout_s: float, before: Callable[[int], None]) -> list[Tensor]:
    """Trains on the same rows at any number of ranks; one rank has no use for the case's mesh and schedule."""
    alone = os.environ["WORLD_SIZE"] == "1"
    mesh = ya.mesh(device=device, timeout=timedelta(seconds=timeout_s), **({} if alone else case.mesh))
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(CONFIG.vocab, (ROWS, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    batches = [{"tokens": text[:, :-1], "targets": text[:, 1:]} for text in texts]
    loss = llama.loss(CONFIG)
    params = llama.params(CONFIG)
    tx = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.sgd(0.5, momentum=0.9))  # linear, unlike Adam
    staged = "stage" in case.mesh and not alone
    stages = s.assign(ya.planner.trace(loss, params, batches[0]), stages=2) if staged else None
    state = ya.init(params, tx, mesh=mesh, seed=0, precision=case.precision, stages=stages)
    schedule, microbatches = (s.zero3(), 1) if alone else (case.schedule, case.microbatches)
    step = ya.train_step(loss, tx, schedule=schedule, microbatches=microbatches)
    first = [leaf.clone() for leaf in optree.tree_leaves(ya.unshard(state.params))]
    found = []
    for number, batch in enumerate(batches):
        before(number)
        state, metrics = step(state, ya.shard_batch(batch, mesh))
        found += [metrics["loss"].cpu(), metrics["grad_norm"].cpu()]
    last = optree.tree_leaves(ya.unshard(state.params))
    return found + [(b - a).cpu() for a, b in zip(first, last, strict=True)]


def main(name: str, device: str, timeout_s: str, folder: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    impatient = ExitStack()
    if device == "cpu":
        watchdog.LONGEST_S = BEAT

    def before(number: int) -> None:
        if name != "frozen" or number != 1:
            return
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif device == "cpu":  # where ranks come to the first step as late as they like
            impatient.enter_context(giving_up(SOON))

    torch.save(trained(CASES[name], device, float(timeout_s), before), f"{folder}/{rank}.pt")


# ---- all of them


class Ended(NamedTuple):
    """status: None for a rank that did not end by itself; said: what it printed"""

    status: int | None
    said: str


def launched(
    folder: Path,
    name: str,
    ranks: int,
    device: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    limit_s: float = 120,
) -> list[Ended]:
    """Runs a case to its end, or for `limit_s`. A rank that is to freeze is not waited for."""
    start: Any = subprocess.Popen if device == "cuda" else Forked
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    place = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    every = {**os.environ, **place, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, "-m", "tests.cuda.ranks", name, device, str(timeout_s), str(folder)]
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as sink:
            own = {**every, "RANK": str(rank)}
            started.append(start(command, env=own, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT))
    awaited = started[: -1 if name == "frozen" else None]
    end = time.monotonic() + limit_s
    try:
        while time.monotonic() < end and any(process.poll() is None for process in awaited):
            time.sleep(0.05)
    finally:
        statuses = [process.poll() for process in started]
        for process in started:
            process.kill()
            process.wait()
    return [Ended(status, log.read_text(errors="replace")) for status, log in zip(statuses, logs, strict=True)]


def results(folder: Path, ranks: int) -> list[list[Tensor]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


if __name__ == "__main__":
    main(*sys.argv[1:])
