"""The command: options in, a table or JSON out.

    python -m train bench            contenders against each other; --device cuda: train/bench/cuda
    python -m train bench ablate     each lever of ours on and off
    python -m train bench growth     overhead over layers and ranks
    python -m train bench head       head and loss of large vocabularies
    python -m train bench lora       full fine-tuning against low-rank adapters
    python -m train bench optimizers AdamW against Muon
    python -m train bench reading    what a step calls and enters, and what a stranger has to read
    python -m train bench saves      steps beside a save; saves and loads
    python -m train bench stages     pipelines against torch.distributed.pipelining

Each takes options of its own, and ends the same way.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import tyro
from rich.console import Console

from train.bench import (
    ablate,
    cuda,
    fitting,
    growth,
    head,
    launch,
    lora,
    optimizers,
    reading,
    report,
    saves,
    stages,
    tables,
)
from train.bench.ablate import Ablate
from train.bench.growth import Growth
from train.bench.head import Head
from train.bench.lora import Lora
from train.bench.optimizers import Optimizers
from train.bench.options import Bench
from train.bench.reading import Reading
from train.bench.saves import Saves
from train.bench.stages import Stages

PROGRAM = "python -m train bench"

Found = dict[str, Any]


class Command(NamedTuple):
    """options: a dataclass with `json` and `save`; measure: `(options, command line, console)` -> the result"""

    options: type[Any]
    measure: Callable[[Any, str, Console], Found]
    show: Callable[[Found, Console], None]


def measure(bench: Bench, command: str, console: Console) -> Found:
    """All contenders in turn, then what each one holds and sends."""
    fitting.check(bench)
    with console.status(f"timing {', '.join(bench.contenders)} in turn"):
        timed = launch.run("time", bench.contenders, bench)
    report.check_losses(timed["losses"])  # before the counting runs, which take as long again
    counted: dict[str, dict[str, Any]] = {}
    for name in bench.contenders if bench.counts else ():
        with console.status(f"counting memory, allocations and collectives of {name}"):
            counted[name] = launch.run("count", (name,), bench)
    return report.result(bench, command, timed, counted)


COMMANDS = {
    "": Command(Bench, measure, tables.show),
    "ablate": Command(Ablate, ablate.measure, ablate.show),
    "growth": Command(Growth, growth.measure, growth.show),
    "head": Command(Head, head.measure, head.show),
    "lora": Command(Lora, lora.measure, lora.show),
    "optimizers": Command(Optimizers, optimizers.measure, optimizers.show),
    "reading": Command(Reading, reading.measure, reading.show),
    "saves": Command(Saves, saves.measure, saves.show),
    "stages": Command(Stages, stages.measure, stages.show),
}


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
    which = argv[0] if argv and argv[0] in COMMANDS else ""
    command = COMMANDS[which]
    try:
        options = tyro.cli(command.options, args=argv[bool(which) :], prog=f"{PROGRAM} {which}".rstrip())
    except ValueError as error:
        return _failed(console, error, 2)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        text = (
            f"started as rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']}; it starts its own rank "
            f"processes, so run `{PROGRAM} --ranks {os.environ['WORLD_SIZE']}` without torchrun"
        )
        return _failed(console, text, 2)
    if isinstance(options, Bench) and (sentence := missing_device(options)):
        console.print(f"{sentence}{': skipped' if options.skip_without_device else ''}", markup=False, soft_wrap=True)
        return 0 if options.skip_without_device else 1
    try:
        found = command.measure(options, shlex.join([*PROGRAM.split(), *argv]), console)
    except (launch.RankFailed, report.LossesDiffer, fitting.TooMuch) as error:
        return _failed(console, error, 1)
    tables.hand_over(found, as_json=options.json, save=options.save, show=command.show)
    return 0


def _failed(console: Console, why: object, status: int) -> int:
    console.print(f"bench: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
    return status
