"""The commands: options in, tables or JSON out; each a module's options, `measure` and `show`.

python -m benchmarks            contenders against each other; --section NAME: a GPU figure, benchmarks/cuda
python -m benchmarks reading    what a step calls and enters, and what a stranger has to read; --budgets: nodes
python -m benchmarks saves      steps beside a save; saves and loads
python -m benchmarks stages     pipelines against torch.distributed.pipelining
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import cuda, reading, saves, stages, steps
from benchmarks.harness import RankFailed
from benchmarks.options import Bench, Options
from benchmarks.report import LossesDiffer, hand_over, heading
from train.command_line import cli

PROGRAM = "python -m benchmarks"

Found = dict[str, Any]


class Command(NamedTuple):
    """A command of the bench.

    measure: `(options, console)` -> what was found; show: its sentences and tables
    """

    options: type[Options]
    measure: Callable[[Any, Console], Found]
    show: Callable[[Any, Found], Iterable[str | Table]]


COMMANDS = {
    "": Command(Bench, steps.measure, steps.show),
    "reading": Command(reading.Reading, reading.measure, reading.show),
    "saves": Command(saves.Saves, saves.measure, saves.show),
    "stages": Command(stages.Stages, stages.measure, stages.show),
}


def missing_device(bench: Bench) -> str | None:
    """Says why this machine cannot run `bench`, in one sentence; None when it can."""
    if bench.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda needs a CUDA device and a CUDA build of torch, and this machine has none"
    if bench.device == "cuda" and (gpus := torch.cuda.device_count()) < bench.ranks:
        return f"--ranks {bench.ranks} on cuda needs a GPU per rank, and this machine has {gpus}"
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
        options = cli(command.options, argv[bool(which) :], prog=f"{PROGRAM} {which}".rstrip())
    except ValueError as error:
        return _failed(console, error, 2)
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        text = (
            f"started as rank {os.environ.get('RANK')} of {ranks}; it starts its own rank processes, so run "
            f"`{PROGRAM} --ranks {ranks}` without torchrun"
        )
        return _failed(console, text, 2)
    if isinstance(options, Bench) and (sentence := missing_device(options)):
        return _failed(console, sentence, 1)
    try:
        found = heading(shlex.join([*PROGRAM.split(), *argv]), options) | command.measure(options, console)
    except (RankFailed, LossesDiffer, reading.OverBudget, steps.TooMuch) as error:
        return _failed(console, error, 1)
    hand_over(found, options, command.show(options, found))
    return 0


def _failed(console: Console, why: object, status: int) -> int:
    console.print(f"bench: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
    return status
