"""The command: options in, a table or JSON out."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch
import tyro
from rich.console import Console

from train.bench import cuda, launch, memory, report, tables
from train.bench.options import Bench

PROGRAM = "python -m train bench"


def missing_device(bench: Bench) -> str | None:
    """Why this machine cannot run `bench`, in one sentence; None when it can."""
    if bench.device == "cuda" and not torch.cuda.is_available():
        return "bench: --device cuda needs a CUDA device and a CUDA build of torch, and this machine has none"
    if bench.device == "cuda" and (gpus := torch.cuda.device_count()) < bench.ranks:
        return f"bench: --ranks {bench.ranks} on cuda needs a GPU per rank, and this machine has {gpus}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (default: the process's own); returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if cuda.wanted(argv):
        return cuda.main(argv)
    console = Console(stderr=True)
    try:
        bench = tyro.cli(Bench, args=argv, prog=PROGRAM)
    except ValueError as error:
        console.print(f"bench: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        console.print(
            f"bench: started as rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']}; it starts its own rank "
            f"processes, so run `{PROGRAM} --ranks {os.environ['WORLD_SIZE']}` without torchrun",
            style="red",
            soft_wrap=True,
        )
        return 2
    if sentence := missing_device(bench):
        console.print(f"{sentence}{': skipped' if bench.skip_without_device else ''}", markup=False, soft_wrap=True)
        return 0 if bench.skip_without_device else 1
    if sentence := memory.too_much(bench, memory.available_bytes()):
        console.print(sentence, style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    try:
        with console.status(f"timing {', '.join(bench.contenders)} in turn"):
            timed = launch.run("time", bench.contenders, bench)
        report.check_losses(timed["losses"])  # before the counting runs, which take as long again
        counted: dict[str, dict[str, Any]] = {}
        for name in bench.contenders if bench.counts else ():
            with console.status(f"counting memory, allocations and collectives of {name}"):
                counted[name] = launch.run("count", (name,), bench)
        found = report.result(bench, shlex.join([*PROGRAM.split(), *argv]), timed, counted)
    except (launch.RankFailed, report.LossesDiffer) as error:
        console.print(f"bench: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    tables.hand_over(found, as_json=bench.json, save=bench.save, show=tables.show)
    return 0
