"""What the command line of `python -m train launch` asks for. Without a library: the launcher starts at once."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from train.launch.slurm import Job
from train.subcommands import SUBCOMMANDS, unknown


class Wanted(NamedTuple):
    """job: the batch script to write, None where the ranks are to start here"""

    ranks: int
    restarts: int
    command: list[str]
    job: Job | None


NUMBERS = ("--ranks", "--max-restarts", "--nodes")
TEXTS = {
    "--slurm": r"[^\0]+",
    "--time": r"\d+(-\d+)?(:\d+){0,2}|UNLIMITED",
    "--cluster": r"[\w.-]+",
    "--interface": r"[\w.:-]+",
}
"""Name: what its value looks like."""


def parse(argv: Sequence[str]) -> Wanted:
    """Raises ValueError, whose text says what is wrong."""
    numbers, texts, rest = dict.fromkeys(NUMBERS, 0), dict[str, str](), list(argv)
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).partition("=")
        value = value or (rest.pop(0) if rest else "")
        if name in TEXTS:
            if not re.fullmatch(TEXTS[name], value):
                raise ValueError(f"{name} is {value!r}: see below what it takes")
            texts[name.removeprefix("--")] = value
        elif name in numbers:
            if not (value.isascii() and value.isdecimal() and len(value) < 7):
                raise ValueError(f"{name} is {value!r}: expected a number")
            numbers[name] = int(value)
        else:
            raise ValueError(f"unknown option {name}")
    if numbers["--ranks"] < 1:
        raise ValueError("--ranks N is missing, or less than 1")
    if not rest:
        raise ValueError("no subcommand given")
    if rest[0].endswith(".py"):
        if not os.path.isfile(rest[0]):
            raise ValueError(f"{rest[0]}: no such script")
    elif rest[0] not in SUBCOMMANDS:
        raise ValueError(unknown(rest[0]))
    file = texts.pop("slurm", None)
    if file is None and (texts or numbers["--nodes"]):
        raise ValueError(
            f"{', '.join(['--nodes'] * (numbers['--nodes'] > 0) + [f'--{name}' for name in texts])}: of --slurm"
        )
    job = None if file is None else Job(Path(file), max(1, numbers["--nodes"]), **texts)
    return Wanted(numbers["--ranks"], numbers["--max-restarts"], rest, job)
