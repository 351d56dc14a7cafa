"""The command: sections in processes of their own, one JSON.

for section in sections:
    left = budget - elapsed
    start a process; end it after min(limit, left)        # it has written what it had found by then
    result[section] = what it wrote, and how it ended
    write result                                          # so that whoever kills this command loses one section

`--sections` adds to a JSON of the same GPU and versions, so that sections can be run one by one. SIGTERM ends the
section at hand, keeps what it had found, and ends the command.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from train.bench import report
from train.bench.cuda.gpu import Setting, here
from train.bench.harness import Process, function
from train.bench.report import write
from train.command_line import cli
from train.machine import ROOT

PROGRAM = "python -m train bench"
STOPPED = "stopped by SIGTERM"
LEAST_S = 10.0
"""A section is not begun with less time left."""
OWN = ("--budget-s", "--out", "--sections")


def wanted(argv: Sequence[str]) -> bool:
    """True if `argv` asks for this command: `--device cuda` and nothing of the other bench, or an option of this."""
    if not argv or not argv[0].startswith("--"):
        return False
    words = {part for word in argv for part in word.split("=")}
    return bool(words & set(OWN)) or words - {"--skip-without-device"} == {"--device", "cuda"}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status: 1 where a section failed or this machine has no such device."""
    try:
        options = cli(Gpu, list(argv), prog=PROGRAM)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        sentence = "bench: --device cuda needs a CUDA device and a CUDA build of torch, and this machine has none"
        print(f"{sentence}{': skipped' if options.skip_without_device else ''}", file=sys.stderr)
        return 0 if options.skip_without_device else 1
    signal.signal(signal.SIGTERM, terminated)
    try:
        found = run(options, SECTIONS, shlex.join([*PROGRAM.split(), *argv]))
    except Terminated:
        print(f"bench: {STOPPED}; {options.json} has what was found until then", flush=True)
        return 128 + signal.SIGTERM
    print(f"bench: {found['note'] + ': ' if found['note'] else ''}{options.json}")
    ran = [found["sections"][name]["ended"] for name in options.sections or SECTIONS]
    return 0 if all(ended in ("well", "skipped") for ended in ran) else 1


class Terminated(BaseException):
    """SIGTERM has come; no `except Exception` stops it."""


def terminated(number: int, frame: object) -> None:
    """The handler. What comes next must end the section and write: a second signal would stop it half-way."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def run(options: Gpu, sections: dict[str, Section], command: str) -> dict[str, Any]:
    """Runs the sections that `options` names, and returns what was written."""
    begun = time.monotonic()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        **report.heading(command, options),
        "note": "tiny models on the CPU: a check of the command; times mean nothing" if options.device == "cpu" else "",
        "sections": {},
    }
    if options.sections:
        found["sections"] = earlier(options.json, found)
    for name in options.sections or sections:
        section, rate = sections[name], matmul_flops(found)
        left = options.budget_s - (time.monotonic() - begun)
        if left < LEAST_S:
            skipped = {"ended": "skipped", "why": f"{left:.0f} s of the budget were left"}
            found["sections"].setdefault(name, skipped)  # an earlier command may have found something
            print(f"bench: {name}: not run: {skipped['why']}", flush=True)
        else:
            setting = {"device": options.device, "pictures": str(options.json.parent), "matmul_flops": rate}
            print(f"bench: {name}", flush=True)
            when = {"date": found["date"], "command": command}
            one = process(section, setting, min(left, section.limit_s))
            found["sections"][name] = {"includes": section.includes, **when, **one}
            shown(name, one)
        found["seconds"] = time.monotonic() - begun
        write(options.json, found)
        if found["sections"][name]["ended"] == STOPPED:
            raise Terminated
    return found


def earlier(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The sections of a JSON that is there already, where GPU and versions, the revision too, are those of `found`."""

    def of(result: dict[str, Any]) -> tuple[Any, ...]:
        versions = dict(result["versions"])
        revision = versions.pop("revision").removesuffix("-dirty")  # it is, once this JSON has changed
        return result["machine"].get("gpu"), revision, versions

    try:
        old: dict[str, Any] = json.loads(path.read_text())
        return dict(old["sections"]) if of(old) == of(found) else {}
    except (OSError, ValueError, KeyError):
        return {}


def matmul_flops(found: dict[str, Any]) -> float | None:
    """The matrix rate that the calibration has measured, if it has run, here or for an earlier command."""
    rate: float | None = (
        found["sections"].get("calibration", {}).get("found", {}).get("cluster", {}).get("matmul_flops")
    )
    return rate


def shown(name: str, one: dict[str, Any]) -> None:
    """Prints how a section ended, its goals, and at once what a failed one printed last."""
    print(f"bench: {name}: {one['ended']}, {one['seconds']:.0f} s", flush=True)
    for goal, met in one.get("found", {}).get("goals", {}).items():
        print(f"bench: {name}: {goal}: {'met' if met else 'not met'}", flush=True)
    for line in one.get("last lines", []):
        print(f"    {line}", flush=True)


def process(section: Section, setting: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Runs one section, with all that it starts: how it ended, after how many seconds, and what it found."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        result = folder / "result.json"
        task = {
            "call": "train.bench.cuda.command:in_process",
            "section": section.call,
            "arguments": section.arguments,
            "setting": setting,
            "result": str(result),
        }
        begun = time.monotonic()
        started = Process(task, folder, "section", os.environ)
        try:
            status = started.popen.wait(limit_s)
            ended = "well" if status == 0 else f"with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"after its limit of {limit_s:.0f} s"
        except Terminated:
            ended = STOPPED
        finally:
            started.end()
        out: dict[str, Any] = {"ended": ended, "seconds": time.monotonic() - begun}
        if result.exists():
            out["found"] = json.loads(result.read_text())
        if ended != "well":
            out["last lines"] = started.tail()
        return out


def in_process(task: dict[str, Any]) -> None:
    """One section. What it has found is written after every part, whole or not at all, so that a time-out loses the
    part at hand alone."""

    def report(found: dict[str, Any]) -> None:
        write(Path(task["result"]), found)

    setting = Setting(**task["setting"])
    if setting.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
        setting = dataclasses.replace(setting, budget=here())
    function(task["section"])(setting, report, *task["arguments"])


BUDGET_S = 475.0
"""Seconds that it may take by itself, below ten minutes; `make gpu-check` gives it what its tests have left."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """All GPU figures, one section after the other, each in a process of its own; one JSON, rewritten after each."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs the same code on tiny models: a check of the command, not of the machine."""
    budget_s: float = BUDGET_S
    """Seconds for everything; sections that no time is left for are named in the JSON."""
    out: Path | None = None
    """The JSON; pictures go next to it. Default: docs/benchmarks/gpu.json, on the CPU runs/gpu_on_cpu.json."""
    sections: tuple[str, ...] = ()
    """The sections to run, by default all; their order is that of their value. What other sections have found stays in
    the JSON, where that is of the same GPU and versions."""
    skip_without_device: bool = False
    """End with success when this machine has no CUDA device, saying so."""

    @property
    def json(self) -> Path:
        default = ROOT / ("docs/benchmarks/gpu.json" if self.device == "cuda" else "runs/gpu_on_cpu.json")
        return self.out or default

    def __post_init__(self) -> None:
        if self.budget_s <= 0:
            raise ValueError(f"--budget-s {self.budget_s}: expected a positive number of seconds")
        for name in self.sections:
            if name not in SECTIONS:
                raise ValueError(f"--sections {name}: there is no such section; there are {', '.join(SECTIONS)}")


PACKAGE = "train.bench.cuda"
ROWS = ("llama2-70b/256", "llama2-7b/64", "llama2-34b/256", "llama2-13b/128", "llama2-34b/128", "llama3-8b/64")


class Section(NamedTuple):
    """A section of the report.

    call: `module:function`, of `(setting, report, *arguments)`, for at most `limit_s` seconds.
    """

    call: str
    arguments: tuple[str, ...]
    limit_s: float

    @property
    def includes(self) -> str:
        """Says what the figures are of: what its module says of itself."""
        return importlib.import_module(self.call.partition(":")[0]).__doc__ or ""


SECTIONS: dict[str, Section] = {
    "calibration": Section(f"{PACKAGE}.one_rank:calibrate", (), 60),
    "one rank, 8b": Section(f"{PACKAGE}.one_rank:run", ("8b",), 120),
    f"emulated, {ROWS[0]}": Section(f"{PACKAGE}.emulated:run", (ROWS[0],), 90),
    "one rank, 1b": Section(f"{PACKAGE}.one_rank:run", ("1b",), 90),
    "memory": Section(f"{PACKAGE}.memory:run", (), 90),
    "order": Section(f"{PACKAGE}.order:run", (), 60),
    **{f"emulated, {row}": Section(f"{PACKAGE}.emulated:run", (row,), 75) for row in ROWS[1:]},
    "levers": Section(f"{PACKAGE}.levers:run", (), 150),
}
"""name -> Section. The first one gives the others this device's matrix rate; without it they leave out MFU."""
