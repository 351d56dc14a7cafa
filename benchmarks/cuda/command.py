"""The command: one section, on a GPU or on tiny models.

What a section has found is written after every part, whole or not at all: whoever ends it loses the part at hand alone.
Budgets are those of `make gpu-check`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.cuda.gpu import Setting, here
from benchmarks.harness import function
from benchmarks.report import write
from train.command_line import cli
from train.machine import ROOT

PROGRAM = "python -m benchmarks"


def wanted(argv: Sequence[str]) -> bool:
    """True if `argv` asks for this command: a section of it."""
    return any(word.partition("=")[0] == "--section" for word in argv)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status where it has not run. A section that has ended ends the process."""
    try:
        options = cli(Gpu, list(argv), prog=PROGRAM)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench: --device cuda needs a CUDA device and a CUDA build of torch; there is none", file=sys.stderr)
        return 1
    found = run(options, SECTIONS[options.section])
    for goal, met in found.get("goals", {}).items():
        print(f"bench: {options.section}: {goal}: {'met' if met else 'not met'}")
    print(f"bench: {options.section}: {options.out}", flush=True)
    os._exit(0)  # as `benchmarks.worker` does: threads of process groups may abort the teardown


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One section of the GPU figures: memory; "emulated, llama2-70b/256", ...."""

    section: str
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs the same code on tiny models: a check of the command, not of the machine."""
    out: Path = ROOT / "runs" / "gpu_section.json"
    """The JSON of what it finds, rewritten after each of its parts."""

    def __post_init__(self) -> None:
        if self.section not in SECTIONS:
            raise ValueError(f"--section {self.section}: there is no such section; there are {', '.join(SECTIONS)}")


class Section(NamedTuple):
    """A section's function, `module:function`, of `(setting, report, *arguments)`."""

    call: str
    arguments: tuple[str, ...] = ()


def run(options: Gpu, section: Section) -> dict[str, Any]:
    """Runs the section; returns what was written last."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.device)
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
        setting = dataclasses.replace(setting, budget=here())
    last: dict[str, Any] = {}

    def report(found: dict[str, Any]) -> None:
        last.clear()
        last.update(found)
        write(options.out, last)

    function(section.call)(setting, report, *section.arguments)
    return last


PACKAGE = "benchmarks.cuda"
ROWS = ("llama2-70b/256", "llama2-7b/64", "llama2-34b/256", "llama2-13b/128", "llama2-34b/128", "llama3-8b/64")
SECTIONS: dict[str, Section] = {
    "memory": Section(f"{PACKAGE}.memory:run"),
    **{f"emulated, {row}": Section(f"{PACKAGE}.emulated:run", (row,)) for row in ROWS},
}
