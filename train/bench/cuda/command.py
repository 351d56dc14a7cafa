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

import datetime
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
from typing import Any

import torch
import tyro

from train.bench import report
from train.bench.cuda.gpu_options import Gpu
from train.bench.cuda.sections import SECTIONS, Section
from train.bench.processes import Process, write

PROGRAM = "python -m train bench"
STOPPED = "stopped by SIGTERM"
LEAST_S = 10.0
"""A section is not begun with less time left."""
OWN = ("--budget-s", "--out", "--sections")


def wanted(argv: Sequence[str]) -> bool:
    """Whether `argv` asks for this command: `--device cuda` and nothing of the other bench, or an option of this."""
    if not argv or not argv[0].startswith("--"):
        return False
    words = {part for word in argv for part in word.split("=")}
    return bool(words & set(OWN)) or words - {"--skip-without-device"} == {"--device", "cuda"}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status: 1 where a section failed or this machine has no such device."""
    try:
        options = tyro.cli(Gpu, args=list(argv), prog=PROGRAM)
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
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": report.machine() | gpu(),
        "versions": report.versions() | {"cuda": torch.version.cuda, "nccl": nccl()},
        "budget_s": options.budget_s,
        "note": "tiny models on the CPU: a check of the command; times mean nothing" if options.device == "cpu" else "",
        "sections": {},
    }
    if options.sections:
        found["sections"] = earlier(options.json, found)
    told: list[str] = []
    for name in options.sections or sections:
        section, rate = sections[name], matmul_flops(found)
        left = options.budget_s - (time.monotonic() - begun)
        if left < LEAST_S:
            skipped = {"ended": "skipped", "why": f"{left:.0f} s of the budget were left"}
            found["sections"].setdefault(name, skipped)  # an earlier command may have found something
            print(f"bench: {name}: not run: {skipped['why']}", flush=True)
        else:
            setting = {"device": options.device, "pictures": str(options.json.parent), "matmul_flops": rate}
            before = [other for other in told if sections[other].includes == section.includes]
            print(f"bench: {name}\n{f'    as {before[0]}' if before else section.includes}", flush=True)
            told.append(name)
            when = {"date": found["date"], "command": command}
            one = process(section, setting, min(left, section.limit_s))
            found["sections"][name] = {"includes": section.includes._asdict(), **when, **one}
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
    """What the calibration has measured, if it has run, here or for an earlier command."""
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
            "module": section.module,
            "arguments": section.arguments,
            "setting": setting,
            "result": str(result),
        }
        begun = time.monotonic()
        started = Process("train.bench.cuda.section", task, folder, "section", os.environ)
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


def gpu() -> dict[str, Any]:
    """Of the GPU, where there is one: what the figures depend on."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver, largest clock, power limit": driver,
    }


def nccl() -> str | None:
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
